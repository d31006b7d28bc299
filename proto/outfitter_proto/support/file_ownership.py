"""Whose a file is that says what runs, and who else may write it: one rule for configurations, scripts and secrets.

A file is trusted where it and its directory belong to this user or to root (under sudo, to whoever called it), and not
everybody may write them. A sticky directory, as /tmp, may be everybody's: nobody can exchange a file of ours in it. A
group that may write is no stranger: somebody has put it there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def doubt(path: Path) -> str | None:
    """Why somebody else may decide what stands in a file, in words; None: nobody does, or it is no regular file."""
    try:
        found, directory = path.stat(), path.absolute().parent.stat()
    except (OSError, ValueError):
        return None  # who opens it says why not
    if not stat.S_ISREG(found.st_mode):
        return None
    return _doubt(str(path), found) or _doubt(f"the directory of {path}", directory)


def read_by_others(path: Path) -> str | None:
    """That everybody may read a file with a secret, in words; None: not so."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return f"everybody may read it: `chmod o-r {path}`" if found.st_mode & stat.S_IROTH else None


def _doubt(what: str, found: os.stat_result) -> str | None:
    if found.st_uid not in _ours():
        return f"{what} belongs to user {found.st_uid}, who may write it"
    if found.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        return f"everybody may write {what}"
    return None


def _ours() -> set[int]:
    caller = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return {0, os.geteuid(), *([int(caller)] if caller.isascii() and caller.isdigit() and len(caller) < 11 else ())}
