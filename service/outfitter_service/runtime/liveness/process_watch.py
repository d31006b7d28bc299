"""Watches owner processes: a file descriptor of the kernel reports their death at once (pidfd_open(2)).

Pid, start time, PID namespace and boot identify an owner. process_table.py has the processes.

The watch never guesses. If it cannot compare one of these (another namespace, another machine, a process that /proc
hides), the owner is *unwatched*, and only its lease ends the allocation. If a process with that pid exists, its end
still counts as the owner's end: the owner has either ended before, or is that process.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Owner, Unwatched
from outfitter_proto.support.descriptors import SCARCE
from outfitter_service.runtime.liveness.process_table import POLLED_AT_ONCE, Process, ProcessTable, start_seen

REASONS = {
    Unwatched.SCOPE: "this manager watches no processes",
    Unwatched.MACHINE: "it is of another machine, or of another boot",
    Unwatched.PID_NAMESPACE: "it is in another PID namespace",
    Unwatched.TIME_NAMESPACE: "its start time cannot be compared, it may be in another time namespace",
    Unwatched.HIDDEN: "/proc does not show the process to the manager",
    Unwatched.NO_PROCESS: "its pid is a thread, not a process",
    Unwatched.REFUSED: "the kernel does not let the manager watch it",
    Unwatched.DESCRIPTORS: "the machine is out of file descriptors",
}


class _GoneError(Exception):
    """The owner is dead. The message has the proof."""


class ProcessWatch:
    """Watches the owners of live allocations. `died(key, detail)` is called once per watched allocation."""

    def __init__(
        self,
        *,
        boot_id: str | None,
        pid_ns: int | None,
        time_ns: int | None,
        earlier_boot_id: str | None,
        died: Callable[[AllocationKey, str], None],
    ) -> None:
        """`boot_id`, `pid_ns` and `time_ns` are as in `Identity`. `earlier_boot_id` is the boot in which this machine's
        previous manager worked: owners of that boot have died with it."""
        self._boot_id = boot_id
        self._pid_ns = pid_ns
        self._time_ns = time_ns
        self._earlier_boot_id = earlier_boot_id if earlier_boot_id != boot_id else None
        self._died = died
        self._processes = ProcessTable(self._ended)
        self._unwatched: dict[AllocationKey, Unwatched] = {}
        self._waiting: dict[AllocationKey, Owner] = {}

    def __contains__(self, key: AllocationKey) -> bool:
        """Whether the allocation's owner is watched and identified."""
        return key in self._processes and key not in self._unwatched

    def __len__(self) -> int:
        """How many processes are watched."""
        return len(self._processes)

    @property
    def polled(self) -> int:
        """How many of them are polled in turns."""
        return self._processes.polled

    @property
    def must_poll(self) -> bool:
        """Whether `poll` has something to check."""
        return bool(self._processes.polled or self._waiting)

    def keys(self) -> set[AllocationKey]:
        """All allocations with an owner, watched or not."""
        return self._processes.keys() | self._unwatched.keys()

    def reason(self, key: AllocationKey) -> Unwatched | None:
        """Why the allocation's owner is not watched; None: it is watched, or the allocation has no owner."""
        return self._unwatched.get(key)

    def unwatched(self) -> Counter[Unwatched]:
        """How many allocations' owners are not watched, by reason."""
        return Counter(self._unwatched.values())

    def watch(self, key: AllocationKey, owner: Owner) -> bool:
        """Watch an owner. Returns whether exactly this process is watched. A dead owner is reported at once."""
        if key in self._processes or key in self._unwatched:
            return key not in self._unwatched
        try:
            reason = self._out_of_reach(owner) or self._attach(key, owner)
        except _GoneError as gone:
            self._died(key, str(gone))
            return True
        if reason is not None:
            self._unwatched[key] = reason
        return reason is None

    def poll(self) -> list[AllocationKey]:
        """Poll some owners without a descriptor, and report those that have ended. Returns the allocations whose owner
        is identified only now, or cannot be identified."""
        self._processes.poll()
        resolved: list[AllocationKey] = []
        for key, owner in list(self._waiting.items())[:POLLED_AT_ONCE]:
            del self._waiting[key], self._unwatched[key]
            self.watch(key, owner)
            if key in self._waiting:
                break
            resolved.append(key)
        return resolved

    def forget(self, key: AllocationKey) -> None:
        """The allocation has ended."""
        self._unwatched.pop(key, None)
        self._waiting.pop(key, None)
        self._processes.detach(key)

    def close(self) -> None:
        """Stop watching."""
        for key in self.keys():
            self.forget(key)

    # --- identification ---

    def _out_of_reach(self, owner: Owner) -> Unwatched | None:
        """Why this manager cannot see the owner's processes at all, or None.

        Raises:
            _GoneError: the owner died with an earlier boot.
        """
        if self._earlier_boot_id is not None and owner.boot_id == self._earlier_boot_id:
            raise _GoneError(f"process {owner.pid} ended with the machine's restart")
        if self._boot_id is None:
            return Unwatched.SCOPE
        if owner.boot_id != self._boot_id:
            return Unwatched.MACHINE
        return None if owner.pid_ns == self._pid_ns else Unwatched.PID_NAMESPACE

    def _attach(self, key: AllocationKey, owner: Owner) -> Unwatched | None:
        """Watch the process with the owner's pid. Returns why it may be another process.

        Raises:
            _GoneError: it is another process, or the process does not exist.
        """
        try:
            process = self._processes.find(owner.pid)
        except (ProcessLookupError, OverflowError):  # OverflowError: no process can have this pid
            raise _GoneError(f"process {owner.pid} is gone") from None
        except OSError as error:
            return self._cannot_open(key, owner, error)
        try:
            reason = self._compare(owner, process.started)
        except _GoneError:
            self._processes.drop_unnamed(process)
            raise
        self._processes.attach(key, process)
        return reason

    def _cannot_open(self, key: AllocationKey, owner: Owner, error: OSError) -> Unwatched:
        """Why the owner is not watched after this error.

        Raises:
            _GoneError: the pid is another process's thread now.
        """
        if error.errno in SCARCE:
            self._waiting[key] = owner
            return Unwatched.DESCRIPTORS
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            return Unwatched.REFUSED
        # the pid belongs to a thread: of another process that got this pid, unless the owner is a thread itself
        self._compare(owner, start_seen(owner.pid))
        return Unwatched.NO_PROCESS

    def _compare(self, owner: Owner, started: int | None) -> Unwatched | None:
        """Why a process with this start time may not be the owner; None if it is.

        Raises:
            _GoneError: it is another process.
        """
        has_time_ns = owner.time_ns not in (UNSET, None)
        if has_time_ns and owner.time_ns != self._time_ns:
            return Unwatched.TIME_NAMESPACE
        if started is None:
            return Unwatched.HIDDEN
        if started == owner.start_ticks:
            return None
        if not has_time_ns and self._time_ns is not None:
            return Unwatched.TIME_NAMESPACE  # the clock of its start time is unknown
        raise _GoneError(f"process {owner.pid} is gone (its pid belongs to another process now)")

    def _ended(self, process: Process) -> None:
        for key in list(process.keys):
            self.forget(key)
            self._died(key, f"process {process.pid} ended")
