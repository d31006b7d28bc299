"""The topics take less by now than even the smallest commit of what comes next: it waits, and is said once."""

from __future__ import annotations

import anyio
import pytest

from outfitter_proto.keys import allocation_key
from outfitter_service.core import model as m
from outfitter_service.runtime.processor import event_queue
from runtime.conftest import Serve
from support.bus.narrow_bus import NarrowBus
from support.checker.verdict import verdict
from support.managers.in_process import InProcessManager, deregister, register


@pytest.fixture(autouse=True)
def spends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that was refused something is spent, as Kafka's is."""
    monkeypatch.setattr(NarrowBus, "spends", True)


async def refused(bus: NarrowBus, times: int) -> None:
    """Wait until the bus has refused so many commits."""
    with anyio.fail_after(20):
        while bus.refusals < times:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


TWO = (
    'external-resources = ["gpu", "other"]\n'
    '[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = 1\n'
    '[external-resource.other]\namount = 1\ndriver = "static"\nparam.count = 50\n'
)


async def free_without_a_record_for_who_waits(manager: InProcessManager, bus: NarrowBus) -> None:
    """A device becomes free, and the topics do not take the record of the worker that waits for it."""
    await manager.say(register("a", gpu=1), register("b", gpu=1))
    await manager.state("b", "pending")
    bus.refused = b'"worker":"b"'
    await manager.say(deregister("a"))
    await manager.state("a", "ended")
    await refused(bus, 1)


async def test_an_evaluation_that_does_not_fit_is_not_tried_again_whenever_the_partition_is_taken(
    url: str, serve: Serve
) -> None:
    """Each refusal makes the manager take the partition again, after which it would evaluate each queue."""
    async with NarrowBus(url) as bus, serve(TWO, on=bus) as manager:
        await free_without_a_record_for_who_waits(manager, bus)
        for index in range(10):
            await manager.say(register(f"n{index}", other=1))
            await manager.state(f"n{index}", "allocated")
        assert bus.refusals < 20
        assert (await manager.records())["h/b/1"]["state"] == "pending"


async def test_who_waits_is_served_by_itself_once_the_topics_take_its_record(
    url: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_AFTER_S", 0.2)
    async with NarrowBus(url) as bus, serve(TWO, on=bus) as manager:
        await free_without_a_record_for_who_waits(manager, bus)
        await manager.say(register("next", other=1))
        await manager.state("next", "allocated")
        bus.refused = None
        await manager.state("b", "allocated")
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()


async def test_deaths_that_do_not_fit_are_tried_one_at_a_time_and_all_are_written_once_they_do(
    url: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_AFTER_S", 0.5)
    workers = [f"w{index}" for index in range(20)]
    async with NarrowBus(url) as bus, serve(TWO, on=bus) as manager:
        await manager.say(*(register(worker, other=1) for worker in workers))
        await manager.state(workers[-1], "allocated")
        bus.refused = b'"owner-died"'
        for worker in workers:
            manager.processor.event_queue.add(m.OwnerDied(allocation=allocation_key("h", worker, "1"), detail="gone"))
        await refused(bus, len(workers) + 3)
        bus.refused = None
        for worker in workers:
            assert (await manager.state(worker, "ended"))["reason_code"] == "owner-died"
