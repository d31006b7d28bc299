"""How the process of a manager shares out its file descriptors: so many are for watching owner processes, the others
stay free for drivers, the bus and probes."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

RESERVE = 256
"""Descriptors that no owner process gets, or half of all where there are fewer than twice as many."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one, for the rest of the process's life: the usual 1,024 is for programs that
    use select(2). For a manager's own process only, never for one that imports a library."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # then it stays as it is, and the reserve is kept all the same
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def for_owners() -> int:
    """How many owner processes may be watched by a descriptor each, as the limit is now."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return most - min(RESERVE, most // 2)
