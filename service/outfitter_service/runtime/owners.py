"""Watching owner processes: their death is seen at once, by a file descriptor of the kernel (pidfd_open(2)).

An owner is identified by pid, start time, PID namespace and boot. Where any of these cannot be compared (another
namespace, another machine), it is not watched, and leases alone decide. It never guesses.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable

from outfitter_proto.processes import start_ticks
from outfitter_proto.records import Owner


class OwnerWatch:
    """Watches the owners of live allocations. `died(key, detail)` is called once per watched allocation."""

    def __init__(
        self, *, boot_id: str | None, pid_ns: int | None, earlier_boot_id: str | None, died: Callable[[str, str], None]
    ) -> None:
        """`earlier_boot_id` is the boot in which this machine's previous manager worked: owners of that boot
        have died with it."""
        self._boot_id = boot_id
        self._pid_ns = pid_ns
        self._earlier_boot_id = earlier_boot_id if earlier_boot_id != boot_id else None
        self._died = died
        self._pidfds: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._pidfds

    def __len__(self) -> int:
        return len(self._pidfds)

    def keys(self) -> set[str]:
        return set(self._pidfds)

    def watch(self, key: str, owner: Owner) -> bool:
        """Begin to watch; False if this owner cannot be watched from here. A dead one is reported at once."""
        if key in self._pidfds:
            return True
        if self._earlier_boot_id is not None and owner.boot_id == self._earlier_boot_id:
            self._died(key, f"process {owner.pid} ended with the machine's restart")
            return True
        if self._boot_id is None or owner.boot_id != self._boot_id or owner.pid_ns != self._pid_ns:
            return False
        try:
            pidfd = os.pidfd_open(owner.pid)
        except (ProcessLookupError, OverflowError):  # the latter: a number that no process has
            self._died(key, f"process {owner.pid} is gone")
            return True
        except OSError:
            return False
        # the descriptor is open, so the pid cannot be given to another process between the two looks
        started = start_ticks(owner.pid)
        if started is None and not _has_ended(pidfd):
            # /proc hides other users' processes (hidepid): who this is cannot be known
            os.close(pidfd)
            return False
        if started != owner.start_ticks:
            os.close(pidfd)
            instead = " (its pid belongs to another process now)" if started is not None else ""
            self._died(key, f"process {owner.pid} is gone{instead}")
            return True
        self._pidfds[key] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, key, owner.pid)
        return True

    def forget(self, key: str) -> None:
        """The allocation is over."""
        pidfd = self._pidfds.pop(key, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for key in list(self._pidfds):
            self.forget(key)

    def _ended(self, key: str, pid: int) -> None:
        self.forget(key)
        self._died(key, f"process {pid} ended")


def _has_ended(pidfd: int) -> bool:
    """A process's descriptor is readable once it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
