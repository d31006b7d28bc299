"""Finds a worker's processes by the names in their environment, in /proc.

`outfitter run` sets the variables, and processes inherit them, whatever becomes of their parents. A worker inside an
allocation replaces them by its own and adds the outer allocation's key to OUTFITTER_OUTER. The real user id must
be the worker's as well: otherwise any user of the machine could hold a device with a forged environment. A process that
overwrites its initial environment is not found, and neither is one that the kernel does not let this process read.

All functions block for milliseconds: call them in a thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from outfitter_proto.keys import allocation_names
from outfitter_proto.support.descriptors import SCARCE
from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import read_real_uid

ROUNDS = 10
"""How often one search lists the processes. Later rounds read only what an earlier one could not: a process may start
another one and end while we read."""
PAUSE_S = 0.001
"""Seconds between two rounds."""
LONGEST_COMMAND = 40
"""Most characters of a program's name."""
_KERNEL_THREAD = 0x0020_0000
"""PF_KTHREAD in the flags of proc(5) `/proc/<pid>/stat`."""
_FIELDS = (b"OUTFITTER_HOST", b"OUTFITTER_WORKER", b"OUTFITTER_INCARNATION")
_OUTER = b"OUTFITTER_OUTER"
"""Keys of outer allocations, separated by blanks."""


class Mark(NamedTuple):
    """What a worker's processes have in common: the allocation in their environment, and their real user id."""

    host: str
    worker: str
    incarnation: str
    uid: int


class Survivor(NamedTuple):
    """A process that has the mark. `command`: the name of its program, without arguments, which may be secret."""

    pid: int
    command: str
    mark: Mark


class Search(NamedTuple):
    """The processes by mark. `refused`: users with processes that this process may not read."""

    survivors: dict[Mark, list[Survivor]]
    refused: frozenset[int]


def search(marks: Collection[Mark]) -> Search:
    """All other processes with one of these marks. This one may have inherited one: it is no worker.

    Raises:
        OSError: /proc cannot be listed, or no file descriptor is left.
    """
    survivors: defaultdict[Mark, list[Survivor]] = defaultdict(list)
    refused: set[int] = set()
    read: set[int] = {os.getpid()}
    for count in range(ROUNDS):
        if count:
            time.sleep(PAUSE_S)
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}  # noqa: PTH208 - a path is slower
        if pids <= read:
            break
        for pid in pids - read:
            try:
                found = _marked(pid, marks, refused)
            except BlockingIOError:
                continue
            read.add(pid)
            for survivor in found:
                survivors[survivor.mark].append(survivor)
    return Search(survivors, frozenset(refused))


def _marked(pid: int, marks: Collection[Mark], refused: set[int]) -> list[Survivor]:
    """The process with this pid, once for each of the marks that it has. Adds its user to `refused` if it may not be
    read.

    Raises:
        BlockingIOError: it is about to execute a program.
    """
    try:
        with _ended_is_nothing():
            environ = _environment(pid)
            if (_FIELDS[-1] in environ or _OUTER in environ) and (found := _marks(pid, environ, marks)):
                command = _command(pid)
                return [Survivor(pid, command, mark) for mark in found]
    except PermissionError:
        with suppress(OSError):
            refused.add(os.stat(f"/proc/{pid}").st_uid)  # noqa: PTH116 - a path is slower
    return []


def open_survivor(survivor: Survivor) -> int | None:
    """A descriptor of the process (pidfd_open(2)); None if it has ended.

    Raises:
        OSError: no file descriptor is left, or the process may not be read now.
    """
    with _ended_is_nothing():
        pidfd = os.pidfd_open(survivor.pid)
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


def send(survivors: Iterable[Survivor], number: signal.Signals) -> None:
    """Send a signal to these processes, as far as this process may.

    Raises:
        OSError: no file descriptor is left.
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
    """A process's initial environment; nothing if it has ended or is one of the kernel's.

    Raises:
        BlockingIOError: it is in execve(2), and the kernel shows nothing for a moment.
    """
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123 - a path is slower
        content = file.readall()
    if not content and _has_memory(pid):
        raise BlockingIOError(f"process {pid} is about to execute a program")
    return content


def _has_memory(pid: int) -> bool:
    """Whether a process is neither a zombie nor the kernel's, by proc(5) `/proc/<pid>/stat`."""
    state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return state not in (b"Z", b"X") and not int(rest[5]) & _KERNEL_THREAD


def _marks(pid: int, environ: bytes, marks: Collection[Mark]) -> list[Mark]:
    """Those of `marks` that a process with this environment has."""
    values: dict[bytes, str] = {}
    for entry in environ.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name in _FIELDS or name == _OUTER:
            values.setdefault(name, os.fsdecode(value))
    uid = read_real_uid(pid)
    host, worker, incarnation = (values.get(name, "") for name in _FIELDS)
    found = {Mark(host, worker, incarnation, uid)}
    for key in values.get(_OUTER, "").split():
        with suppress(ValueError):
            found.add(Mark(*allocation_names(key), uid))
    return [mark for mark in found if mark in marks]


def _command(pid: int) -> str:
    """The name of a process's program."""
    try:
        first = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        name = first.rpartition(b"/")[2] or Path(f"/proc/{pid}/comm").read_bytes().strip()
    except OSError:
        name = b"?"
    return printable(name.decode("utf-8", "backslashreplace"))[:LONGEST_COMMAND]
