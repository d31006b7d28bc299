"""Heartbeats that get through again after a silence, and what is said of a silence."""

from __future__ import annotations

import logging

import anyio
import pytest

from outfitter.errors import AllocationEndedError, LeaseLostError
from outfitter.session.heartbeats import LeaseKeeper
from outfitter.session.lease import Lease
from outfitter.session.outage_log import WorkerOutageLog
from outfitter.session.watch import AllocationWatch
from outfitter.testing import FakeOutfitter
from outfitter_proto.bus import BusUnavailableError
from outfitter_proto.records import Allocation, Register


class Clock:
    """What a frozen process has missed: no other time passes."""

    missed = 0.0

    def __call__(self) -> float:
        return self.missed


def record(state: str) -> Allocation:
    """A worker's record in a state."""
    found: list[Allocation] = []
    fake = FakeOutfitter({"gpu": [{}]})
    if state == "pending":
        fake.keep_waiting("busy")
    fake.admit(Register(host="h", worker="w", incarnation="1"), found.append)
    assert found[-1].state == state
    return found[-1]


class Scene:
    """A keeper whose heartbeats get through, and a manager that answers when the test says so."""

    def __init__(self, *, lease_s: float = 3.0, state: str = "allocated") -> None:
        self.clock = Clock()
        self.allocation_watch = AllocationWatch()
        self.allocation_watch.lease = Lease(self.clock)
        self.allocation_watch.lease.grant(lease_s)
        self.allocation_watch.post(record(state))
        self.beats = 0
        self.away = False
        self.beaten = anyio.Event()
        self.asked = anyio.Event()
        self.answers = anyio.Event()
        self.told: list[LeaseLostError] = []
        trouble = WorkerOutageLog("h/w/1", self.clock)
        self.keeper = LeaseKeeper(self.allocation_watch, self.beat, self.ask, self.told.append, trouble)

    async def beat(self) -> None:
        self.beats += 1
        self.beaten.set()
        self.beaten = anyio.Event()
        if self.away:
            raise BusUnavailableError("the bus is away")

    async def ask(self) -> None:
        self.asked.set()
        await self.answers.wait()
        if not self.allocation_watch.read().over:
            self.allocation_watch.lease.confirm(self.clock())
            self.allocation_watch.touch()


async def test_after_the_end_of_its_lease_the_managers_answer_counts_and_no_heartbeat() -> None:
    scene = Scene()
    lease = scene.allocation_watch.lease
    scene.clock.missed += 100
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            await scene.asked.wait()
            asked_after = scene.beats
            while scene.beats < asked_after + 2:
                await scene.beaten.wait()  # it goes on while nobody answers
            assert lease.over
            scene.answers.set()
            while lease.at_risk:
                await scene.allocation_watch.changed(scene.allocation_watch.read().version)
        tasks.cancel_scope.cancel()


async def test_what_the_ledger_says_then_counts_and_not_the_heartbeat() -> None:
    scene = Scene()
    scene.clock.missed += 100
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scene.keeper.run)
            await scene.asked.wait()
            scene.allocation_watch.close(AllocationEndedError("it was somebody else's by then"))
            scene.answers.set()
    assert scene.allocation_watch.lease.over


async def test_before_the_end_of_its_lease_every_heartbeat_counts() -> None:
    scene = Scene(lease_s=60.0)
    scene.clock.missed += 50.0
    assert scene.allocation_watch.lease.at_risk
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            while scene.allocation_watch.lease.at_risk:
                await scene.allocation_watch.changed(scene.allocation_watch.read().version)
        assert scene.beats == 1
        assert not scene.asked.is_set()
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("state", ["pending", "allocated"])
async def test_whoever_has_devices_is_told_and_nobody_who_waits(state: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(state=state)
    scene.away = True
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            await anyio.wait_all_tasks_blocked()
            scene.clock.missed += 2.5
            beats = scene.beats
            while scene.beats < beats + 5:
                await scene.beaten.wait()  # the watch has looked as well
            while state == "allocated" and not scene.told:
                await scene.allocation_watch.changed(scene.allocation_watch.read().version)
        tasks.cancel_scope.cancel()
    assert len(scene.told) == (state == "allocated")
    assert "stop using" not in caplog.text


async def test_a_grant_that_is_read_too_late_is_not_told_of_before_the_manager_has_confirmed_it() -> None:
    scene = Scene(state="pending")
    scene.clock.missed += 100
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.keeper.run)
        with anyio.fail_after(20):
            scene.allocation_watch.post(record("allocated"))
            await scene.asked.wait()
        tasks.cancel_scope.cancel()
    assert scene.told == []


def test_an_outage_is_a_line_when_it_begins_one_a_minute_and_one_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    trouble = WorkerOutageLog("h/w/1", clock)
    with caplog.at_level(logging.INFO):
        for _ in range(130):
            trouble.met("a heartbeat", "nobody there")
            trouble.met("following the allocation", "nobody there")
            clock.missed += 1
        trouble.passed("a heartbeat")
        trouble.passed("following the allocation")
        trouble.passed("a heartbeat")
    assert [line.getMessage() for line in caplog.records] == [
        "h/w/1: a heartbeat fails and is tried again: nobody there",
        "h/w/1: a heartbeat still fails after 60 s: nobody there",
        "h/w/1: a heartbeat still fails after 120 s: nobody there",
        "h/w/1: the bus works again after 130 s",
    ]
