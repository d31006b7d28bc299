"""A sweeper on a bus, and what it has written down."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry
from outfitter_proto.codec import decode_dead_letter
from outfitter_proto.records import DeadLetter
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.identity import host_identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import (
    CLUSTER,
    TOPICS,
)

WITHIN_S = 20.0
GRACE_S = 0.3


@asynccontextmanager
async def sweeping(bus: Bus, *, grace: float = GRACE_S, partitions: int = 1) -> AsyncIterator[Metrics]:
    """A sweeper on `bus` while the block runs; leaving it ends the sweeper as a crash would."""
    metrics = Metrics()
    identity, instruments = host_identity(CLUSTER, "s"), Instruments.of(metrics)
    sweeper = SweepingManager(bus, partitions=partitions, identity=identity, instruments=instruments, grace_s=grace)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run)
        yield metrics
        tasks.cancel_scope.cancel()


@pytest.fixture
async def made(bus: FaultyBus) -> FaultyBus:
    """The bus, with topics of one partition."""
    await all_topics.create(bus, CLUSTER, partitions=1)
    return bus


async def say(bus: Bus, body: dict[str, Any] | bytes, key: str | None, partition: int = 0) -> int:
    value = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await bus.publish(TOPICS.registrations, partition, Entry(key.encode() if key is not None else None, value))


async def letters(bus: Bus, count: int, partition: int = 0) -> list[DeadLetter]:
    """All dead letters, once there are `count`."""
    with anyio.fail_after(WITHIN_S):
        async with await bus.open_reader(TOPICS.dead_letters, partition, start=None, committed=True) as reader:
            found: list[DeadLetter] = []
            while len(found) < count:
                found += [decode_dead_letter(m.value or b"") for m in await reader.fetch(timeout=0.2)]
            return found


async def swept(bus: Bus, position: int, partition: int = 0) -> None:
    """Wait until everything before `position` is swept: what comes after a dead letter can be counted on."""
    while max(letter.source.offset for letter in await letters(bus, 1, partition)) < position:  # noqa: ASYNC110
        await anyio.sleep(0.02)
