"""Harm to the layout of a cluster's topics on a real broker: made anew, or with more partitions than their ledger."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Mapping
from contextlib import closing, suppress

import anyio
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from outfitter_proto import topics
from outfitter_proto.bus import Bus, BusError, Entry
from outfitter_proto.bus.embedded.connecting import location
from outfitter_proto.names import topics as topic_names
from support.bus.committed import committed


async def remake(bus: Bus, cluster: str, names: Collection[str], *, partitions: int | None = None) -> None:
    """Delete these topics and make them anew, with as many `partitions` as they had unless it is said."""
    before = await bus.layouts(names)
    admin = AIOKafkaAdminClient(bootstrap_servers=bus.url.removeprefix("kafka://"))
    await admin.start()
    try:
        await admin.delete_topics(list(names))
    finally:
        await admin.close()
    with anyio.fail_after(20):
        while await bus.layouts(names):  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.02)
        count = partitions or max(layout.partitions for layout in before.values())
        while set(before) - (await bus.layouts(before)).keys():
            await topics.create(bus, cluster, partitions=count)
            await anyio.sleep(0.02)


async def add_partitions(bus: Bus, cluster: str, partitions: int, *, only: Collection[str] | None = None) -> None:
    """What `kafka-topics --alter --partitions` does, or its like in a file."""
    for name in only or topic_names(cluster):
        await add_partitions_to(bus, name, partitions)


async def add_partitions_to(bus: Bus, topic: str, partitions: int) -> None:
    """Add partitions to one topic, and wait until the last one has a leader."""
    if bus.local:
        path = location.parse(bus.url).path
        with closing(sqlite3.connect(path, timeout=30, isolation_level="IMMEDIATE")) as connection, connection:
            connection.execute("UPDATE topic SET partitions = ? WHERE name = ?", (partitions, topic))
            [(number, first)] = connection.execute(
                "SELECT id, (SELECT count(*) FROM part WHERE topic = id) FROM topic WHERE name = ?", (topic,)
            )
            rows = [(number, each) for each in range(first, partitions)]
            connection.executemany("INSERT INTO part (topic, part) VALUES (?, ?)", rows)
        return
    admin = AIOKafkaAdminClient(bootstrap_servers=bus.url.removeprefix("kafka://"))
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(partitions)})
    finally:
        await admin.close()
    with anyio.fail_after(20):
        while True:
            with suppress(BusError):
                if (await bus.topic(topic)).partitions == partitions:
                    await bus.offsets(topic, partitions - 1)
                    return
            await anyio.sleep(0.02)


def set_policy(bootstrap: str, topic: str, policy: str) -> None:
    """Change a topic's cleanup.policy, and nothing else."""
    set_config(bootstrap, topic, "cleanup.policy", policy)


def set_config(bootstrap: str, topic: str, name: str, value: str) -> None:
    """What `kafka-configs --alter --add-config` does."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(15)


def delete_records(bootstrap: str, topic: str, before: Mapping[int, int]) -> None:
    """Delete what stands before these offsets, by partition, as retention does in time where the policy has it.

    A broker goes by a policy that was just set only a little later.
    """
    places = [TopicPartition(topic, partition, offset) for partition, offset in before.items()]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + 15
    while True:
        try:
            for done in admin.delete_records(places).values():
                done.result(15)
            return
        except KafkaException as error:
            if error.args[0].code() != KafkaError.POLICY_VIOLATION or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


async def evaporate(bus: Bus, cluster: str, *, but: int) -> None:
    """Delete the records of the ledger, in each partition all but so many offsets; then it is as it must be again."""
    name, bootstrap = topic_names(cluster).allocations, bus.url.removeprefix("kafka://")
    ends = {number: (await bus.offsets(name, number))[1] for number in range((await bus.topic(name)).partitions)}
    before = {number: max(0, end - but) for number, end in ends.items()}
    await anyio.to_thread.run_sync(set_policy, bootstrap, name, "delete")
    await anyio.to_thread.run_sync(delete_records, bootstrap, name, before)
    await anyio.to_thread.run_sync(set_policy, bootstrap, name, "compact")


async def ledger(bus: Bus, cluster: str) -> dict[int, Mapping[bytes, bytes]]:
    """All that is in the ledger, by partition: the last value of each key that has one."""
    topic = topic_names(cluster).allocations
    found: dict[int, Mapping[bytes, bytes]] = {}
    for partition in range((await bus.topic(topic)).partitions):
        last: dict[bytes, bytes | None] = {}
        last |= {message.key or b"": message.value for message in await committed(bus, topic, partition)}
        found[partition] = {key: value for key, value in last.items() if value is not None}
    return found


async def restore(bus: Bus, cluster: str, copy: Mapping[int, Mapping[bytes, bytes]]) -> None:
    """Write a copy of the ledger back, to the partitions given."""
    for partition, records in copy.items():
        for key, value in records.items():
            await bus.publish(topic_names(cluster).allocations, partition, Entry(key, value))
