"""Commits that are larger than the topic takes are split; what is too large even alone costs itself only."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from msgspec import to_builtins

from outfitter_proto.support.processes import process_owner
from outfitter_service.core import model as m
from outfitter_service.runtime.processor import event_queue
from runtime.conftest import Serve
from support.bus.narrow_bus import NarrowBus
from support.checker.verdict import verdict
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import (
    TOPICS,
    InProcessManager,
    deregister,
    larger_than_10_kb,
    preparing,
    register,
    static,
)


@pytest.fixture(params=[False, True], ids=["kept", "spent"], autouse=True)
def spends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a writer that was refused something is spent, as Kafka's is when the broker itself refuses."""
    monkeypatch.setattr(NarrowBus, "spends", request.param)


async def flood(manager: InProcessManager, bus: NarrowBus) -> None:
    """Sixty registrations, all of which the manager finds at once, and their answers."""

    async def wait(point: str) -> None:
        if point == "fetch:after":
            await said.wait()

    said = anyio.Event()
    await manager.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
    bus.script = wait
    for index in range(60):
        await manager.say(register(f"w{index}", gpu=1))
    said.set()
    await manager.until(lambda records: sum(key.startswith("h/") for key in records) == 60)
    await manager.reported()


async def test_a_flood_is_answered_in_commits_of_one_batch_for_each_topic(url: str, serve: Serve) -> None:
    """A second batch of history would wait for the first one, and the ledger's may not be divided."""
    async with NarrowBus(url) as bus:
        bus.promised = 9000
        async with serve(static(60), on=bus) as manager:
            await flood(manager, bus)
        assert bus.refusals == 0
        # up to the last step, behind which the commit's own record follows
        steps = [sum(sizes[:-2]) for sizes in bus.sizes[TOPICS.history]]
        assert bus.promised * 0.8 < max(steps) < bus.promised


async def test_a_flood_whose_answers_do_not_fit_into_one_commit_is_answered_in_several(url: str, serve: Serve) -> None:
    async with NarrowBus(url) as bus, serve(static(2), on=bus) as manager:
        await flood(manager, bus)
        assert manager.metric("outfitter_commits_total", outcome="too-large") > 0
        assert manager.metric("outfitter_dead_letters_total") == 0
        report = await verdict(bus.url)
        assert report.violations == ()
        assert report.counts["records"] >= 60


async def test_one_events_effect_on_many_is_split_into_pieces_that_fit(url: str, serve: Serve) -> None:
    """The end of one holder changes what all who wait are told."""
    async with NarrowBus(url) as bus, serve(static(40), on=bus) as manager:
        await manager.say(register("all", gpu=40))
        await manager.state("all", "allocated")
        await manager.say(*[register(f"w{index}", gpu=1) for index in range(40)])
        await manager.until(lambda records: sum(key.startswith("h/w") for key in records) == 40)
        await manager.say(deregister("all"))
        await manager.until(
            lambda records: all(records[f"h/w{index}/1"]["state"] == "allocated" for index in range(40))
        )
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()


async def test_what_time_does_to_many_is_split_into_pieces_that_fit(url: str, serve: Serve) -> None:
    """Behind a refused commit comes a small one that says what is said of hosts. It must not end the splitting."""

    async def take_turns(point: str) -> None:
        if point == "commit:before":  # while this one is under way, the manager decides what comes next
            for _ in range(100):
                await anyio.lowlevel.checkpoint()

    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        bus.script = take_turns
        await manager.say(register("all", gpu=1))
        await manager.state("all", "allocated")
        await manager.say(*[register(f"w{index}", gpu=1, wait_s=1) for index in range(40)])
        await manager.until(
            lambda records: [each["state"] for key, each in records.items() if key.startswith("h/w")] == ["failed"] * 40
        )
        await manager.reported()
        assert (await verdict(bus.url)).violations == ()


async def test_a_registration_whose_answer_is_too_large_alone_is_a_dead_letter_and_the_next_is_served(
    url: str, serve: Serve
) -> None:
    async with NarrowBus(url) as bus, serve(static(2), on=bus) as manager:
        await manager.say(
            register("a", gpu=1),
            register("large", gpu=1, **larger_than_10_kb()),
            register("b", gpu=1),
        )
        await manager.state("b", "allocated")
        [letter] = await manager.dead_letters(1)
        assert "larger than" in letter["reason"]
        assert "h/large/1" not in await manager.records()
        report = await verdict(bus.url)
        assert report.violations == ()


async def test_queue_positions_are_put_right_although_a_commit_that_did_so_was_too_large(
    url: str, serve: Serve
) -> None:
    """A commit in small pieces leaves them to the next one, and that one fails first."""
    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        for worker in "abcd":
            await manager.say(register(worker, gpu=1))
            await manager.until(lambda records, key=f"h/{worker}/1": key in records)
        bus.refusals_left = 2  # fewer events, then smaller pieces of their effects
        await manager.say(deregister("a"))
        await manager.state("b", "allocated")
        bus.refusals_left = 1
        await manager.publish(b"not about anybody's record")
        await manager.dead_letters(1)
        await manager.until(lambda records: [records[f"h/{w}/1"]["queue_position"] for w in "cd"] == [1, 2])
        assert bus.refusals_left == 0


