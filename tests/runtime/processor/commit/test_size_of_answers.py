"""What packed floods come to in the topics: quotas count packed bytes, so answers must not outgrow those.

The floods go through the reader's own code for record batches, as a broker would hand them out, and then over the
embedded bus. What is written is packed by the Kafka adapter's own code where that matters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import Bus
from outfitter_proto.bus.kafka.reading.batches import FEW_RECORDS
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from support import floods
from support.bus.faulty_bus import FaultyBus
from support.bus.packing_bus import PackingBus, packed, read
from support.checker.verdict import verdict
from support.managers.in_process import CLUSTER, HOST, TOPICS, InProcessManager, heartbeat, register, serving, static

__all__ = ["packed", "read"]

MOST_TIMES = 10
TIMES = {"runs of one worker that wait": 15, "many labels": 11}
"""Each message of the first has two records written: its own, and that of the end of the run before it. The records of
the second have 9.9 times its bytes, and on a busy machine they come in more commits, each with a checkpoint."""


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
        await put(bus, sent)
        await served(manager, "after")
        await manager.stop()
        assert await written(bus) - before <= MOST_TIMES * sum(map(len, sent))
        assert (await verdict(bus.url)).violations == ()


@pytest.mark.parametrize("kind", floods.FLOODS)
async def test_what_is_understood_has_at_most_ten_times_as_many_packed_bytes_written(tmp_path: Path, kind: str) -> None:
    """…where a batch has as many messages as are always read. In larger ones each has more packed bytes."""
    count, make = floods.FLOODS[kind]
    async with (
        PackingBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus,
        serving(bus, static(2), tmp_path) as manager,
    ):
        await served(manager, "before")
        before = bus.sizes.total()
        sent = packed((floods.compact(make(number)) for number in range(count)), records=FEW_RECORDS)
        await put(bus, sent)
        await served(manager, "after")
        assert bus.sizes.total() - before <= TIMES.get(kind, MOST_TIMES) * sum(map(len, sent))


async def put(bus: FaultyBus, sent: Iterable[bytes]) -> None:
    """Put these batches into the input."""
    async with await bus.open_writer("flood", 0) as writer:
        for data in sent:
            await writer.commit([(TOPICS.registrations, read(data)), (TOPICS.history, [])])


async def served(manager: InProcessManager, worker: str) -> None:
    await manager.say(register(worker, resources={}))
    with anyio.fail_after(60):
        await manager.state(worker, "allocated")
        await manager.reported()
