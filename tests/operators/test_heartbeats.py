"""Heartbeats that get through again after a silence."""

from __future__ import annotations

import anyio

from outfitter.board import Board
from outfitter.errors import AllocationEndedError
from outfitter.heartbeats import LeaseKeeper
from outfitter.lease import Lease


class Clock:
    """What a frozen process has missed: no other time passes."""

    missed = 0.0

    def __call__(self) -> float:
        return self.missed


class Scene:
    """A keeper whose heartbeats get through, and a ledger that is read when the test says so."""

    def __init__(self, *, lease_s: float = 3.0) -> None:
        self.clock = Clock()
        self.board = Board()
        self.board.lease = Lease(self.clock)
        self.board.lease.grant(lease_s)
        self.beats = 0
        self.freezes_after = 0
        self.beaten = anyio.Event()
        self.asked = anyio.Event()
        self.read = anyio.Event()
        self.keeper = LeaseKeeper(self.board, self.beat, self.catch_up, None)

    async def beat(self) -> None:
        self.beats += 1
        if self.beats == self.freezes_after:
            self.clock.missed += 100
        self.beaten.set()
        self.beaten = anyio.Event()

    async def catch_up(self) -> None:
        self.asked.set()
        await self.read.wait()


async def test_after_the_end_of_its_lease_a_worker_reads_the_ledger_before_a_heartbeat_counts() -> None:
    scene = Scene()
    lease = scene.board.lease
    scene.clock.missed += 100
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            await scene.asked.wait()
            assert scene.beats == 2, "the first one says no more than that it is heard again"
            assert lease.at_risk
            scene.read.set()
            while lease.at_risk:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_a_second_silence_is_as_good_as_the_first() -> None:
    scene = Scene()
    scene.clock.missed += 100
    scene.freezes_after = 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            await scene.asked.wait()
        assert scene.beats == 3, "the second one was the first after the second silence"
        tasks.cancel_scope.cancel()


async def test_what_the_ledger_says_then_counts_and_not_the_heartbeat() -> None:
    scene = Scene()
    scene.clock.missed += 100
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.keeper.run)
            await scene.asked.wait()
            scene.board.close(AllocationEndedError("it was somebody else's by then"))
            scene.read.set()
    assert scene.board.lease.at_risk


async def test_before_the_end_of_its_lease_every_heartbeat_counts() -> None:
    scene = Scene(lease_s=60.0)
    scene.clock.missed += 50.0
    assert scene.board.lease.at_risk
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            while scene.board.lease.at_risk:
                await scene.beaten.wait()
        assert scene.beats == 1
        assert not scene.asked.is_set()
        tasks.cancel_scope.cancel()
