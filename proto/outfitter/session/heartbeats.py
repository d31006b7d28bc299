"""Heartbeats, and the watch that tells user code when they do not get through.

The watch is a task of its own: a heartbeat that hangs must not keep anybody from hearing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from outfitter.errors import LeaseLostError
from outfitter.session.lease import Clock
from outfitter.session.outage_log import WorkerOutageLog
from outfitter.session.status import AllocationStatus, standing
from outfitter.session.watch import AllocationWatch, lease_lost
from outfitter_proto.bus.port import BusError

PUBLISH_WITHIN = 5.0
"""Seconds that one heartbeat may take, and at most a third of its lease."""

RETRY_DELAYS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between tries while the bus is away, the last one again and again."""

LOOK_AGAIN = 1.0
"""Seconds to sleep at a stretch: timers of an event loop stand still while the machine is suspended."""

_SENDING = "a heartbeat"

log = logging.getLogger("outfitter")


async def sleep(seconds: float, clock: Clock) -> None:
    """Sleep for `seconds`, of which `clock` may count those that the machine is suspended."""
    woken, until = anyio.current_time() + seconds, clock() + seconds
    while (left := min(woken - anyio.current_time(), until - clock())) > 0:  # noqa: ASYNC110  (it is no event)
        await anyio.sleep(min(left, LOOK_AGAIN))


class LeaseKeeper:
    """Keeps the lease on `allocation_watch` alive: `beat` publishes one heartbeat.

    Once the lease is over, its devices may be somebody else's, and a heartbeat that gets through says nothing. Then
    `ask` is called after each: it registers again, and the manager's answer renews the lease on the board.

    `on_lease_at_risk` is called once each time the lease of devices that are this worker's gets at risk, and must not
    block. Without one, the log says it. A worker that still waits has nothing to stop using, and is told nothing.
    """

    def __init__(
        self,
        allocation_watch: AllocationWatch,
        beat: Callable[[], Awaitable[object]],
        ask: Callable[[], Awaitable[object]],
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
        trouble: WorkerOutageLog,
    ) -> None:
        self._allocation_watch = allocation_watch
        self._lease = allocation_watch.lease
        self._publish = beat
        self._ask = ask
        self._on_lease_at_risk = on_lease_at_risk
        self._trouble = trouble

    async def run(self) -> None:
        """Go on until the allocation is over. Without a lease there is nothing to do but to wait for one."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            group.start_soon(self._watch)

    async def _beat(self) -> None:
        attempt = 0
        while not self._allocation_watch.read().over:
            interval = self._lease.interval
            if interval is None:
                await self._allocation_watch.changed(self._allocation_watch.read().version)
            elif await self._beat_once(interval):
                attempt = 0
                await sleep(interval, self._lease.clock)
            else:
                await anyio.sleep(min(RETRY_DELAYS[min(attempt, len(RETRY_DELAYS) - 1)], interval / 3))
                attempt += 1

    async def _beat_once(self, interval: float) -> bool:
        within = min(PUBLISH_WITHIN, interval)
        sent_at, at_risk = self._lease.clock(), self._lease.at_risk
        asking = anyio.CancelScope()
        try:
            with anyio.fail_after(within):
                await self._publish()
            if self._lease.acknowledge(sent_at):
                if at_risk:
                    self._allocation_watch.touch()
            else:
                with anyio.move_on_after(interval) as asking:
                    await self._ask()
        except (BusError, TimeoutError) as error:
            self._trouble.met(_SENDING, str(error) or f"no answer within {within:g} s")
            return False
        self._trouble.passed(_SENDING)
        return not asking.cancelled_caught

    async def _watch(self) -> None:
        served = False  # a grant that was read late is nobody's until the manager has confirmed it
        while not (snapshot := self._allocation_watch.read()).over:
            left = self._lease.until_risk
            if left is None or snapshot.record is None or standing(snapshot.record) is not AllocationStatus.YOURS:
                served = False
                await self._allocation_watch.changed(snapshot.version)
            elif left > 0:
                served = True
                await sleep(left, self._lease.clock)
            else:
                if served:
                    served = False
                    self._allocation_watch.touch()
                    self._tell()
                await sleep((self._lease.interval or 1.0) / 10, self._lease.clock)

    def _tell(self) -> None:
        error = lease_lost(self._allocation_watch)
        if self._on_lease_at_risk is None:
            log.error("%s", error)
            return
        try:
            self._on_lease_at_risk(error)
        except Exception:  # user code: whatever it raises must not stop the heartbeats
            log.exception("on_lease_at_risk raised")
