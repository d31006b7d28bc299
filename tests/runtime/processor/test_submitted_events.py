"""Whoever submits an event goes on once the commit that includes it has returned, and not before."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from outfitter_proto.bus import BusUnavailableError
from outfitter_proto.keys import AllocationKey
from outfitter_service.core import model as m
from outfitter_service.runtime.processor.commit import commit
from outfitter_service.runtime.processor.event_queue import NotCommittedError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.managers.in_process import HOST, WITHIN_S, register, static


def death(worker: str) -> m.OwnerDied:
    return m.OwnerDied(allocation=AllocationKey(f"{HOST}/{worker}/1"), detail="somebody says so")


async def test_a_submitted_event_is_committed_when_its_submitter_goes_on(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static()) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await manager.reported()
        held, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

        async def hold(point: str) -> None:
            if point == "commit:after":  # the bus has the commit, and its answer is late
                held.set()
                await go_on.wait()

        async def submit() -> None:
            await manager.processor.event_queue.submit(death("w"))
            ended.set()

        bus.script = hold
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(submit)
            with anyio.fail_after(WITHIN_S):
                await held.wait()
                await anyio.wait_all_tasks_blocked()
                assert not ended.is_set()
                go_on.set()
                await ended.wait()
        assert (await manager.records())[f"{HOST}/w/1"]["state"] == "ended"


@pytest.mark.parametrize("event", [death("w"), m.Reschedule(host=HOST)], ids=["an edge", "a level"])
async def test_it_waits_through_a_failed_commit_and_a_partition_that_is_taken_again(
    serve: Serve, bus: FaultyBus, event: m.Event
) -> None:
    failures = 0

    async def fail_once(point: str) -> None:
        nonlocal failures
        if point == "commit:before" and not failures:
            failures += 1
            raise BusUnavailableError("away")

    async with serve(static()) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        await manager.reported()
        queue = manager.processor.event_queue
        bus.script = fail_once
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                # what is decided beside it makes a commit necessary
                tasks.start_soon(queue.submit, event)
                tasks.start_soon(queue.submit, death("w"))
        bus.script = no_faults
        assert failures == 1
        assert (await manager.records())[f"{HOST}/w/1"]["state"] == "ended"


async def test_two_equal_events_have_two_ends(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static()) as manager:
        queue = manager.processor.event_queue
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(queue.submit, m.Tick(host=HOST))
                tasks.start_soon(queue.submit, m.Tick(host=HOST))


async def test_one_event_that_is_submitted_twice_has_two_ends(serve: Serve, bus: FaultyBus) -> None:
    event = m.Tick(host=HOST)
    async with serve(static()) as manager:
        queue = manager.processor.event_queue
        with anyio.fail_after(WITHIN_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(queue.submit, event)
                tasks.start_soon(queue.submit, event)


async def test_whoever_waits_hears_that_the_manager_has_stopped(serve: Serve, bus: FaultyBus) -> None:
    raised: list[str] = []

    async def submit() -> None:
        with pytest.raises(NotCommittedError) as error:
            await manager.processor.event_queue.submit(m.Tick(host=HOST))
        raised.append(str(error.value))

    async with serve(static()) as manager:
        await manager.reported()
        await manager.stop()
        await submit()
    assert raised == ["this manager no longer serves the partition"]


async def test_an_event_that_is_submitted_after_the_end_is_not_queued(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static()) as manager:
        await manager.reported()
        await manager.stop()
        queued = [*manager.processor.event_queue.queue]
        with pytest.raises(NotCommittedError):
            await manager.processor.event_queue.submit(death("w"))
        assert [*manager.processor.event_queue.queue] == queued


async def test_whoever_submits_a_report_of_a_host_that_is_not_served_hears_it(serve: Serve, bus: FaultyBus) -> None:
    async with serve(static()) as manager:
        await manager.reported()
        with pytest.raises(NotCommittedError, match="'elsewhere' is not served"), anyio.fail_after(WITHIN_S):
            await manager.processor.event_queue.submit(m.DriverReport(host="elsewhere", resource="gpu"))


async def test_an_event_that_meets_a_defect_is_given_up_for_its_submitter(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    well = commit.decide

    def decide(ledger: Any, rules: Any, event: m.Event, now: Any) -> Any:
        if isinstance(event, m.OwnerDied):
            raise RuntimeError("a defect")
        return well(ledger, rules, event, now)

    monkeypatch.setattr(commit, "decide", decide)
    async with serve(static()) as manager:
        with pytest.raises(NotCommittedError, match="met a defect"), anyio.fail_after(WITHIN_S):
            await manager.processor.event_queue.submit(death("w"))
