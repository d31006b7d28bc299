"""Floods, slow buses, poison: what a manager keeps in memory is bounded, and no message stops it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from outfitter_proto.bus import Entry
from outfitter_service.runtime.intake import READ_AHEAD
from outfitter_service.runtime.processor import Limits
from service.conftest import Serve
from support.faulty_bus import FaultyBus, no_faults
from support.house import HOST, TOPICS, House, register, static

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


async def settled(house: House) -> int:
    """Wait until the manager takes in nothing more; how many messages it keeps."""
    cycle = house.processor._cycle
    assert cycle is not None

    def kept() -> int:
        return sum(len(messages) for messages in (cycle._open.messages, house.processor.intake.messages))

    before, same = -1, 0
    with anyio.fail_after(20):
        while same < 20:
            before, same = (kept(), same + 1) if kept() == before and before else (kept(), 0)
            await anyio.sleep(0.01)
    return before


async def shown(house: House, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    with anyio.fail_after(20):
        while house.metric(name) != value:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


async def test_what_piles_up_behind_a_slow_bus_stays_on_the_bus_and_is_counted(bus: FaultyBus, serve: Serve) -> None:
    async with serve(static(1)) as house:
        house.metrics.show(house.processor.standing)
        async with stuck(bus):
            await flood(bus, *[register(f"w{n}", gpu=1) for n in range(FLOOD)])
            kept = await settled(house)
            assert READ_AHEAD <= kept < 2 * READ_AHEAD + Limits().batch_records
            await shown(house, "outfitter_input_lag_records", FLOOD + 1)
            age = house.metric("outfitter_oldest_unanswered_seconds")
            assert age > 0
            await anyio.sleep(0.01)
            assert house.metric("outfitter_oldest_unanswered_seconds") > age
        await shown(house, "outfitter_ledger_records", FLOOD + 1)
        await shown(house, "outfitter_input_lag_records", 0)
        assert house.metric("outfitter_oldest_unanswered_seconds") == 0


async def test_other_hosts_messages_are_passed_over_and_not_kept_however_long_a_commit_takes(
    bus: FaultyBus, serve: Serve
) -> None:
    async with serve(static(2)) as house:
        async with stuck(bus):
            await flood(bus, *[register(f"w{n}", gpu=1, host="other") for n in range(FLOOD)], key="other")
            await house.say(register("mine", gpu=1))
            with anyio.fail_after(20):
                while house.processor.intake.position < FLOOD + 2:  # noqa: ASYNC110 - it tells nobody
                    await anyio.sleep(0.01)
            assert await settled(house) == 1
        await house.state("mine", "allocated")
        assert house.processor.position == FLOOD + 2
