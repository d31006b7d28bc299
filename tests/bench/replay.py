"""Replaying a ledger, in a process of its own: as the service does it, or as a bare read. And what it takes in memory.

The bare read is aiokafka's consumer, committed records only, each decoded to a struct and kept by its key.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiokafka import AIOKafkaConsumer, TopicPartition

from bench import loads, machine
from outfitter_proto import codec
from outfitter_proto.bus import Bus, Entry
from outfitter_proto.bus.kafka.adapter import KafkaBus
from outfitter_proto.bus.kafka.reading.reader import FETCH_BYTES
from outfitter_proto.keys import host_writer
from outfitter_proto.names import topics, transactional_id
from outfitter_proto.records import Allocation, Checkpoint, InputPosition, LedgerRecord, Owner
from outfitter_service import memory
from outfitter_service.runtime.changelog.restore import restore
from outfitter_service.runtime.input.scope import HostScope

WRITTEN_AT_ONCE = 700
NO_MORE_WITHIN_MS = 5000


class Replayed(msgspec.Struct, kw_only=True):
    """How long it took, what there was, and the bytes that the process had grown by at the end."""

    records: int
    kept: int
    seconds: float
    grown: int


async def fill(bus: Bus, cluster: str, sample: bytes, count: int) -> None:
    """Write a ledger of `count` live allocations like `sample`, each with a device and an owner process of its own."""
    names = topics(cluster)
    like = msgspec.json.decode(sample, type=Allocation)
    [(resource, [device])] = like.resources.items()
    writer = host_writer(loads.HOST)
    async with await bus.open_writer(transactional_id(cluster, writer), 0) as open_writer:
        for start in range(0, count, WRITTEN_AT_ONCE):
            entries: list[Entry] = []
            for number in range(start, min(start + WRITTEN_AT_ONCE, count)):
                record = msgspec.structs.replace(
                    like,
                    worker=loads.worker(number),
                    incarnation=loads.incarnation(number),
                    request=msgspec.structs.replace(like.request, owner=owner(number)),
                    resources={resource: [{**device, "id": f"{number:08d}", "index": str(number)}]},
                )
                entries.append(Entry(record.key.encode(), codec.encode(record)))
            checkpoint = Checkpoint(
                writer=writer, instance="bench", cluster=cluster, scope="host", commit=1, token=1, at=like.since,
                input=InputPosition(topic_id="none", partition=0, from_=0, to=0),
            )  # fmt: skip
            entries.append(Entry(checkpoint.key.encode(), codec.encode(checkpoint)))
            await open_writer.commit([(names.allocations, entries)])
    await bus.stable_end(names.allocations, 0)


def owner(number: int) -> Owner:
    """A process, as workers in Python name theirs."""
    boot_id = "01a1fec4-4ef5-70a4-bed7-000000000000"
    return Owner(pid=number + 1, start_ticks=number, pid_ns=4_026_531_836, boot_id=boot_id)


async def by_service(url: str, cluster: str) -> Replayed:
    """As a manager does when it starts."""
    memory.tune()
    async with KafkaBus(url) as bus:
        scope = HostScope(loads.HOST, host_writer(loads.HOST))
        before = machine.resident_bytes()
        found = await restore(bus, topics(cluster).allocations, 0, scope)
        return Replayed(
            records=found.records,
            kept=len(found.ledger.allocations),
            seconds=found.seconds,
            grown=machine.resident_bytes() - before,
        )


async def bare(url: str, cluster: str) -> Replayed:
    """With aiokafka and msgspec alone; garbage is collected as seldom as in the service."""
    memory.tune()
    source = TopicPartition(topics(cluster).allocations, 0)
    consumer = AIOKafkaConsumer(
        bootstrap_servers=url.removeprefix("kafka://"),
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=FETCH_BYTES,
    )
    await consumer.start()
    consumer.assign([source])
    try:
        before = machine.resident_bytes()
        begun = time.perf_counter()
        end = (await consumer.end_offsets([source]))[source]
        decode = msgspec.json.Decoder(LedgerRecord).decode
        state: dict[bytes, LedgerRecord] = {}
        count = 0
        while await consumer.position(source) < end:
            for message in (await consumer.getmany(source, timeout_ms=1000, max_records=10_000)).get(source, ()):
                count += 1
                state[message.key] = decode(message.value)
        return Replayed(
            records=count,
            kept=len(state),
            seconds=time.perf_counter() - begun,
            grown=machine.resident_bytes() - before,
        )
    finally:
        await consumer.stop()


def main(kind: str, url: str, cluster: str) -> None:
    """Replay once, on the event loop that the service would use, and print `Replayed` as JSON."""
    ways: dict[str, Callable[[str, str], Awaitable[Replayed]]] = {"outfitter": by_service, "bare": bare}
    factory = None
    if machine.has_uvloop():
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:

        async def once() -> Replayed:
            return await ways[kind](url, cluster)

        print(msgspec.json.encode(runner.run(once())).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
