"""Floods, slow buses, poison: what a manager keeps in memory is bounded, and no message stops it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import BusUnavailableError, Entry
from outfitter_service.core import model as m
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from outfitter_service.runtime.input.input_reader import READ_AHEAD
from outfitter_service.runtime.processor import commit_loop
from outfitter_service.runtime.processor.commit import commit
from outfitter_service.runtime.processor.processor import Limits
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.managers.in_process import (
    HOST,
    TOPICS,
    InProcessManager,
    deregister,
    heartbeat,
    register,
    static,
)

FLOOD = 2 * READ_AHEAD + 2000


async def flood(bus: FaultyBus, *bodies: dict[str, Any], key: str = HOST) -> None:
    """Put many messages into the input at once."""
    async with await bus.open_writer("flood", 0) as writer:
        entries = [Entry(key.encode(), json.dumps(body).encode()) for body in bodies]
        await writer.commit([(TOPICS.registrations, entries), (TOPICS.history, [])])


@asynccontextmanager
async def stuck(bus: FaultyBus) -> AsyncIterator[None]:
    """While the block runs, the commit that comes next takes its time."""
    asked, go = anyio.Event(), anyio.Event()

    async def hold(point: str) -> None:
        if point == "commit:before":
            asked.set()
            await go.wait()

    bus.script = hold
    await bus.publish(TOPICS.registrations, 0, Entry(HOST.encode(), json.dumps(register("first", gpu=1)).encode()))
    await asked.wait()
    bus.script = no_faults
    try:
        yield
    finally:
        go.set()


async def settled(manager: InProcessManager) -> int:
    """Wait until the manager takes in nothing more; how many messages it keeps."""
    loop = manager.processor._loop
    assert loop is not None

    def kept() -> int:
        return sum(len(messages) for messages in (loop._open.messages, manager.processor.inputs.reader.messages))

    before, same = -1, 0
    with anyio.fail_after(20):
        while same < 20:
            before, same = (kept(), same + 1) if kept() == before and before else (kept(), 0)
            await anyio.sleep(0.01)
    return before


async def shown(manager: InProcessManager, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    with anyio.fail_after(60):
        while manager.metric(name) != value:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


async def test_what_piles_up_behind_a_slow_bus_stays_on_the_bus_and_is_counted(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(1)) as manager:
        manager.metrics.show(manager.processor.state_counts)
        async with stuck(bus):
            await flood(bus, *[register(f"w{n}", gpu=1) for n in range(FLOOD)])
            kept = await settled(manager)
            assert READ_AHEAD <= kept < 2 * READ_AHEAD + Limits().events_per_commit
            await shown(manager, "outfitter_input_lag_records", FLOOD + 1)
            age = manager.metric("outfitter_oldest_unanswered_seconds")
            assert age > 0
            await anyio.sleep(0.01)
            assert manager.metric("outfitter_oldest_unanswered_seconds") > age
        await shown(manager, "outfitter_ledger_records", FLOOD + 1)
        await shown(manager, "outfitter_input_lag_records", 0)
        assert manager.metric("outfitter_oldest_unanswered_seconds") == 0


async def test_other_hosts_messages_are_passed_over_and_not_kept_however_long_a_commit_takes(
    bus: FaultyBus, serve: Serve
) -> None:
    async with serve(static(2)) as manager:
        async with stuck(bus):
            await flood(bus, *[register(f"w{n}", gpu=1, host="other") for n in range(FLOOD)], key="other")
            await manager.say(register("mine", gpu=1))
            with anyio.fail_after(20):
                while manager.processor.inputs.reader.position < FLOOD + 2:  # noqa: ASYNC110 - it tells nobody
                    await anyio.sleep(0.01)
            assert await settled(manager) == 1
        await manager.state("mine", "allocated")
        await manager.reported()
        assert manager.processor.position == FLOOD + 2


async def test_a_poisonous_message_costs_itself_only_whenever_the_manager_is_killed(
    url: str, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, with and after the commit that leaves it behind: the next manager neither stops at it nor skips
    what came with it."""
    well = commit.decide

    def decide(ledger: Any, rules: Any, event: m.Event, now: Any) -> Any:
        if isinstance(event, m.Incoming) and event.message.worker == "poison":
            raise RuntimeError("a defect")
        return well(ledger, rules, event, now)

    poison = register("poison", gpu=1)
    monkeypatch.setattr(commit, "decide", decide)
    async with FaultyBus(url) as bus:
        one_by_one = Limits(lease_grace_s=0.1, events_per_commit=1)
        for number, kill_at in enumerate(("1 before", "2 before", "1 after", "2 after")):
            killed = anyio.Event()
            commits = 0
            async with serve(static(9), on=bus, ready=False, limits=one_by_one) as manager:

                async def kill(
                    point: str,
                    kill_at: str = kill_at,
                    killed: anyio.Event = killed,
                    manager: InProcessManager = manager,
                ) -> None:
                    nonlocal commits
                    loop = manager.processor._loop
                    if loop is None or not loop.first_commit.is_set():
                        return  # there is no message in those commits
                    commits += point == "commit:before"
                    if point.startswith("commit") and f"{commits} {point.partition(':')[2]}" == kill_at:
                        killed.set()
                        await anyio.sleep_forever()

                bus.script = kill
                await manager.say(register(f"before{number}", gpu=1), poison, register(f"after{number}", gpu=1))
                bus.script = kill
                with anyio.fail_after(20):
                    await killed.wait()
            bus.script = no_faults
        async with serve(static(9), on=bus) as manager:
            for number in range(4):
                await manager.state(f"before{number}", "allocated")
                await manager.state(f"after{number}", "allocated")
            letters = await manager.dead_letters(4)
            assert [letter["source"]["offset"] for letter in letters] == [1, 4, 7, 10]
            assert not [key for key in await manager.records() if "poison" in key]
            assert (await verdict(bus.url)).violations == ()


