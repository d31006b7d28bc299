"""Asks the managers of this machine to let go of NVIDIA's GPUs, which cannot be reset or partitioned otherwise.

Whoever has NVML open is found by its command line, and gets a signal. It lets go, and its manager opens NVML no more
before the sender has ended. So a sender that is killed leaves nothing behind that must be undone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from outfitter_drivers.nvidia.child import MODULE, RELEASE
from outfitter_proto.support.printable import printable
from outfitter_proto.support.processes import pid_namespace, read_at_most

NODES = "/dev/nvidia"
"""How the names of NVIDIA's nodes begin: `/dev/nvidia0`, `/dev/nvidiactl`, …"""
_COMMAND_BYTES = 4096
_MOST_PROCESSES = 100_000
_LONGEST_NAME = 40


class Holder(Struct, frozen=True):
    """A process that has one of NVIDIA's nodes open."""

    pid: int
    name: str


class RefusedError(Exception):
    """A process cannot be asked. The message says which one, and by whom it could be."""


def nvml_processes() -> list[int]:
    """The processes of this machine's managers that have NVML open, as far as this process sees them."""
    return [pid for pid in _pids() if MODULE in _command(pid) and pid != os.getpid()]


def ask(pid: int) -> None:
    """Ask one of them to let go for this process.

    Raises:
        RefusedError: it is another user's, or in another PID namespace, where it cannot tell when this process ends.
    """
    if pid_namespace(pid) not in (None, pid_namespace()):
        raise RefusedError(f"process {pid} is in another PID namespace; run this command in its manager's container")
    try:
        os.kill(pid, RELEASE)
    except PermissionError as error:
        raise RefusedError(
            f"process {pid} is another user's; run this command as root, or as its manager's user"
        ) from (error)
    except ProcessLookupError:
        return


def holders() -> list[Holder]:
    """Who else has NVIDIA's nodes in /dev open, as far as this user may see it."""
    return [
        Holder(pid, printable(_command(pid)[0].rpartition("/")[2])[:_LONGEST_NAME])
        for pid in _pids()
        if any(_is_node(target) for target in _open_files(pid))
    ]


def _pids() -> Iterator[int]:
    with os.scandir("/proc") as entries:
        for entry, _ in zip(entries, range(_MOST_PROCESSES), strict=False):
            if entry.name.isdigit():
                yield int(entry.name)


def _command(pid: int) -> list[str]:
    try:
        return read_at_most(f"/proc/{pid}/cmdline", _COMMAND_BYTES).decode("utf-8", "replace").split("\0")
    except OSError:
        return [""]


def _open_files(pid: int) -> Iterator[str]:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                yield str(Path(entry.path).readlink())
    except OSError:
        return


def _is_node(target: str) -> bool:
    return target.startswith(NODES)
