"""Heartbeats, and the warning to user code when they do not get through.

The warning has a task of its own, so that a hanging heartbeat cannot delay it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from outfitter.errors import LeaseLostError
from outfitter.session.lease import Clock
from outfitter.session.outage_log import WorkerOutageLog
from outfitter.session.status import AllocationStatus, status_of
from outfitter.session.watch import AllocationWatch, lease_lost
from outfitter_proto.bus.port import BusError
from outfitter_proto.support.backoff import Backoff

PUBLISH_WITHIN = 5.0
"""Time limit of one heartbeat in seconds; a third of the lease if that is shorter."""

RETRY_BACKOFF_S = (0.1, 2.0)
"""The first and the longest delay between tries while the bus is away."""

LONGEST_SLEEP = 1.0
"""Longest sleep in seconds: an event loop's timers stand still while the machine is suspended."""

_SENDING = "a heartbeat"

log = logging.getLogger("outfitter")


async def sleep(seconds: float, clock: Clock) -> None:
    """Sleep for `seconds`. `clock` may also count the time for which the machine is suspended."""
    woken, until = anyio.current_time() + seconds, clock() + seconds
    while (left := min(woken - anyio.current_time(), until - clock())) > 0:  # noqa: ASYNC110  (no event to wait for)
        await anyio.sleep(min(left, LONGEST_SLEEP))


class LeaseKeeper:
    """Keeps the lease of `allocation_watch` alive. `beat` publishes one heartbeat.

    Once the lease is over, another worker may have the devices, and an acknowledged heartbeat proves nothing. Then the
    keeper calls `register_again` after each heartbeat, and the manager's answer renews the lease.

    When the lease of a granted allocation gets at risk, the keeper calls `on_lease_at_risk` once, which must not
    block. Without it, the keeper logs an error. A worker that still waits is not warned: it has no devices.
    """

    def __init__(
        self,
        allocation_watch: AllocationWatch,
        beat: Callable[[], Awaitable[object]],
        register_again: Callable[[], Awaitable[object]],
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
        outage_log: WorkerOutageLog,
    ) -> None:
        self._allocation_watch = allocation_watch
        self._lease = allocation_watch.lease
        self._publish = beat
        self._register_again = register_again
        self._on_lease_at_risk = on_lease_at_risk
        self._outage_log = outage_log

    async def run(self) -> None:
        """Send heartbeats until the allocation is over. Without a lease, wait for one."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            group.start_soon(self._watch)

    async def _beat(self) -> None:
        backoff = Backoff(*RETRY_BACKOFF_S)
        while not self._allocation_watch.read().over:
            interval = self._lease.interval
            if interval is None:
                await self._allocation_watch.changed(self._allocation_watch.read().version)
            elif await self._beat_once(interval):
                backoff.reset()
                await sleep(interval, self._lease.clock)
            else:
                await anyio.sleep(min(backoff.next_delay(), interval / 3))

    async def _beat_once(self, interval: float) -> bool:
        within = min(PUBLISH_WITHIN, interval)
        sent_at, at_risk = self._lease.clock(), self._lease.at_risk
        registering = anyio.CancelScope()
        try:
            with anyio.fail_after(within):
                await self._publish()
            if self._lease.acknowledge(sent_at):
                if at_risk:
                    self._allocation_watch.touch()
            else:
                with anyio.move_on_after(interval) as registering:
                    await self._register_again()
        except (BusError, TimeoutError) as error:
            self._outage_log.met(_SENDING, str(error) or f"no answer within {within:g} s")
            return False
        self._outage_log.passed(_SENDING)
        return not registering.cancelled_caught

    async def _watch(self) -> None:
        granted = False  # a grant that was read late does not count until the manager has confirmed it
        while not (snapshot := self._allocation_watch.read()).over:
            left = self._lease.until_risk
            if left is None or snapshot.record is None or status_of(snapshot.record) is not AllocationStatus.YOURS:
                granted = False
                await self._allocation_watch.changed(snapshot.version)
            elif left > 0:
                granted = True
                await sleep(left, self._lease.clock)
            else:
                if granted:
                    granted = False
                    self._allocation_watch.touch()
                    self._warn()
                await sleep((self._lease.interval or 1.0) / 10, self._lease.clock)

    def _warn(self) -> None:
        error = lease_lost(self._allocation_watch)
        if self._on_lease_at_risk is None:
            log.error("%s", error)
            return
        try:
            self._on_lease_at_risk(error)
        except Exception:  # user code: no error of it may stop the heartbeats
            log.exception("on_lease_at_risk raised")
