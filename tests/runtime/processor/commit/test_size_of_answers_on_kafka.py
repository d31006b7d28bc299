"""What packed registrations come to in a broker's logs: those that are answered, unlike garbage, have records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.reading import answer_allowance, codecs
from outfitter_proto.names import topics
from support.bus.packing_bus import packed
from support.kafka.broker import KafkaBroker
from support.kafka.partition_log import PartitionLog
from support.managers.in_process import InProcessManager, deregister, register, serving, static

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

MOST_TIMES = 10
WRITTEN_PLAIN = 1024 * 1024
"""Bytes at first, for the test's sake fewer than usual."""
RECORD_BYTES = 300
"""What the smallest of the records takes in the ledger."""

FLOODS: dict[str, Callable[[int], dict[str, Any]]] = {
    "new workers": lambda n: register(f"w{n}", resources={}),
    "runs that nothing is there for": lambda n: register("w", f"{n}", gpu=9),
    "deregistrations of unseen runs": lambda n: deregister(f"w{n}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOODS)
async def test_answers_to_packed_registrations_are_packed_as_well(
    kafka_broker: KafkaBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Once a manager has written plain what it may be ahead of its input."""
    monkeypatch.setattr(answer_allowance, "MOST_BYTES", WRITTEN_PLAIN)
    first = WRITTEN_PLAIN // RECORD_BYTES
    cluster, make = KafkaBroker.new_cluster(), FLOODS[kind]
    names = topics(cluster)
    async with KafkaBus(kafka_broker.url) as bus:
        await all_topics.create(bus, cluster, partitions=1)
        async with serving(bus, static(1), tmp_path, cluster=cluster) as manager:
            log = PartitionLog(bus)
            await through(manager, log, names.registrations, [make(n) for n in range(first)])
            sent, written = await log.size(names.registrations), await log.size(*names.written(history=True))
            await through(manager, log, names.registrations, [make(first + n) for n in range(3000)], records=1000)
            sent = await log.size(names.registrations) - sent
            written = await log.size(*names.written(history=True)) - written
            used = {name: {b.attributes & 7 for b in await log.batches(name)} for name in names.written(history=True)}
            await manager.stop()
    assert written <= MOST_TIMES * sent
    assert codecs.ZSTD in used[names.history]
    assert used[names.allocations] | used[names.dead_letters] <= {codecs.NONE, codecs.GZIP}, "workers need a library"


async def test_answers_to_plain_registrations_are_plain(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    """To pack them would take time of which there is little."""
    cluster = KafkaBroker.new_cluster()
    names = topics(cluster)
    async with KafkaBus(kafka_broker.url) as bus:
        await all_topics.create(bus, cluster, partitions=1)
        async with serving(bus, static(1), tmp_path, cluster=cluster) as manager:
            log = PartitionLog(bus)
            bodies = [register("w", f"run-{n}", gpu=9, labels={"job": "x" * 700}) for n in range(8000)]
            await through(manager, log, names.registrations, bodies, codec=0, most=50_000)
            ledger = await log.batches(names.allocations)
            await manager.stop()
    assert sum(len(batch.data) for batch in ledger) > answer_allowance.MOST_BYTES
    assert {batch.attributes & 7 for batch in ledger} == {0}


async def through(
    manager: InProcessManager, log: PartitionLog, topic: str, bodies: list[dict[str, Any]], **how: int
) -> None:
    """Send these, and wait until they are answered."""
    for batch in packed((json.dumps(body).encode() for body in bodies), **how):
        await log.append(topic, batch)
    _, end = await manager.bus.offsets(topic, 0)
    with anyio.fail_after(60):
        while manager.processor.position < end:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.02)
    await manager.reported()