@pytest.mark.parametrize("cause", ["owner-died", "lease-expired"])
async def test_an_end_that_is_too_large_to_write_down_delays_nobody_else_and_is_tried_again(
    url: str, serve: Serve, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_queue, "RETRY_AFTER_S", 0.2)
    async with NarrowBus(url) as bus, serve(static(2), on=bus) as manager:
        bus.refused = f'"{cause}"'.encode()
        await manager.say(register("w", gpu=1, lease_s=0.2 if cause == "lease-expired" else None))
        await manager.state("w", "allocated")
        if cause == "owner-died":
            manager.processor.event_queue.add(m.OwnerDied(allocation="h/w/1", detail="gone"))
        with anyio.fail_after(20):
            while not bus.refusals:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        assert (await manager.records())["h/w/1"]["state"] == "allocated"
        bus.refused = None
        assert (await manager.state("w", "ended"))["reason_code"] == cause


async def test_of_an_inventory_that_is_too_large_to_publish_fewer_devices_are_listed(url: str, serve: Serve) -> None:
    config = (
        'external-resources = ["huge", "gpu"]\n'
        '[external-resource.gpu]\namount = 1\ndriver = "static"\nparam.count = 2\n'
        '[external-resource.huge]\namount = 1\ndriver = "static"\nparam.count = 2000\n'
    )
    async with NarrowBus(url) as bus, serve(config, on=bus) as manager:
        await manager.say(register("a", gpu=1), register("b", huge=1))
        await manager.state("a", "allocated")
        await manager.state("b", "allocated")
        found = (await manager.records())["@host/h"]["resources"]
        assert len(found["gpu"]["devices"]) == 2
        assert found["huge"]["total"] == found["huge"]["healthy"] == 2000
        assert 0 < len(found["huge"]["devices"]) < 256


async def test_a_grant_that_the_bus_does_not_take_although_it_promised_to_fails_alone(url: str, serve: Serve) -> None:
    """A topic's limit was lowered under a manager: what it takes is found out, and nobody else's end is undone."""
    async with NarrowBus(url) as bus, serve(static(400), on=bus) as manager:
        await manager.say(register("w0", gpu=1))
        await manager.state("w0", "allocated")
        await manager.say(register("large", gpu=400), register("next", gpu=1))
        await manager.until(lambda records: "h/next/1" in records)
        await manager.say(deregister("w0"))
        await manager.state("w0", "ended")
        await manager.state("next", "allocated")
        assert (await manager.state("large", "failed"))["reason_code"] == "too-large"
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0


LOWERED = 2500
"""A limit in bytes that a worker's record keeps to if it has none of `LABELS`."""
LABELS = {"note": "x" * 3000}


@pytest.mark.parametrize("cause", ["deregistered", "owner-died", "lease-expired"])
async def test_whatever_ends_an_allocation_is_written_although_its_record_is_larger_than_the_topics_take_by_now(
    url: str, serve: Serve, cause: str
) -> None:
    """The final record then lacks what history has: labels, owner, devices."""
    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        lease_s = 0.5 if cause == "lease-expired" else None
        owner = to_builtins(process_owner()) if cause == "owner-died" else None
        await manager.say(register("a", gpu=1, labels=LABELS, lease_s=lease_s, owner=owner))
        await manager.state("a", "allocated")
        bus.most = LOWERED
        await manager.say(register("next", gpu=1))
        await manager.until(lambda records: "h/next/1" in records)
        if cause == "deregistered":
            await manager.say(deregister("a"))
        elif cause == "owner-died":
            manager.processor.event_queue.add(m.OwnerDied(allocation="h/a/1", detail="gone"))
        ended = await manager.state("a", "ended")
        assert (ended["reason_code"], ended["request"]["labels"]) == (cause, {})
        await manager.state("next", "allocated")
        bus.most = NarrowBus.most
        await manager.say(register("small", gpu=1))  # after its commit the usual limits apply again
        await manager.until(lambda records: "h/small/1" in records)
        await manager.say(deregister("small"))
        await manager.state("small", "ended")
        await manager.reported()
        await manager.say(register("last", gpu=1, labels=LABELS), deregister("next"))
        assert (await manager.state("last", "allocated"))["request"]["labels"] == LABELS
        await manager.say(deregister("last"))
        assert (await manager.state("last", "ended"))["request"]["labels"] == LABELS
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()


async def test_devices_are_taken_back_from_a_record_that_is_larger_than_the_topics_take_by_now(
    url: str, serve: Serve, tmp_path: Path
) -> None:
    BENCHES[str(tmp_path)] = bench = Bench(str(tmp_path), 1)
    async with NarrowBus(url) as bus, serve(preparing(bench.name), on=bus) as manager:
        await manager.say(register("a", gpu=1, labels=LABELS))
        await manager.state("a", "allocated")
        bus.most = LOWERED
        await manager.say(deregister("a"), register("b", gpu=1))
        assert (await manager.state("a", "ended"))["request"]["labels"] == {}
        await manager.state("b", "allocated")
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()
    assert bench.violations == []


async def test_a_deregistration_waits_while_the_topics_take_not_even_the_shortest_record(
    url: str, serve: Serve
) -> None:
    async with NarrowBus(url) as bus, serve(static(1), on=bus) as manager:
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
        bus.refused = b'"h","worker":"a"'
        await manager.say(deregister("a"))
        with anyio.fail_after(20):
            while "takes less than the smallest commit" not in manager.processor.condition:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        assert not manager.processor.ready
        bus.refused = None
        await manager.state("a", "ended")
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()
