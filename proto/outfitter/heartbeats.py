"""Heartbeats, and the watch that tells user code when they do not get through.

The watch is a task of its own: a heartbeat that hangs must not keep anybody from hearing of it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio

from outfitter.board import Board
from outfitter.errors import LeaseLostError
from outfitter.operators import lease_lost
from outfitter_proto.bus.port import BusError

PUBLISH_WITHIN = 5.0
"""Seconds that one heartbeat may take, and at most a third of its lease."""

RETRY_DELAYS = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds between tries while the bus is away, the last one again and again."""

log = logging.getLogger("outfitter")


class LeaseKeeper:
    """Keeps the lease on `board` alive with `beat`, which publishes one heartbeat.

    Once the lease is over its devices may be somebody else's, and this worker would only read of it a moment later. So
    the first heartbeat that gets through then renews nothing; the next one within a lease does, if the grant still
    stands after all that the ledger held by then (`catch_up` puts that on the board).

    `on_lease_at_risk` is called once each time the lease gets at risk; it must not block.
    """

    def __init__(
        self,
        board: Board,
        beat: Callable[[], Awaitable[object]],
        catch_up: Callable[[], Awaitable[object]],
        on_lease_at_risk: Callable[[LeaseLostError], object] | None,
    ) -> None:
        self._board = board
        self._lease = board.lease
        self._publish = beat
        self._catch_up = catch_up
        self._heard_again_at: float | None = None
        self._on_lease_at_risk = on_lease_at_risk

    async def run(self) -> None:
        """Go on until the allocation is over. Without a lease there is nothing to do but to wait for one."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._beat)
            group.start_soon(self._watch)

    async def _beat(self) -> None:
        attempt = 0
        while not self._board.read().over:
            interval = self._lease.interval
            if interval is None:
                await self._board.changed(self._board.read().version)
            elif await self._beat_once(interval):
                attempt = 0
                await anyio.sleep(interval)
            else:
                await anyio.sleep(min(RETRY_DELAYS[min(attempt, len(RETRY_DELAYS) - 1)], interval / 3))
                attempt += 1

    async def _beat_once(self, interval: float) -> bool:
        sent_at = self._lease.clock()
        try:
            with anyio.fail_after(min(PUBLISH_WITHIN, interval)):
                await self._publish()
                if not await self._still_stands(sent_at):
                    return True
        except (BusError, TimeoutError) as error:
            log.warning("a heartbeat failed: %s", str(error) or f"no answer within {min(PUBLISH_WITHIN, interval):g} s")
            return False
        self._lease.acknowledge(sent_at)
        return True

    async def _still_stands(self, sent_at: float) -> bool:
        """Whether a heartbeat that was begun at `sent_at` and has got through renews the lease."""
        if self._lease.ended_by(sent_at):
            before, self._heard_again_at = self._heard_again_at, sent_at
            if before is None or sent_at - before >= (self._lease.seconds or 0.0):
                return False
            await self._catch_up()
        self._heard_again_at = None
        return not self._board.read().over

    async def _watch(self) -> None:
        told = False
        while not self._board.read().over:
            left = self._lease.until_risk
            if left is None:
                await self._board.changed(self._board.read().version)
            elif left > 0:
                if told:
                    told = False
                    self._board.touch()
                await anyio.sleep(left)
            else:
                if not told:
                    told = True
                    self._board.touch()
                    self._tell()
                await anyio.sleep((self._lease.interval or 1.0) / 10)

    def _tell(self) -> None:
        error = lease_lost(self._board)
        log.error("%s", error)
        if self._on_lease_at_risk is None:
            return
        try:
            self._on_lease_at_risk(error)
        except Exception:  # user code: whatever it raises must not stop the heartbeats
            log.exception("on_lease_at_risk raised")
