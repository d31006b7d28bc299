"""Finds a worker's processes by the names in their environment, in /proc.

`outfitter run` sets the variables, and processes inherit them, whatever becomes of their parents. A worker inside an
allocation replaces them by its own and adds the outer allocation's key to OUTFITTER_OUTER. The real user id must
be the worker's as well: otherwise any user of the machine could hold a device with a forged environment. A worker in
another user namespace knows only its user's id there. Of such a worker, only processes in that namespace are found.

A process that overwrites its initial environment is not found, and neither is one that the kernel does not let this
process read. Any process can do so, and can show memory of any size as its environment or its command line (PR_SET_MM
of prctl(2)). So we read no more than what execve(2) can have left there, and of other users' processes nothing.

All functions block for milliseconds: call them in a thread.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from outfitter_proto.keys import AllocationNames, allocation_names
from outfitter_proto.names import is_name
from outfitter_proto.support.descriptors import SCARCE
from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import (
    REFUSED,
    read_at_most,
    read_real_uid,
    real_uid,
    unwatchable,
    user_namespace,
)

ROUNDS = 20
"""How often one search lists the processes at most. Later rounds read only what an earlier one could not."""
SURE_ROUNDS = 2
"""Rounds in a row that must have met no process which had just ended. Such a process may have started another one
behind the reader's back. One round does not do: behind the largest pid the kernel goes on with the smallest."""
PAUSE_S = 0.001
"""Seconds between two rounds."""
LONGEST_COMMAND = 40
"""Most characters of a program's name."""
MOST_OF_COMMAND_LINE = 4096
"""Most bytes of a command line that are read."""
MOST_OF_ENVIRONMENT = 8 * 1024 * 1024
"""Bytes. execve(2) leaves 6 MiB at most, arguments included. Where there are more, they were put there later."""
LONGEST_VARIABLE = 32 * os.sysconf("SC_PAGE_SIZE")
"""Bytes: execve(2) takes no longer string."""
_SMALL = 64 * 1024
"""More bytes than a file in /proc has that only the kernel fills."""
_EXITING, _KERNEL_THREAD = 0x4, 0x0020_0000
"""PF_EXITING and PF_KTHREAD of proc(5) `/proc/<pid>/stat`."""
_FIELDS = (b"OUTFITTER_HOST", b"OUTFITTER_WORKER", b"OUTFITTER_INCARNATION")
_OUTER = b"OUTFITTER_OUTER"
"""Keys of outer allocations, separated by blanks."""


class Mark(NamedTuple):
    """What a worker's processes have in common: the allocation in their environment, and their real user id, as it is
    in the user namespace `user_ns`; None: in this process's."""

    host: str
    worker: str
    incarnation: str
    uid: int
    user_ns: int | None = None


class MarksOfHost:
    """The marks of all workers of a host, whoever their user is."""

    def __init__(self, host: str) -> None:
        self._host = host

    def __contains__(self, mark: object) -> bool:
        return isinstance(mark, Mark) and mark.host == self._host


class Survivor(NamedTuple):
    """A process that has the mark. `command`: the name of its program, without arguments, which may be secret."""

    pid: int
    command: str
    mark: Mark


class Search(NamedTuple):
    """The processes by mark. `refused`: users with processes that this process may not read. `missed`: why there may be
    others; empty if there are certainly none."""

    survivors: dict[Mark, list[Survivor]]
    refused: frozenset[int]
    missed: str = ""


def search(marks: Collection[Mark] | MarksOfHost) -> Search:
    """All other processes with one of these marks. This one may have inherited one: it is no worker.

    Raises:
        OSError: /proc cannot be listed, or no file descriptor or no memory is left.
    """
    with _memory_is_scarce():
        return _search(marks)


def _search(marks: Collection[Mark] | MarksOfHost) -> Search:
    survivors: defaultdict[Mark, list[Survivor]] = defaultdict(list)
    refused: set[int] = set()
    users = _users(marks)
    read: set[int] = {os.getpid()}
    sure_rounds, missed = 0, ""
    for count in range(ROUNDS):
        if count:
            time.sleep(PAUSE_S)
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - a path is slower
        sure_rounds += 1
        for pid in pids - read:
            try:
                found = _marked(pid, marks, users, refused)
            except (BlockingIOError, ProcessLookupError) as error:
                if isinstance(error, ProcessLookupError):
                    read.add(pid)
                if _may_be_of(pid, users):
                    sure_rounds, missed = 0, str(error)
                continue
            read.add(pid)
            for survivor in found:
                survivors[survivor.mark].append(survivor)
        if sure_rounds == SURE_ROUNDS:
            return Search(survivors, frozenset(refused))
    return Search(survivors, frozenset(refused), missed)


