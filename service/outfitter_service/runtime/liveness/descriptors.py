"""Divides a manager's file descriptors among probes, the watch of owner processes, and drivers and the bus.

The descriptors for probes lie between the soft limit and the highest limit that the manager may set. So no other code
in this process gets them by mistake, not even a driver that leaks descriptors.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import structlog

from outfitter_proto.support.descriptors import REMEDY, TooFewDescriptorsError, explain, lacking, limits

NEEDED = 128
"""Below this limit no manager starts: the bus, drivers and the manager itself need some 50 descriptors, and HTTP has up
to 64 connections."""
RESERVE = 256
"""Descriptors that are not used for owner processes; half of all if there are fewer than twice as many."""
FOR_PROBES = 16
"""Descriptors that only HTTP uses, and only if no other is left."""
CHECK_EVERY_S = 1.0
"""Seconds between two checks whether descriptors are left."""

log = structlog.get_logger("outfitter.service")


def prepare() -> None:
    """Raise the soft limit for the rest of the process's life: the usual 1,024 is for programs with select(2). Call it
    only in a manager's own process, never in a process that imports Outfitter as a library.

    Raises:
        TooFewDescriptorsError: no manager can work with the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_soft = hard if hard == resource.RLIM_INFINITY else max(hard - FOR_PROBES, 1)
    if hard != resource.RLIM_INFINITY and hard < NEEDED:
        raise TooFewDescriptorsError(_too_few())
    if soft != new_soft:
        with suppress(OSError, ValueError):  # after an error the limit stays, and so do the reserves
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft + FOR_PROBES < NEEDED:
        raise TooFewDescriptorsError(_too_few())


def _too_few() -> str:
    return f"the limit of open files is too low: a manager needs at least {NEEDED} ({limits()}); {REMEDY}"


def for_owners() -> int:
    """How many owner processes may have a descriptor each, by the current limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return sys.maxsize
    return most - min(RESERVE, most // 2)


@contextmanager
def for_probes() -> Iterator[None]:
    """A context in which the descriptors for probes may be opened. Keep it short: other threads could use them, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    more = soft + FOR_PROBES
    with suppress(OSError, ValueError):  # after an error there is no reserve, and opening fails as before
        resource.setrlimit(resource.RLIMIT_NOFILE, (more if hard == resource.RLIM_INFINITY else min(more, hard), hard))
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def report_outages() -> None:
    """Log once when no descriptor is left, and once when there are some again, until cancelled."""
    reported = False
    while True:
        code = lacking()
        if code is not None and not reported:
            log.error("no file descriptor is left, drivers and the bus may fail until some are", error=explain(code))
        elif code is None and reported:
            log.info("file descriptors are free again")
        reported = code is not None
        await anyio.sleep(CHECK_EVERY_S)
