"""What packed floods come to in the topics: quotas count packed bytes, so answers must not outgrow those.

The floods go through the reader's own code for record batches, as a broker would hand them out, and then over the
embedded bus, whose records are as long as Kafka's are unpacked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from outfitter_proto.bus import Bus, Entry
from outfitter_proto.bus.kafka.reading import batches
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.managers.in_process import CLUSTER, HOST, TOPICS, InProcessManager, heartbeat, register, serving, static

MOST_TIMES = 10
ZSTD = 4
BATCH_BYTES = 1024 * 1024
"""What a stock producer puts into a batch before it packs it."""
BATCH_RECORDS = 15_000
"""More empty ones do not fit into what the topic takes."""


def packed(values: Iterable[bytes], *, codec: int = ZSTD, most: int = BATCH_BYTES) -> list[bytes]:
    """Record batches as a stock producer sends them."""
    found: list[bytes] = []
    builder, count = None, 0
    for value in values:
        if builder is not None and (builder.size() + len(value) > most or count >= BATCH_RECORDS):
            found.append(bytes(builder.build()))
            builder = None
        if builder is None:
            builder, count = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 2 * most), 0
        builder.append(count, 1_000, HOST.encode(), value, [])
        count += 1
    return found if builder is None else [*found, bytes(builder.build())]


def read(data: bytes) -> list[Entry]:
    """What a manager's reader makes of a batch."""
    [batch] = batches.split(struct.pack(">q", 0) + data[8:])
    try:
        return [Entry(message.key, message.value) for message in batches.messages(batch, "t", 0)]
    except batches.UnreadableBatchError as error:
        message = batches.raw_message(batch, "t", 0, error)
        return [Entry(message.key, message.value)]


def deregistration(number: int) -> bytes:
    body = {"type": "deregister", "host": HOST, "worker": "w", "incarnation": f"i{number}", "reason": "A" * 60_000}
    return json.dumps(body).encode()


FLOODS: dict[str, tuple[int, Callable[[int], bytes]]] = {
    "deregistrations of unseen runs with a long reason": (1500, deregistration),
    "long garbage": (900, lambda _: b"A" * 60_000),
    "empty messages": (100_000, lambda _: b""),
    "heartbeats of nobody": (20_000, lambda n: json.dumps(heartbeat(f"w{n}")).encode()),
}  # fmt: skip


async def written(bus: Bus) -> int:
    """The bytes of keys and values in all topics that managers write."""
    size = 0
    for topic in (TOPICS.allocations, TOPICS.history, TOPICS.dead_letters):
        async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
            while messages := await reader.fetch(max_records=10_000, timeout=0.0):
                size += sum(len(message.key or b"") + len(message.value or b"") for message in messages)
    return size


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_packed_flood_makes_at_most_ten_times_as_many_bytes_and_no_manager_stop(
    tmp_path: Path, kind: str
) -> None:
    count, make = FLOODS[kind]
    identity = of_partition(replica_identity(CLUSTER), 0)
    scope = PartitionScope(0, 1, identity.writer)
    async with (
        FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus,
        serving(bus, static(1), tmp_path, identity=identity, scope=scope) as manager,
    ):
        await served(manager, "before")
        before = await written(bus)
        sent = packed(map(make, range(count)))
        async with await bus.open_writer("flood", 0) as writer:
            for data in sent:
                await writer.commit([(TOPICS.registrations, read(data)), (TOPICS.history, [])])
        await served(manager, "after")
        await manager.stop()
        assert await written(bus) - before <= MOST_TIMES * sum(map(len, sent))
        assert (await verdict(bus.url)).violations == ()


async def served(manager: InProcessManager, worker: str) -> None:
    await manager.say(register(worker, resources={}))
    with anyio.fail_after(60):
        await manager.state(worker, "allocated")
        await manager.reported()
