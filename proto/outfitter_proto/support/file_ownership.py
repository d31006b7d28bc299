"""Whether another user can change a file: one rule for configurations, scripts and secrets.

We trust a file if it and its directory belong to this user or to root, and not all users may write them. Under sudo
they may also belong to the calling user. All users may write a sticky directory as /tmp, because they cannot replace
our file in it. We trust a group that may write, because an administrator has set it. The same holds for a symbolic link
and for the directory that it leads to.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def doubt(path: Path) -> str | None:
    """Why another user can change the file, as a clause for messages; None if no user can, or if it is no regular
    file."""
    try:
        link, status, directory = path.lstat(), path.stat(), path.absolute().parent.stat()
        target = path.resolve()
        target_directory = target.parent.stat()
    except (OSError, ValueError):
        return None  # opening it gives the error
    if not stat.S_ISREG(status.st_mode):
        return None
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in _ours():
        return f"{path} is a symbolic link of user {link.st_uid}, who may change it"
    return (
        _doubt(str(path), status)
        or _doubt(f"the directory of {path}", directory)
        or _doubt(f"the directory of {target}", target_directory)
    )


def is_read_by_others(path: Path) -> bool:
    """Whether all users may read a file with a secret."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except (OSError, ValueError):
        return False


def _doubt(what: str, status: os.stat_result) -> str | None:
    if status.st_uid not in _ours():
        return f"{what} belongs to user {status.st_uid}, who may write it"
    if status.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"everybody may write {what}"
    return None


def _ours() -> set[int]:
    caller = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return {0, os.geteuid(), *([int(caller)] if caller.isascii() and caller.isdigit() and len(caller) < 11 else ())}
