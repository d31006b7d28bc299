"""The process for which devices are held: who it is, and when it ends.

A pid alone names nobody for long. A file descriptor of the kernel (pidfd_open(2)) keeps naming the same process.
"""

from __future__ import annotations

import errno
import os
import select
from pathlib import Path

import anyio

from outfitter_proto.support import processes
from outfitter_service.query.errors import OutfitterCliError

ENDING_WITHIN = 5.0
"""Seconds in which a process that has begun to end must have ended. The kernel takes that long at most to take down a
process with much memory, and one whose main thread alone has ended never does."""

_EXITING = 0x4
"""The kernel's flag PF_EXITING in field 9 of proc(5) `/proc/<pid>/stat`."""
_INIT = 1


class OwnerProcess:
    """A living process that is to own an allocation. `identity` is how the registration names it."""

    def __init__(self, pid: int) -> None:
        """Identify the process with this pid.

        Raises:
            OutfitterCliError: there is none, or a registration cannot name it.
        """
        self.pid = pid
        self._pidfd = _opened(pid)
        if self.has_ended:
            raise _no_process(pid)
        namespace = processes.pid_namespace(pid)
        if namespace is not None and namespace != processes.pid_namespace():
            raise OutfitterCliError(
                f"process {pid} is in another PID namespace, where it has another pid: it must be named from there"
            )
        identity = processes.process_owner(pid)
        if identity is None:
            raise OutfitterCliError(f"process {pid} cannot be identified: {_why_unidentified(pid)}")
        self.identity = identity

    @property
    def has_ended(self) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    @property
    def is_ending(self) -> bool:
        """Whether its main thread has begun to end. The kernel closes the files of a dying process a moment before it
        reports the death."""
        try:
            return bool(processes.read_stat(self.pid, 9) & _EXITING)
        except (OSError, ValueError):
            return self.has_ended

    @property
    def program(self) -> str | None:
        """The file name of the program that it runs; None if that is another user's secret."""
        try:
            return Path(f"/proc/{self.pid}/exe").readlink().name
        except OSError:
            return None

    @property
    def shares_group(self) -> bool:
        """Whether a terminal sends its signals to both this process and the owner."""
        try:
            return os.getpgid(self.pid) == os.getpgrp()
        except OSError:
            return False

    async def ended(self) -> None:
        """Wait for its end."""
        await anyio.wait_readable(self._pidfd)


def chosen(pid: int | None) -> OwnerProcess:
    """The process with this pid; None: the parent.

    Raises:
        OutfitterCliError: there is none, or a registration cannot name it.
    """
    return parent() if pid is None else OwnerProcess(pid)


def parent() -> OwnerProcess:
    """The process that started this one.

    Raises:
        OutfitterCliError: it has ended, or a registration cannot name it.
    """
    pid = os.getppid()
    if pid == 0:
        raise OutfitterCliError("the parent is in another PID namespace, and its pid is not known in this one")
    if pid == _INIT:
        raise OutfitterCliError(
            "the parent is process 1: who started this has ended, or is the first process of a container, which "
            "must be named by its pid"
        )
    process = OwnerProcess(pid)
    if os.getppid() != pid:
        raise _no_process(pid)
    return process


def _opened(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):
        raise _no_process(pid) from None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            raise OutfitterCliError(f"{pid} is no process, but a thread of one") from None
        if error.errno in processes.REFUSED:
            raise OutfitterCliError(processes.unwatchable(pid, error)) from error
        raise


def _why_unidentified(pid: int) -> str:
    """Why /proc does not say who a living process is, and what to do."""
    if not Path("/proc/self").exists():
        return "/proc is not mounted: mount it (`mount -t proc proc /proc`), or pass it to the container"
    uid, own = processes.real_uid(pid), os.getuid()
    if uid is None:
        return "/proc hides it (hidepid): run this as its user, or mount /proc without hidepid"
    if uid != own:
        return f"it is user {uid}'s, and this is user {own}'s: run this as that user"
    return "it lets nobody but root look into it (PR_SET_DUMPABLE of prctl(2)): run this as root"


def _no_process(pid: int) -> OutfitterCliError:
    return OutfitterCliError(f"there is no process {pid}")
