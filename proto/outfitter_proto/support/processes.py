"""The identity of a process on a Linux machine, from the kernel: the fields of `records.Owner` and `Survivors`.

Workers send it and managers compare it, with the same functions. Nothing is cached, so a forked child gets its own
identity.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from msgspec import UNSET, UnsetType

from outfitter_proto.records import Owner, Survivors

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's first PID namespace: PROC_PID_INIT_INO of Linux's include/linux/proc_ns.h."""
_PIECE = 64 * 1024
"""Most bytes of one read(2)."""
_SMALL = 64 * 1024
"""Far more bytes than a file in /proc that only the kernel fills has before what we look for."""


def read_at_most(path: str, most: int) -> bytes:
    """The first bytes of a file in /proc, `most` at most. Its process may have made it as large as it likes: any memory
    can be the command line or the environment (PR_SET_MM of prctl(2)), zeros that take no memory among it.

    Raises:
        OSError: it cannot be read.
    """
    pieces, left = [], most
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a path is slower
        while left and (piece := file.read(min(left, _PIECE))):
            pieces.append(piece)
            left -= len(piece)
    return b"".join(pieces)


def boot_id() -> str | None:
    """This boot's id, `/proc/sys/kernel/random/boot_id` of random(4); None if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return None


def pid_namespace(pid: int | None = None) -> int | None:
    """The inode of a process's PID namespace, pid_namespaces(7); None if it cannot be seen. Default: this process."""
    try:
        return Path(f"/proc/{_named(pid)}/ns/pid").stat().st_ino
    except OSError:
        return None


def sees_all_processes() -> bool:
    """Whether this process is in the machine's first PID namespace, where each process of the machine has a pid."""
    return pid_namespace() == INITIAL_PID_NAMESPACE


def time_namespace() -> int | None:
    """The inode of this process's time namespace, time_namespaces(7); None if the kernel has none. It shifts the start
    times of all processes that this process reads."""
    try:
        return Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return None


def user_namespace(pid: int | None = None) -> int | None:
    """The inode of a process's user namespace, user_namespaces(7); None if it cannot be seen, or the kernel has none.
    Default: this process."""
    try:
        return Path(f"/proc/{_named(pid)}/ns/user").stat().st_ino
    except OSError:
        return None


def read_real_uid(pid: int) -> int:
    """The real user id of a process, proc(5) `/proc/<pid>/status`.

    Raises:
        OSError: there is no such process, or it cannot be seen now.
    """
    for line in read_at_most(f"/proc/{pid}/status", _SMALL).splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    raise ProcessLookupError(f"/proc/{pid}/status has no user")


def real_uid(pid: int) -> int | None:
    """The same; None if it cannot be seen."""
    try:
        return read_real_uid(pid)
    except OSError:
        return None


def start_ticks(pid: int | None = None) -> int | None:
    """As `read_start_ticks`; None instead of an error."""
    try:
        return read_start_ticks(pid)
    except (OSError, ValueError):
        return None


def read_start_ticks(pid: int | None = None) -> int:
    """Field 22 of proc(5) `/proc/<pid>/stat`: when a process started, in clock ticks after boot. Default: this process.

    Raises:
        OSError: the process does not exist, `/proc` hides it, or no file descriptor is left.
        ValueError: the file is not as in proc(5).
    """
    return read_stat(pid, 22)


def read_stat(pid: int | None, field: int) -> int:
    """A number in proc(5) `/proc/<pid>/stat` (None: of this process), by its field there: 4 or a later one.

    Raises:
        OSError: the process does not exist, `/proc` hides it, or no file descriptor is left.
        ValueError: the file is not as in proc(5).
    """
    stat = read_at_most(f"/proc/{_named(pid)}/stat", _SMALL)
    try:
        # The second field, the command in brackets, may itself have blanks, brackets and half a character.
        return int(stat.rpartition(b")")[2].split()[field - 3])
    except IndexError as error:
        raise ValueError(f"/proc/{_named(pid)}/stat has less than {field} fields") from error


REFUSED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
"""The errors of a call that the kernel, or a filter of system calls, never lets through."""


def unwatchable(pid: int, error: Exception) -> str:
    """Why there is no descriptor of a process, in words. pidfd_open(2) itself says no more than "Operation not
    permitted"."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (
        f"the kernel does not let this process watch process {pid}: {why} (pidfd_open(2) needs Linux 5.3, and the "
        "seccomp profile of a container may refuse it)"
    )


def process_owner(pid: int | None = None) -> Owner | None:
    """The identity of a process (default: this one); None if the kernel does not show it."""
    boot, namespace, started = boot_id(), pid_namespace(pid), start_ticks(pid)
    if boot is None or namespace is None or started is None:
        return None
    clock = time_namespace()
    return Owner(
        pid=os.getpid() if pid is None else pid,
        start_ticks=started,
        pid_ns=namespace,
        boot_id=boot,
        time_ns=UNSET if clock is None else clock,
    )


def is_gone(process: Owner) -> bool | None:
    """Whether a process has ended, as zombies have; None: it is of another machine or namespace, or is hidden."""
    if (process.boot_id, process.pid_ns) != (boot_id(), pid_namespace()):
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is somebody else's
    try:
        stat = read_at_most(f"/proc/{process.pid}/stat", _SMALL)
        state, *_ = stat.rpartition(b")")[2].split()
        started = read_start_ticks(process.pid)
    except (OSError, ValueError):
        return None
    clock = time_namespace()
    same_clock = process.time_ns == (UNSET if clock is None else clock)
    return state in (b"Z", b"X") or (same_clock and started != process.start_ticks)


def survivors_of(owner: Owner | None, *, kill_after_s: float | UnsetType = UNSET) -> Survivors:
    """Processes that an owner leaves behind: those of its real user; of this process's, if it cannot be seen here."""
    uid = real_uid(owner.pid) if owner is not None and owner.pid_ns == pid_namespace() else None
    namespace = user_namespace()
    return Survivors(
        uid=os.getuid() if uid is None else uid,
        kill_after_s=kill_after_s,
        user_ns=UNSET if namespace is None else namespace,
    )


def _named(pid: int | None) -> str:
    return "self" if pid is None else str(pid)
