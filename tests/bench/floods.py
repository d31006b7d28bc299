"""What a flood within the brokers' quota does to other workers of its host, and what its messages cost.

The flood is that of deploy/security.md: who may write for a host sends the cheapest messages that there are, packed
with zstd, as fast as the quota lets it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
from aiokafka import AIOKafkaProducer
from msgspec import Struct

from bench import machine
from outfitter_proto.bus import Entry
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.names import topics
from support import floods
from support.bus.packing_bus import BATCH_RECORDS, packed
from support.kafka.partition_log import PartitionLog
from support.kafka.quotas import set_quotas
from support.managers.in_process import HOST, register, static
from support.managers.process import Manager

QUOTA = 5_000
"""Bytes a second: what deploy/security.md advises."""
FLOOD_S = 20.0
EVERY_S = 0.5
"""Seconds between two honest registrations."""
SMALL = 1000
"""Messages of a batch that are always read."""
SENT = 50_000
"""Bytes of each flood whose cost is measured."""
WITHIN_S = 300.0
LIMIT_S, LIMIT_TIMES, LIMIT_CPU_S = 2.0, 10.0, 1.0
COSTLY = (
    "new workers", "new workers, and their ends", "runs of many workers", "runs of one worker that wait",
    "runs that fail", "deregistrations of unseen runs", "heartbeats of nobody", "many labels",
    "long labels in turn", "long labels, and their ends in turn",
)  # fmt: skip


class Cost(Struct, kw_only=True):
    """One flood: how many messages its `sent` bytes were, what is `written` for them, and the manager's seconds of
    processor time."""

    flood: str
    messages: int
    sent: int
    written: int
    cpu_s: float


@asynccontextmanager
async def _manager(url: str, folder: Path, cluster: str) -> AsyncIterator[Manager]:
    manager = Manager(
        folder / cluster, static(2), bus=url, host=HOST, cluster=cluster, arguments=["--log-level", "warning"]
    )
    await anyio.to_thread.run_sync(manager.start)
    try:
        yield manager
    finally:
        await anyio.to_thread.run_sync(manager.stop)


async def answer(bus: KafkaBus, cluster: str, worker: str) -> float:
    """Register an honest worker; seconds until its record is there."""
    names = topics(cluster)
    key, body = f"{HOST}/{worker}/1".encode(), floods.compact(register(worker, resources={}, lease_s=None))
    _, end = await bus.offsets(names.allocations, 0)
    async with await bus.open_reader(names.allocations, 0, start=end, committed=True) as reader:
        begun = time.perf_counter()
        await bus.publish(names.registrations, 0, Entry(HOST.encode(), body))
        with anyio.fail_after(WITHIN_S):
            while not any(message.key == key for message in await reader.fetch(max_records=10_000)):
                pass
        return time.perf_counter() - begun


async def answers_beside(url: str, folder: Path, cluster: str, *, records: int) -> list[float]:
    """Seconds to each honest answer while somebody floods the same host in batches of so many records."""
    client = f"{cluster}-flood"
    broker: Any = SimpleNamespace(bootstrap=url.removeprefix("kafka://"))
    set_quotas(broker, ("client-id", client), producer_byte_rate=float(QUOTA))
    took: list[float] = []
    async with KafkaBus(url) as bus, _manager(url, folder, cluster):
        await answer(bus, cluster, "before")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_flood, broker.bootstrap, client, topics(cluster).registrations, records)
            begun = time.perf_counter()
            for number in itertools.count():
                if time.perf_counter() - begun > FLOOD_S:
                    break
                took.append(await answer(bus, cluster, f"honest-{number}"))
                await anyio.sleep(EVERY_S)
            tasks.cancel_scope.cancel()
    return took


async def _flood(bootstrap: str, client: str, topic: str, records: int) -> None:
    """New workers register and deregister, for ever. Each has another name. The broker holds the flood up."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap, client_id=client, compression_type="zstd", max_batch_size=2**21,
        request_timeout_ms=60_000,
    )  # fmt: skip
    await producer.start()
    try:
        for start in itertools.count(step=records):
            batch = producer.create_batch()
            for number in range(start, start + records):
                batch.append(key=HOST.encode(), value=floods.compact(floods.pair(number)), timestamp=1)
            batch.close()
            await (await producer.send_batch(batch, topic, partition=0))
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await producer.stop()


async def cost(url: str, folder: Path, cluster: str, kind: str, *, sent: int = SENT) -> Cost:
    """What a manager makes of one flood, in batches of which each record is read if any is."""
    _, make = floods.FLOODS[kind]
    names = topics(cluster)
    written = names.written(history=True)
    batches, messages = await anyio.to_thread.run_sync(lambda: _batches(make, sent))
    async with KafkaBus(url) as bus, _manager(url, folder, cluster) as manager:
        await answer(bus, cluster, "before")
        log = PartitionLog(bus)
        size, cpu = await log.size(*written), machine.cpu_seconds(manager.pid)
        for batch in batches:
            await log.append(names.registrations, batch)
        await answer(bus, cluster, "after")
        return Cost(
            flood=kind,
            messages=messages,
            sent=sum(map(len, batches)),
            written=await log.size(*written) - size,
            cpu_s=machine.cpu_seconds(manager.pid) - cpu,
        )


def _batches(make: Callable[[int], dict[str, Any]], sent: int) -> tuple[list[bytes], int]:
    """The batches of about so many bytes, and their number of messages."""
    found: list[bytes] = []

    def values(start: int) -> Iterator[bytes]:
        return (floods.compact(make(number)) for number in range(start, start + SMALL))

    start = 0
    while sum(map(len, found)) < sent and start < BATCH_RECORDS * 2:
        found += packed(values(start), records=SMALL)
        start += SMALL
    return found, start