def _users(marks: Collection[Mark] | MarksOfHost) -> set[int] | None:
    """The users that processes with these marks have here; None: it may be any."""
    if isinstance(marks, MarksOfHost) or any(mark.user_ns is not None for mark in marks):
        return None
    return {mark.uid for mark in marks}


@contextmanager
def _memory_is_scarce() -> Iterator[None]:
    """Make the lack of memory an error of the system call that it may as well have been."""
    try:
        yield
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error


def _may_be_of(pid: int, users: Collection[int] | None) -> bool:
    """Whether a process that could not be read may be one of these users' (None: of all users)."""
    if users is None:
        return True
    uid = real_uid(pid)
    return uid is None or uid in users


def _marked(pid: int, marks: Container[Mark], users: Collection[int] | None, refused: set[int]) -> list[Survivor]:
    """The process with this pid, once for each of the marks that it has. `users`: only processes of these are read
    (None: of all). Adds its user to `refused` if it may not be read.

    Raises:
        BlockingIOError: it is about to execute a program, or to end.
        ProcessLookupError: it has ended.
    """
    try:
        with _ended_is_nothing():
            if users is not None and read_real_uid(pid) not in users:
                return []
            environ = _environment(pid)
            if not ((_FIELDS[-1] in environ or _OUTER in environ) and (found := _marks(pid, environ, marks))):
                return []
            command = _command(pid)
            return [Survivor(pid, command, mark) for mark in found]
    except PermissionError:
        with suppress(OSError):
            uid = real_uid(pid)  # the folder of a process that is not dumpable is root's
            refused.add(os.stat(f"/proc/{pid}").st_uid if uid is None else uid)  # noqa: PTH116 - a path is slower
        return []
    raise ProcessLookupError(f"processes such as {pid} end before they are read")


def open_survivor(survivor: Survivor) -> int | None:
    """A descriptor of the process (pidfd_open(2)); None if it has ended.

    Raises:
        OSError: no file descriptor or no memory is left, or the process may not be read now.
    """
    with _memory_is_scarce(), _ended_is_nothing():
        pidfd = _opened(survivor.pid)
        try:
            # only now: what has not ended by now has had its pid since the descriptor was opened
            is_same = bool(_marks(survivor.pid, _environment(survivor.pid), [survivor.mark]))
        except BaseException:
            os.close(pidfd)
            raise
        if is_same:
            return pidfd
        os.close(pidfd)
    return None


