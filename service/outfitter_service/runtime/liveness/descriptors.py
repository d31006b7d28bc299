"""Divides a manager's file descriptors: so many are for watching owner processes, the others stay free for drivers, the
bus and probes."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

RESERVE = 256
"""Descriptors that no owner process gets; half of all if there are fewer than twice as many."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one for the rest of the process's life: the usual 1,024 is for programs with
    select(2). Only for a manager's own process, never for one that imports a library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # then the limit stays, and the reserve still holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_owners() -> int:
    """How many owner processes may have a descriptor each, by the current limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return most - min(RESERVE, most // 2)