@pytest.mark.parametrize("kind", ["deregistrations of unseen runs", "runs that fail"])
async def test_after_a_flood_of_one_workers_runs_a_good_registration_is_answered(
    bus: FaultyBus, serve: Serve, kind: str
) -> None:
    runs = [f"{number:05d}".ljust(200, "x") for number in range(5000)]
    say = deregister if kind == "deregistrations of unseen runs" else partial(register, gpu=9)
    async with serve(static(2)) as manager:
        manager.metrics.show(manager.processor.state_counts)
        await flood(bus, *[say("w", run) for run in runs])
        await shown(manager, "outfitter_input_lag_records", 0)
        await manager.say(register("w", "good", gpu=1), register("other", gpu=1))
        await manager.state("w", "allocated", "good")
        await manager.state("other", "allocated")
        await manager.reported()
        assert manager.metric("outfitter_ledger_records") < 64 + 2 * Limits().events_per_commit
        assert manager.metric("outfitter_commits_total", outcome="too-large") == 0
        assert manager.metric("outfitter_dead_letters_total") == 0
        if kind == "deregistrations of unseen runs":
            assert (await verdict(bus.url)).violations == ()


GARBAGE: dict[str, Callable[[int], bytes | None]] = {
    "no JSON": lambda _: b"A" * 6000,
    "empty": lambda _: b"",
    "no body": lambda _: None,
    "heartbeats of nobody": lambda number: json.dumps(heartbeat(f"w{number}")).encode(),
    "deregistrations of nobody": lambda number: json.dumps(deregister(f"w{number}", None)).encode(),
    "a reason of 6 kB": lambda number: json.dumps(deregister(f"w{number}", None) | {"reason": "A" * 6000}).encode(),
}


@pytest.mark.parametrize("kind", GARBAGE)
async def test_of_a_flood_of_garbage_so_much_is_written_down_and_the_rest_is_counted(
    bus: FaultyBus, serve: Serve, kind: str
) -> None:
    count = 3000
    async with serve(static(1)) as manager:
        async with await bus.open_writer("flood", 0) as writer:
            entries = [Entry(HOST.encode(), GARBAGE[kind](number)) for number in range(count)]
            await writer.commit([(TOPICS.registrations, entries), (TOPICS.history, [])])
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        await manager.reported()
        letters = await manager.dead_letters(A_MINUTE)
        assert len(letters) == A_MINUTE
        assert sum(len(json.dumps(letter)) for letter in letters) < A_MINUTE * 8000
        assert manager.metric("outfitter_dead_letters_total") == count
        assert manager.metric("outfitter_dead_letters_omitted_total") == count - A_MINUTE
        await manager.stop()  # as at the end of a minute
        *_, last = await manager.dead_letters(A_MINUTE + 1)
    assert (last["count"], last["until"]) == (count - A_MINUTE, count)
    assert last["source"]["offset"] == A_MINUTE
    assert "beyond the 100 a minute" in last["reason"]
    assert (await verdict(bus.url)).violations == ()


async def test_garbage_does_not_take_the_letters_that_tell_workers_why_they_are_refused(
    bus: FaultyBus, serve: Serve
) -> None:
    async with serve(static(1)) as manager:
        async with await bus.open_writer("flood", 0) as writer:
            entries = [Entry(HOST.encode(), b"garbage") for _ in range(A_MINUTE + 1)]
            await writer.commit([(TOPICS.registrations, entries), (TOPICS.history, [])])
        await manager.say(heartbeat("nobody"))
        *_, last = await manager.dead_letters(A_MINUTE + 1)
        assert last["source"]["offset"] == A_MINUTE + 1
        assert "nobody" in last["reason"]


async def test_the_dead_letters_of_a_commit_that_failed_are_written_by_the_next(bus: FaultyBus, serve: Serve) -> None:
    failures = 3

    async def fail(point: str) -> None:
        nonlocal failures
        if point == "commit:before" and failures:
            failures -= 1
            raise BusUnavailableError("away")

    async with serve(static(1)) as manager:
        bus.script = fail
        await manager.say(*[heartbeat(f"w{number}") for number in range(A_MINUTE)])
        assert len(await manager.dead_letters(A_MINUTE)) == A_MINUTE
        assert failures == 0


async def test_a_stretch_of_deciding_ends_by_time_however_much_each_message_costs(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is told by messages here: each takes as long as half a stretch may."""
    well, now, stretches = commit.decide, 0.0, [0]

    def decide(ledger: Any, rules: Any, event: m.Event, at: Any) -> Any:
        nonlocal now
        now += commit_loop.SLICE_S / 2
        stretches[-1] += 1
        return well(ledger, rules, event, at)

    monkeypatch.setattr(commit, "decide", decide)
    async with serve(static(1)) as manager:
        running = manager.processor._loop
        assert running is not None
        decide_some = running._decide

        def counted() -> None:
            stretches.append(0)
            decide_some()

        monkeypatch.setattr(running, "_decide", counted)
        monkeypatch.setattr(manager.processor._instruments.clock, "monotonic", lambda: now)
        await flood(bus, *[register(f"w{n}", gpu=1) for n in range(100)])
        await manager.state("w99", "pending")
        monkeypatch.undo()
    assert sum(stretches) >= 100
    assert max(stretches) <= 3
