"""The processes that a manager watches: one entry each, however many allocations name the process.

The manager holds a descriptor of each process, up to a limit (descriptors.py). It polls further processes in turns, and
notices their end some seconds later.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections import OrderedDict
from collections.abc import Callable, Set

from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_proto.support.descriptors import SCARCE
from outfitter_proto.support.processes import read_start_ticks
from outfitter_service.runtime.liveness import descriptors

POLLED_AT_ONCE = 100
"""Processes without a descriptor that are polled in one call; each costs some 55 µs."""


class Process(Struct):
    """A process, and the `keys` of the allocations that name it. `started`: its start time in ticks, as /proc shows it
    to the manager; None: /proc does not show it. `pidfd`: its descriptor; None: it is polled in turns."""

    pid: int
    started: int | None
    pidfd: int | None
    keys: set[AllocationKey]


class ProcessTable:
    """Processes by pid, and by the allocations that name them."""

    def __init__(self, ended: Callable[[Process], None]) -> None:
        """`ended` is called with a process that has ended. It must detach the keys of that process."""
        self._ended = ended
        self._processes: dict[int, Process] = {}
        self._pids: dict[AllocationKey, int] = {}
        self._turns: OrderedDict[int, Process] = OrderedDict()

    def __contains__(self, key: AllocationKey) -> bool:
        """Whether this allocation names a process of the table."""
        return key in self._pids

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def polled(self) -> int:
        """How many processes are polled in turns."""
        return len(self._turns)

    def keys(self) -> Set[AllocationKey]:
        """The allocations that name a process of the table."""
        return self._pids.keys()

    def find(self, pid: int) -> Process:
        """The process that has this pid now. From now on it is watched.

        Raises:
            ProcessLookupError: the process does not exist, or it has ended.
            OverflowError: no process can have this pid.
            OSError: the kernel gives no descriptor of it.
        """
        process = self._processes.get(pid)
        return process if process is not None and self._lives(process) else self._open(pid)

    def attach(self, key: AllocationKey, process: Process) -> None:
        """This allocation names the process."""
        process.keys.add(key)
        self._pids[key] = process.pid

    def detach(self, key: AllocationKey) -> None:
        """This allocation names no process any more. A process that no allocation names is not watched."""
        pid = self._pids.pop(key, None)
        if pid is not None:
            process = self._processes[pid]
            process.keys.discard(key)
            self.drop_unnamed(process)

    def drop_unnamed(self, process: Process) -> None:
        """Stop watching this process, unless an allocation names it."""
        if not process.keys:
            self._unwatch(process)

    def poll(self) -> None:
        """Check the next processes without a descriptor, `POLLED_AT_ONCE` of them."""
        for _ in range(min(POLLED_AT_ONCE, len(self._turns))):
            if self._turns:
                pid, process = next(iter(self._turns.items()))
                self._turns.move_to_end(pid)
                self._lives(process)

    def _lives(self, process: Process) -> bool:
        """Whether the process has not ended, as far as the kernel shows. Reports an end."""
        if process.pidfd is not None:
            ended = _has_ended(process.pidfd)
        else:
            try:
                pidfd, started = _open_pidfd(process.pid)
            except ProcessLookupError:
                ended = True
            except OSError as error:
                ended = error.errno in (errno.EINVAL, errno.ENOENT)  # the pid is a thread's now
            else:
                ended = None not in (started, process.started) and started != process.started
                if ended:
                    os.close(pidfd)
                else:
                    self._hold(process, pidfd)
        if ended:
            self._ended(process)
        return not ended

    def _open(self, pid: int) -> Process:
        pidfd, started = _open_pidfd(pid)
        process = self._processes[pid] = self._turns[pid] = Process(pid, started, None, set())
        self._hold(process, pidfd)
        return process

    def _hold(self, process: Process, pidfd: int) -> None:
        """Keep the descriptor of a process that is polled in turns, if the limit allows one more."""
        if len(self._processes) - len(self._turns) >= descriptors.for_owners():
            os.close(pidfd)
            return
        asyncio.get_running_loop().add_reader(pidfd, self._ended, process)
        process.pidfd = pidfd
        del self._turns[process.pid]

    def _unwatch(self, process: Process) -> None:
        del self._processes[process.pid]
        self._turns.pop(process.pid, None)
        if process.pidfd is not None:
            asyncio.get_running_loop().remove_reader(process.pidfd)
            os.close(process.pidfd)
            process.pidfd = None


def _open_pidfd(pid: int) -> tuple[int, int | None]:
    """A descriptor of the process that has this pid, and its start time; None: /proc does not show it.

    Raises:
        ProcessLookupError: the process does not exist, or it has ended.
        OSError: the kernel gives no descriptor of it.
    """
    pidfd = os.pidfd_open(pid)
    try:
        started = start_seen(pid)
        # only now: a process that has not ended by now has had its pid since the descriptor was opened
        if _has_ended(pidfd):
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
    except BaseException:
        os.close(pidfd)
        raise
    return pidfd, started


def start_seen(pid: int) -> int | None:
    """The start time of the process with this pid, in ticks; None: /proc does not show it.

    Raises:
        OSError: no descriptor is left to read /proc with.
    """
    try:
        return read_start_ticks(pid)
    except ValueError:
        return None
    except OSError as error:
        if error.errno in SCARCE:
            raise
        return None


def _has_ended(pidfd: int) -> bool:
    """Whether the process has ended: then its descriptor is readable."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
