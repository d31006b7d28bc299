"""Deregisters a worker after its session, which could not because the bus was away.

While the owner lives and a manager watches it, nothing else gives the devices back: no lease runs, and the session
sends no heartbeats any more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from outfitter.session.lease import boot_time
from outfitter.session.outage_log import WorkerOutageLog
from outfitter_proto.bus.port import BusError
from outfitter_proto.support.backoff import Backoff

RETRY_BACKOFF_S = (0.5, 5.0)
"""The first and the longest delay between two tries."""

_DEREGISTERING = "deregistering"


async def deregister_late(publish: Callable[[], Awaitable[object]], who: str) -> None:
    """Call `publish`, which publishes the deregistration, until the bus has it. `who`: the worker, for the log lines.

    It also tries again after errors that would end a session. While topics are restored, for example, they are missing.
    """
    backoff, outage_log = Backoff(*RETRY_BACKOFF_S), WorkerOutageLog(who, boot_time)
    while True:
        await anyio.sleep(backoff.next_delay())
        try:
            await publish()
        except (BusError, TimeoutError) as error:
            outage_log.met(_DEREGISTERING, str(error) or "no answer in time")
        else:
            outage_log.passed(_DEREGISTERING)
            return
