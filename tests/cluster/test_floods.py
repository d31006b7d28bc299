"""One host's flood does not starve the other hosts of its partition, in cluster scope."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto.bus import Bus, Entry
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.remit import PartitionRemit
from outfitter_service.runtime.station import Limits
from support.faulty_bus import FaultyBus, no_faults
from support.house import CLUSTER, TOPICS, House, register, serving, static
from support.verdict import verdict

IDENTITY = of_partition(replica_identity(CLUSTER), 0)
FLOOD = 20_000
"""Registrations: several times what is read ahead."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[FaultyBus]:
    async with FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        yield bus


@asynccontextmanager
async def managed(bus: Bus, folder: Path, **limits: Any) -> AsyncIterator[House]:
    async with serving(
        bus,
        static(1),
        folder,
        identity=IDENTITY,
        remit=PartitionRemit(0, 1, IDENTITY.writer),
        limits=Limits(lease_grace_s=0.1, **limits),
        ready=False,
    ) as house:
        yield house


async def publish(bus: Bus, *bodies: dict[str, Any]) -> None:
    """Put messages into the input, many at once."""
    async with await bus.open_writer("flood", 0) as writer:
        entries = [Entry(body["host"].encode(), json.dumps(body).encode()) for body in bodies]
        await writer.commit([(TOPICS.registrations, entries), (TOPICS.history, [])])


def flood(count: int, host: str = "loud") -> list[dict[str, Any]]:
    return [register(f"w{number}", host=host, gpu=1) for number in range(count)]


async def answered(house: House, key: str) -> dict[str, Any]:
    """Wait until `key` has a record; return where in the input the partition was with the commit that said so."""
    await house.until(lambda records: key in records)
    wanted: int | None = None
    async with await house.bus.open_reader(TOPICS.allocations, 0, start=None, committed=True) as reader:
        while True:
            for message in await reader.fetch(max_records=10_000):
                body = json.loads(message.value or b"{}")
                if message.key == key.encode() and wanted is None:
                    wanted = body["commit"]
                elif body.get("type") == "checkpoint" and body["commit"] == wanted:
                    found: dict[str, Any] = body["input"]
                    return found


async def test_a_flood_of_one_host_does_not_hold_up_anothers_registration(bus: FaultyBus, tmp_path: Path) -> None:
    async with serving(bus, static(1), tmp_path, ready=False):
        pass  # makes the topics
    await publish(bus, *flood(FLOOD), register("quiet", host="other", gpu=1))
    async with managed(bus, tmp_path) as house:
        place = await answered(house, "other/quiet/1")
        print(place)
        assert place["to"] < FLOOD
        assert place["ahead"]["other"] == FLOOD + 1
