"""Processes that use devices, as /proc shows them to the manager: what they descend from, and whose they are.

All functions block for some milliseconds: call them in a thread.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterable
from typing import NamedTuple

from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import read_at_most
from outfitter_service.runtime.survivors.processes import allocations_of

MOST_ANCESTORS = 128
"""How far a process's ancestors are followed."""
LONGEST_NAME = 40
"""Most characters of the name of a program or a user."""
_SMALL = 64 * 1024

ProcessIdentity = tuple[int, int]
"""A process's pid and its start time in ticks, as in `records.Owner`."""


class RunningProcess(NamedTuple):
    """A process that runs. `lineage`: its own identity, then those of its ancestors. `allocations`: those that its
    environment names."""

    uid: int
    program: str
    lineage: tuple[ProcessIdentity, ...]
    allocations: frozenset[AllocationKey]

    @property
    def identity(self) -> ProcessIdentity:
        return self.lineage[0]


class Unseen(NamedTuple):
    """A process of which the manager cannot tell which one it is. `why`: for people."""

    why: str


Found = RunningProcess | Unseen | None
"""None: no process with this pid runs here."""


def find(pids: Iterable[int]) -> dict[int, Found]:
    """The processes with these pids now."""
    return {pid: _found(pid) for pid in pids}


def _found(pid: int) -> Found:
    try:
        stat = _stat(pid)
        if stat is None:
            return None
        status = _fields(pid)
        if len(status.get(b"NSpid", b"").split()) > 1:
            return Unseen(f"process {pid} is in another PID namespace")
        return RunningProcess(
            uid=int(status[b"Uid"].split()[0]),
            program=printable(status[b"Name"].strip().decode("utf-8", "replace"))[:LONGEST_NAME],
            lineage=_lineage(pid, *stat),
            allocations=frozenset(allocation_key(*names) for names in allocations_of(pid)),
        )
    except (FileNotFoundError, ProcessLookupError):
        return Unseen(f"/proc does not show process {pid} to the manager") if _exists(pid) else None
    except OSError as error:
        return Unseen(f"process {pid} cannot be read: {error.strerror or error}")
    except (LookupError, ValueError):
        return Unseen(f"/proc says nothing useful of process {pid}")


def _stat(pid: int) -> ProcessIdentity | None:
    """The parent and the start time in proc(5) `/proc/<pid>/stat`; None: the process has ended, as zombies have."""
    state, parent, *rest = read_at_most(f"/proc/{pid}/stat", _SMALL).rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else (int(parent), int(rest[17]))


def _fields(pid: int) -> dict[bytes, bytes]:
    lines = read_at_most(f"/proc/{pid}/status", _SMALL).splitlines()
    return {name: value for name, _, value in (line.partition(b":") for line in lines)}


def _lineage(pid: int, parent: int, started: int) -> tuple[ProcessIdentity, ...]:
    """A process and its ancestors. One that started after its child is none: its pid was given away meanwhile."""
    lineage = [(pid, started)]
    while parent > 0 and len(lineage) <= MOST_ANCESTORS:
        try:
            stat = _stat(parent)
        except (OSError, ValueError):
            break
        if stat is None or stat[1] > lineage[-1][1]:
            break
        lineage.append((parent, stat[1]))
        parent = stat[0]
    return tuple(lineage)


def _exists(pid: int) -> bool:
    """Whether there is such a process, although /proc does not show it (`hidepid` of proc(5))."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    except OverflowError:
        return False
    return True


def user_name(uid: int) -> str:
    """The name of a user of the machine, or its number where it has none. The machine's name service answers."""
    try:
        return printable(pwd.getpwuid(uid).pw_name)[:LONGEST_NAME]
    except (KeyError, OSError):
        return f"uid {uid}"
