"""Divides a manager's file descriptors: some are for probes, so many are for watching owner processes, the others stay
free for drivers and the bus.

Those for probes lie between the soft limit and the limit that the manager may have: nobody in this process gets them
by mistake, also not a driver that leaks.
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
"""Below this limit no manager starts: bus, drivers and its own need some 50, and HTTP has up to 64 connections."""
RESERVE = 256
"""Descriptors that no owner process gets; half of all if there are fewer than twice as many."""
FOR_PROBES = 16
"""Descriptors that only HTTP gets, and only if there are no others."""
LOOK_EVERY_S = 1.0

log = structlog.get_logger("outfitter.service")


def prepare() -> None:
    """Raise the soft limit for the rest of the process's life: the usual 1,024 is for programs with select(2). Only for
    a manager's own process, never for one that imports a library.

    Raises:
        TooFewDescriptorsError: no manager can work with the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard == resource.RLIM_INFINITY else max(hard - FOR_PROBES, 1)
    if hard != resource.RLIM_INFINITY and hard < NEEDED:
        raise TooFewDescriptorsError(_too_few())
    if soft != wanted:
        with suppress(OSError, ValueError):  # then the limit stays, and the reserves still hold
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
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
    """A context in which what is reserved for probes may be opened. Keep it short: other threads could open it, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    more = soft + FOR_PROBES
    with suppress(OSError, ValueError):  # then there is no reserve, and opening fails as before
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
        await anyio.sleep(LOOK_EVERY_S)
