"""What one commit may hold is fixed: what does not fit beside other events waits for the next one, and what a topic's
lowered limit does not take is repeated until it does."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from outfitter_drivers.api import Device
from runtime.conftest import Serve
from support.bus.narrow_bus import NarrowBus
from support.checker.verdict import verdict
from support.drivers.reporting import SOURCES, Source, reporting
from support.managers.in_process import TOPICS, InProcessManager, deregister, register, static

MAX_BYTES = 8000
"""The most bytes of a decision; `NarrowBus` takes 10,000 in a commit."""


@pytest.fixture(params=[False, True], ids=["kept", "reopened"], autouse=True)
def uses_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a writer that was refused something must be opened again: Kafka's, if the broker itself refuses."""
    monkeypatch.setattr(NarrowBus, "uses_up", request.param)


async def say_at_once(manager: InProcessManager, bus: NarrowBus, *messages: dict[str, Any]) -> None:
    """Publish messages, all of which the manager finds at once."""

    async def wait(point: str) -> None:
        if point == "fetch:after":
            await said.wait()

    said = anyio.Event()
    await manager.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
    bus.script = wait
    await manager.say(*messages)
    said.set()


async def test_a_flood_is_answered_in_commits_that_fit(url: str, serve: Serve) -> None:
    """History is in one batch as well: a second one would wait for the first."""
    async with NarrowBus(url) as bus, serve(static(60), on=bus, max_bytes=MAX_BYTES) as manager:
        await say_at_once(manager, bus, *(register(f"w{index}", gpu=1) for index in range(60)))
        await manager.until(lambda records: sum(key.startswith("h/") for key in records) == 60)
        await manager.reported()
        assert bus.refusals == 0
        # up to the last step, behind which the commit's own record follows
        steps = [sum(sizes[:-2]) for sizes in bus.sizes[TOPICS.history]]
        assert MAX_BYTES * 0.8 < max(steps) < MAX_BYTES
        assert (await verdict(bus.url)).violations == ()


@pytest.mark.parametrize("prepares", [False, True], ids=["fast grants", "grants in steps"])
async def test_an_answer_that_does_not_fit_beside_others_waits_for_the_next_commit(
    url: str, serve: Serve, prepares: bool
) -> None:
    SOURCES["gpu"] = source = Source()
    async with NarrowBus(url) as bus, serve(reporting("gpu"), on=bus, max_bytes=300_000) as manager:
        bus.most = 320_000
        source.report(*[Device(id=f"g{n}", properties={"note": "x" * 1000}) for n in range(350)])
        more = {"operators": {"o": {"gpu": {"amount": 1}}}} if prepares else {}
        await say_at_once(manager, bus, *(register(f"w{index}", gpu=70, **more) for index in range(5)))
        for index in range(5):
            await manager.state(f"w{index}", "allocated")
        await manager.say(*(deregister(f"w{index}") for index in range(5)))
        for index in range(5):
            await manager.state(f"w{index}", "ended")
        await manager.reported()
        assert bus.refusals == 0
        grants = [size for sizes in bus.sizes[TOPICS.allocations] for size in sizes if size > 60_000]
        assert len(grants) >= 5
        assert (await verdict(bus.url)).violations == ()


async def test_one_events_effect_on_many_is_split_into_pieces_that_fit(url: str, serve: Serve) -> None:
    """The end of one holder changes what all who wait are told."""
    async with NarrowBus(url) as bus, serve(static(40), on=bus, max_bytes=MAX_BYTES) as manager:
        await manager.say(register("all", gpu=40))
        await manager.state("all", "allocated")
        await manager.say(*[register(f"w{index}", gpu=1) for index in range(40)])
        await manager.until(lambda records: sum(key.startswith("h/w") for key in records) == 40)
        await manager.say(deregister("all"))
        await manager.until(
            lambda records: all(records[f"h/w{index}/1"]["state"] == "allocated" for index in range(40))
        )
        await manager.reported()
        assert bus.refusals == 0
        assert (await verdict(bus.url)).violations == ()


async def test_what_time_does_to_many_is_split_into_pieces_that_fit(url: str, serve: Serve) -> None:
    async def take_turns(point: str) -> None:
        if point == "commit:before":  # while this one is under way, the manager decides what comes next
            for _ in range(100):
                await anyio.lowlevel.checkpoint()

    async with NarrowBus(url) as bus, serve(static(1), on=bus, max_bytes=MAX_BYTES) as manager:
        bus.script = take_turns
        await manager.say(register("all", gpu=1))
        await manager.state("all", "allocated")
        await manager.say(*[register(f"w{index}", gpu=1, wait_s=1) for index in range(40)])
        await manager.until(
            lambda records: [each["state"] for key, each in records.items() if key.startswith("h/w")] == ["failed"] * 40
        )
        await manager.reported()
        assert bus.refusals == 0
        assert (await verdict(bus.url)).violations == ()


async def test_of_an_inventory_that_is_too_large_to_publish_fewer_devices_are_listed(url: str, serve: Serve) -> None:
    config = (
        'external-resources = ["huge", "gpu"]\n'
        '[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = 2\n'
        '[external-resource.huge]\namount = 1\ndriver = "static"\nparam.count = 2000\n'
    )
    async with NarrowBus(url) as bus, serve(config, on=bus, max_bytes=MAX_BYTES) as manager:
        await manager.say(register("a", gpu=1), register("b", huge=1))
        await manager.state("a", "allocated")
        await manager.state("b", "allocated")
        found = (await manager.records())["@host/h"]["resources"]
        assert len(found["gpu"]["devices"]) == 2
        assert found["huge"]["total"] == found["huge"]["healthy"] == 2000
        assert 0 < len(found["huge"]["devices"]) < 256
        assert bus.refusals == 0


# --- a limit that somebody lowered ---


async def test_a_refused_commit_is_repeated_until_the_topic_takes_it(url: str, serve: Serve) -> None:
    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
        bus.refused = b'"h","worker":"a"'
        await manager.say(deregister("a"), register("b", gpu=1))
        with anyio.fail_after(20):
            while bus.refusals < 3:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        assert not manager.processor.ready
        assert f"topic {TOPICS.allocations} takes less than a commit" in manager.processor.condition
        bus.refused = None
        await manager.state("a", "ended")
        await manager.state("b", "allocated")
        await manager.reported()
        with anyio.fail_after(20):
            while not manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert manager.metric("outfitter_commits_total", outcome="too-large") >= 3
        assert (await verdict(bus.url)).violations == ()


async def test_a_lowered_limit_that_commits_still_fit_harms_nobody(url: str, serve: Serve) -> None:
    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        bus.most = 5000
        for worker in "abc":
            await manager.say(register(worker, gpu=1))
            await manager.state(worker, "allocated")
            await manager.say(deregister(worker))
            await manager.state(worker, "ended")
        assert bus.refusals == 0
        assert manager.processor.ready
