"""Who uses a GPU, out of the processes that NVIDIA's tools list on it.

A list of compute processes and MPS clients is meant, and not the one of graphics: a process that only draws is a
display's, whatever its name. The server of CUDA's Multi-Process Service stays without a client and uses nothing
(NVIDIA's MPS documentation, "nvidia-cuda-mps-server").
"""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_drivers.api import CannotTell, DeviceUser, Users
from outfitter_proto.support.printable import printable

MPS_SERVER = "nvidia-cuda-mps-server"
MOST_USERS = 64
"""Most processes of one device that count. A GPU has some dozens at most."""
LONGEST_NAME = 40
"""Most characters of a program's name."""


def device_users(processes: Iterable[tuple[int | None, str | None]] | CannotTell) -> Users:
    """The users of one device, by the pid and the path (or the name) of each process on it. No pid, or 0: somebody is
    there whom nobody can name. The result has each once, in an order that does not change."""
    if isinstance(processes, CannotTell):
        return processes
    named: dict[int, DeviceUser] = {}
    unnamed: DeviceUser | None = None
    for pid, path in processes:
        program = program_name(path or "")
        if program == MPS_SERVER:
            continue
        if pid is None or pid <= 0:
            unnamed = unnamed or DeviceUser(program=program or None)
        else:
            named.setdefault(pid, DeviceUser(pid=pid, program=program or None))
    users = [named[pid] for pid in sorted(named)[:MOST_USERS]]
    return tuple(users if unnamed is None else [*users, unnamed])


def program_name(path: str) -> str:
    """The name of a program, without its folder and without signs that a terminal obeys."""
    return printable(path.rpartition("/")[2])[:LONGEST_NAME]
