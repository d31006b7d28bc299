"""The same on the bus of one machine, where nobody but a program of ours adds partitions."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import anyio
import pytest

from outfitter_proto import topics as wanted
from outfitter_proto.names import topics
from outfitter_service.runtime.changelog.topic_layout import TopicsChangedError
from outfitter_service.runtime.processor.processor import Limits
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import add_partitions
from support.managers.in_process import CLUSTER, InProcessManager, deregister, register, serving, static

OFTEN = Limits(lease_grace_s=0.1, look_s=0.05)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"


async def ended(manager: InProcessManager, match: str) -> None:
    assert re.search(match, await manager.ended_by(TopicsChangedError))


async def test_more_partitions_end_a_manager_and_the_next_one_finds_the_records_where_they_were(
    url: str, tmp_path: Path
) -> None:
    looks, grown = anyio.Event(), anyio.Event()

    async def hold_back(point: str) -> None:
        if point == "layouts:before" and manager.processor.ready:
            looks.set()
            await grown.wait()

    async with FaultyBus(url) as bus:
        await wanted.create(bus, CLUSTER, partitions=3)
        async with serving(bus, static(count=1), tmp_path, limits=OFTEN) as manager:
            await manager.say(register("w1", gpu=1, lease_s=None))
            await manager.state("w1", "allocated")
            bus.script = hold_back
            await looks.wait()
            await add_partitions(bus, CLUSTER, 5)
            grown.set()
            await ended(
                manager, r"have 5 partitions, and had 3 when this manager started.*new ledger with 5 partitions"
            )
        async with serving(bus, static(count=1), tmp_path, ready=False) as manager:
            await ended(manager, r"allocations/0 is the place of h, but .* in outfitter.allocations/1")


async def test_a_ledger_that_somebody_made_anew_in_the_file_ends_a_manager(url: str, tmp_path: Path) -> None:
    async with FaultyBus(url) as bus:
        async with serving(bus, static(count=1), tmp_path, limits=OFTEN) as manager:
            await manager.say(register("w1", gpu=1, lease_s=None))
            await manager.state("w1", "allocated")
            with sqlite3.connect(tmp_path / "bus.db") as file:
                file.execute("UPDATE topic SET uuid = 'another' WHERE name = ?", (topics().allocations,))
            await ended(manager, "was deleted and recreated while this manager served.*--adopt-ledger")
        async with serving(bus, static(count=1), tmp_path, ready=False) as manager:
            await ended(manager, "was written to another topic of that name.*--adopt-ledger")


async def test_registrations_that_were_made_anew_and_filled_beyond_the_position_are_read_from_the_beginning(
    url: str, tmp_path: Path
) -> None:
    """No reader is ever out of range."""
    async with FaultyBus(url) as bus, serving(bus, static(count=1), tmp_path, limits=OFTEN) as manager:
        await manager.say(register("w0", gpu=1, lease_s=None), register("w1", gpu=1))
        await manager.state("w1", "pending")
        with sqlite3.connect(tmp_path / "bus.db") as file:
            for offset, body in enumerate((deregister("w0"), register("w2", gpu=1))):
                file.execute(
                    "UPDATE record SET value = ? FROM topic WHERE topic.id = record.topic AND name = ? AND off = ?",
                    (json.dumps(body).encode(), topics().registrations, offset),
                )
            file.execute("UPDATE topic SET uuid = 'another' WHERE name = ?", (topics().registrations,))
        await manager.state("w1", "allocated")
        record = await manager.state("w2", "pending")
        assert record["source"]["offset"] > (await manager.state("w1", "allocated"))["source"]["offset"]
        assert manager.metric("outfitter_input_lost_total") == 1
        await manager.say(register("w3", gpu=1))
        await manager.state("w3", "pending")
