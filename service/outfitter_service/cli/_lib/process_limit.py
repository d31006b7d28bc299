"""Limits of processes and threads: the error message when the kernel starts no more of them.

Its own word for that, EAGAIN, is "resource temporarily unavailable" and names neither the resource nor the limit.
"""

from __future__ import annotations

import errno
import os
import resource

NO_THREAD = "can't start new thread"
"""The message of the RuntimeError that Python raises then."""


def is_behind(error: BaseException) -> bool:
    """Whether Python raised this because it could start no further thread."""
    return isinstance(error, RuntimeError) and str(error) == NO_THREAD


def explain(code: int = errno.EAGAIN) -> str:
    """The meaning of an error of fork(2), with the remedy."""
    if code != errno.EAGAIN:
        return f"no further process can be started: {os.strerror(code)}"
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    uid, limit = os.getuid(), "none" if soft == resource.RLIM_INFINITY else str(soft)
    return (
        f"no further process or thread can be started: a limit is reached (RLIMIT_NPROC of user {uid}: {limit}, "
        "pids.max of the control group, or the machine's): end some, or raise it with `ulimit -u`, TasksMax= of a "
        "systemd unit or `--pids-limit` of a container"
    )