def _opened(pid: int) -> int:
    """A descriptor of a process.

    Raises:
        PermissionError: the kernel, or a filter of system calls, refuses the call.
        OSError: the process has ended, or no descriptor is left.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in REFUSED:  # ENOSYS among them: the process has not ended because of that
            raise PermissionError(error.errno, unwatchable(pid, error)) from error
        raise


def send(survivors: Iterable[Survivor], number: signal.Signals) -> None:
    """Send a signal to these processes, as far as this process may.

    Raises:
        OSError: no file descriptor or no memory is left.
    """
    for survivor in survivors:
        with suppress(PermissionError, BlockingIOError):
            pidfd = open_survivor(survivor)
            if pidfd is not None:
                try:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, number)
                finally:
                    os.close(pidfd)


@contextmanager
def _ended_is_nothing() -> Iterator[None]:
    """Suppress the errors of processes that have ended."""
    try:
        yield
    except (PermissionError, BlockingIOError):
        raise
    except OSError as error:
        if error.errno in SCARCE:
            raise


def _environment(pid: int) -> bytes:
    """A process's initial environment; nothing if it is one of the kernel's. Threads may outlive the main thread, and
    only they have it then.

    Raises:
        BlockingIOError: it is in execve(2) or about to end, and the kernel shows nothing for a moment.
        OSError: it has ended, or may not be read.
    """
    process = f"/proc/{pid}"
    try:
        return _read_environment(process)
    except BlockingIOError:
        status = _status(process)
        if not status.has_ended:
            raise
    if status.threads < 2:
        raise ProcessLookupError(f"process {pid} has ended")
    for thread in os.listdir(f"{process}/task"):  # noqa: PTH208 - a path is slower
        with suppress(BlockingIOError, FileNotFoundError, ProcessLookupError):
            if thread != str(pid):
                return _read_environment(f"{process}/task/{thread}")
    raise BlockingIOError(f"the threads of process {pid} change")


def _read_environment(folder: str) -> bytes:
    """The initial environment of a process or thread, from its folder in /proc; nothing if it is larger than one can
    be."""
    for _ in range(2):  # after the first look it may have executed a program
        refusal = None
        try:
            if content := read_at_most(f"{folder}/environ", MOST_OF_ENVIRONMENT + 1):
                return content if len(content) <= MOST_OF_ENVIRONMENT else b""
        except (PermissionError, ProcessLookupError) as error:
            refusal = error
        status = _status(folder)
        if status.flags & _KERNEL_THREAD:
            return b""
        if status.flags & _EXITING:  # its memory is gone, and the file is root's
            raise BlockingIOError(f"{folder} is about to end")
        if refusal is not None:
            raise refusal
        if not status.environment_end:
            raise BlockingIOError(f"{folder} is about to execute a program")
    return b""


class _Status(NamedTuple):
    """What proc(5) `/proc/<pid>/stat` says about a process and its main thread, or about a thread."""

    has_ended: bool
    flags: int
    threads: int
    environment_end: int


def _status(folder: str) -> _Status:
    fields = read_at_most(f"{folder}/stat", _SMALL).rpartition(b")")[2].split()
    return _Status(fields[0] in (b"Z", b"X"), *(int(fields[number - 3]) for number in (9, 20, 51)))


def _marks(pid: int, environ: bytes, marks: Container[Mark]) -> list[Mark]:
    """Those of `marks` that a process with this environment has."""
    allocations, users = _allocations(environ), _users_of(pid)
    found = (Mark(*names, *user) for names in allocations for user in users)
    return [mark for mark in found if mark in marks]


def _allocations(environ: bytes) -> set[AllocationNames]:
    """The allocations that an environment names."""
    host, worker, incarnation = (_variable(environ, name) for name in _FIELDS)
    allocations = {AllocationNames(host, worker, incarnation)}
    for key in _variable(environ, _OUTER).split():
        with suppress(ValueError):
            allocations.add(allocation_names(key))
    return {names for names in allocations if all(map(is_name, names))}


def allocations_of(pid: int) -> set[AllocationNames]:
    """The allocations that a process names in its initial environment; none if it may not be read."""
    with suppress(OSError, MemoryError):
        return _allocations(_environment(pid))
    return set()


def _variable(environ: bytes, name: bytes) -> str:
    """The value of a variable; nothing if there is none, or none that execve(2) takes."""
    if environ.startswith(name + b"="):
        start = 0
    elif not (start := environ.find(b"\0" + name + b"=") + 1):
        return ""
    end = environ.find(b"\0", start, start + LONGEST_VARIABLE)
    if end < 0 and len(environ) - start >= LONGEST_VARIABLE:
        return ""
    return os.fsdecode(environ[start + len(name) + 1 : end if end >= 0 else len(environ)])


def _users_of(pid: int) -> list[tuple[int, int | None]]:
    """A process's real user id in this process's user namespace (None), and in its own if that is another one.

    Raises:
        OSError: it has ended, or may not be read.
    """
    uid, namespace = read_real_uid(pid), user_namespace(pid)
    users: list[tuple[int, int | None]] = [(uid, None)]
    if namespace not in (None, user_namespace()):
        for line in read_at_most(f"/proc/{pid}/uid_map", _SMALL).splitlines():
            first, first_here, count = map(int, line.split())
            if first_here <= uid < first_here + count:
                users.append((first + uid - first_here, namespace))
    return users


def _command(pid: int) -> str:
    """The name of a process's program."""
    name = b""
    with suppress(OSError):  # there is none when the main thread has ended
        name = read_at_most(f"/proc/{pid}/cmdline", MOST_OF_COMMAND_LINE).partition(b"\0")[0].rpartition(b"/")[2]
    with suppress(OSError):
        name = name or read_at_most(f"/proc/{pid}/comm", MOST_OF_COMMAND_LINE).strip()
    name = name or b"?"
    return printable(name.decode("utf-8", "backslashreplace"))[:LONGEST_COMMAND]
