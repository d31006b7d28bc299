"""Heartbeats, and the warning to user code when they do not get through.

The warning has a task of its own, so that a hanging heartbeat cannot delay it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
from msgspec import Struct

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
    """Sleep for `seconds`, by the event loop's clock or by `clock`, whichever is ahead. `clock` may count
    suspensions."""
    woken, until = anyio.current_time() + seconds, clock() + seconds
    while (left := min(woken - anyio.current_time(), until - clock())) > 0:  # noqa: ASYNC110  (no event to wait for)
        await anyio.sleep(min(left, LONGEST_SLEEP))


class LeaseKeeper(Struct, frozen=True):
    """Keeps the lease of `allocation_watch` alive. `beat` publishes one heartbeat. Failures go to `outage_log`.

    Once the lease is over, another worker may have the devices, and an acknowledged heartbeat proves nothing. Then the
    keeper calls `register_again` after each heartbeat, and the manager's answer renews the lease.

    When the lease of a granted allocation comes to be at risk, the keeper calls `on_lease_at_risk` once. It must not
    block. Without it, the keeper logs an error. The keeper does not warn a waiting worker, which has no devices.
    """

    allocation_watch: AllocationWatch
    beat: Callable[[], Awaitable[object]]
    register_again: Callable[[], Awaitable[object]]
    on_lease_at_risk: Callable[[LeaseLostError], object] | None
    outage_log: WorkerOutageLog

    async def run(self) -> None:
        """Send heartbeats until the allocation is over. Without a lease, wait for one."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            group.start_soon(self._watch)

    async def _beat(self) -> None:
        backoff = Backoff(*RETRY_BACKOFF_S)
        lease = self.allocation_watch.lease
        while not self.allocation_watch.read().over:
            interval = lease.interval
            if interval is None:
                await self.allocation_watch.changed(self.allocation_watch.read().version)
            elif await self._beat_once(interval):
                backoff.reset()
                await sleep(interval, lease.clock)
            else:
                await anyio.sleep(min(backoff.next_delay(), interval / 3))

    async def _beat_once(self, interval: float) -> bool:
        lease, within = self.allocation_watch.lease, min(PUBLISH_WITHIN, interval)
        sent_at, at_risk = lease.clock(), lease.at_risk
        registering = anyio.CancelScope()
        try:
            with anyio.fail_after(within):
                await self.beat()
            if lease.acknowledge(sent_at):
                if at_risk:
                    self.allocation_watch.touch()
            else:
                with anyio.move_on_after(interval) as registering:
                    await self.register_again()
        except (BusError, TimeoutError) as error:
            self.outage_log.met(_SENDING, str(error) or f"no answer within {within:g} s")
            return False
        self.outage_log.passed(_SENDING)
        return not registering.cancelled_caught

    async def _watch(self) -> None:
        lease = self.allocation_watch.lease
        granted = False  # a grant that was read late does not count until the manager has confirmed it
        while not (snapshot := self.allocation_watch.read()).over:
            left = lease.until_risk
            if left is None or snapshot.record is None or status_of(snapshot.record) is not AllocationStatus.YOURS:
                granted = False
                await self.allocation_watch.changed(snapshot.version)
            elif left > 0:
                granted = True
                await sleep(left, lease.clock)
            else:
                if granted:
                    granted = False
                    self.allocation_watch.touch()
                    self._warn()
                await sleep((lease.interval or 1.0) / 10, lease.clock)

    def _warn(self) -> None:
        error = lease_lost(self.allocation_watch)
        if self.on_lease_at_risk is None:
            log.error("%s", error)
            return
        try:
            self.on_lease_at_risk(error)
        except Exception:  # an error of user code must not stop the heartbeats
            log.exception("on_lease_at_risk raised")
