"""Operators' orders in tests: a ledger with a host, and somebody who takes orders as its manager does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from outfitter_proto import codec, keys, names, topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.bus.reading import read_on
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Cordon,
    CordonOrder,
    Host,
    InputPosition,
    InventoryDevice,
    ManagerIdentity,
    ResolvedRequest,
    ResourceInventory,
    Source,
)

CLUSTER = names.DEFAULT_CLUSTER
AT = datetime(2026, 1, 1, tzinfo=UTC)
HOST = "gpu-3"


def inventory(*ids: str, **more: Any) -> ResourceInventory:
    """Devices with an index each."""
    devices = [InventoryDevice(id=name, properties={"index": str(number)}) for number, name in enumerate(ids)]
    return ResourceInventory(state="reported", devices=devices, total=len(ids), healthy=len(ids), **more)


def host(name: str = HOST, **resources: ResourceInventory) -> Host:
    """A host's record. Without `resources`: two GPUs, one of which has a second name, and a network card."""
    manager = ManagerIdentity(instance="i", version="0.3.0", since=AT)
    own = {"gpu": inventory("GPU-0", "GPU-1", names=[["GPU-1", "0000:3b:00.0"]]), "nic": inventory("NIC-0")}
    return Host(host=name, manager=manager, since=AT, resources=resources or own)


def holder(device: str, worker: str = "train-7", resource: str = "gpu") -> Allocation:
    """An allocation of one device."""
    return Allocation(
        host=HOST, worker=worker, incarnation="1", state="allocated", request=ResolvedRequest(amounts={resource: 1}),
        since=AT, writer=f"host/{HOST}", commit=1, source=Source(partition=0, offset=0),
        resources={resource: [{"id": device, "index": "0"}]}, token=1,
    )  # fmt: skip


def cordon(order: CordonOrder) -> Cordon:
    """What the ledger has of an order in effect."""
    return Cordon(
        host=order.host, order=order.id, author=order.author, reason=order.reason, since=AT, resource=order.resource,
        device=order.device, until=order.until,
    )  # fmt: skip


def checkpoint(name: str = HOST, **more: Any) -> Checkpoint:
    """The checkpoint of a host's manager."""
    return Checkpoint(
        writer=f"host/{name}", instance="i", cluster=CLUSTER, scope="host", commit=1, token=1, at=AT,
        input=InputPosition(topic_id="t", partition=0, from_=0, to=0), **more,
    )  # fmt: skip


async def write(bus: Bus, *records: Any, cluster: str = CLUSTER) -> None:
    """Write records into the ledger, and orders into their topic."""
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    for record in records:
        topic, partition = names.control_topic(cluster), 0
        if not isinstance(record, CordonOrder):
            writer = record.writer.partition("/")[2] if isinstance(record, Checkpoint) else record.host
            topic, partition = names.topics(cluster).allocations, partition_of(writer, count)
        await bus.publish(topic, partition, Entry(record.key.encode(), codec.encode(record)))


def prepare(url: str, *records: Any, cluster: str = CLUSTER, partitions: int = 1) -> None:
    """Make the topics, and write `records`."""

    async def run() -> None:
        async with connect(url) as bus:
            await topics.create(bus, cluster, partitions=partitions)
            await write(bus, *records, cluster=cluster)

    anyio.run(run)


def orders_in(url: str, cluster: str = CLUSTER) -> list[CordonOrder | None]:
    """Everything in the topic, in its order; None for a tombstone."""

    async def run() -> list[CordonOrder | None]:
        async with connect(url) as bus:
            _, end = await bus.offsets(names.control_topic(cluster), 0)
            found: list[CordonOrder | None] = []
            async with await bus.open_reader(names.control_topic(cluster), 0, start=None, committed=True) as reader:
                while reader.position < end:
                    values = [message.value for message in await reader.fetch()]
                    found += [None if value is None else codec.decode_order(value) for value in values]
            return found

    return anyio.run(run)


async def _take(url: str, cluster: str) -> None:
    async with connect(url) as bus:
        control, ledger = names.control_topic(cluster), names.topics(cluster).allocations
        count = (await bus.topic(ledger)).partitions
        async with await bus.open_reader(control, 0, start=None, committed=True) as reader:
            async for messages in read_on(reader):
                for message in messages:
                    if message.value is None:
                        continue
                    order = codec.decode_order(message.value)
                    stands = order.stands(datetime.now(UTC))
                    entry = Entry(
                        keys.cordon_key(order.host, order.id).encode(), codec.encode(cordon(order)) if stands else None
                    )
                    await bus.publish(ledger, partition_of(order.host, count), entry)


@contextmanager
def taking(url: str, cluster: str = CLUSTER) -> Iterator[None]:
    """Somebody takes orders, and writes into the ledger what is in effect."""
    with start_blocking_portal() as portal:
        task = portal.start_task_soon(_take, url, cluster)
        try:
            yield
        finally:
            task.cancel()
