"""The topics on a real broker: made as they must be, and every difference found."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import anyio
import pytest

from outfitter_proto import topics
from outfitter_proto.bus import Bus, TopicSpec, connect
from outfitter_proto.names import control_topic, managers_topic
from outfitter_proto.names import topics as topic_names
from support.kafka.broker import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
async def kafka(kafka_broker: KafkaBroker) -> AsyncIterator[Bus]:
    async with connect(kafka_broker.url) as bus:
        yield bus


async def made_differently(
    bus: Bus, cluster: str, changes: Mapping[str, Mapping[str, str]], *, partitions: int = 3
) -> None:
    """Make the topics in `changes` with other settings, and `partitions`; the rest as they must be."""
    for topic, changed in changes.items():
        config = {s.name: s.value for s in topics.required(cluster)[topic]}
        await bus.create_topics([TopicSpec(topic, partitions, config | dict(changed))])
    await topics.create(bus, cluster, partitions=3)


async def test_topics_are_made_once_and_pass_the_check(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    names = [*topic_names(cluster), managers_topic(cluster), control_topic(cluster)]
    assert await topics.create(kafka, cluster, partitions=3) == names
    assert await topics.create(kafka, cluster, partitions=5) == []
    assert await topics.check(kafka, cluster) == []
    described = [await kafka.topic(name) for name in names]
    assert [info.partitions for info in described] == [3, 3, 3, 3, 3, 1]
    assert [info.replication for info in described] == [1] * 6
    assert len({info.id for info in described}) == 6


async def test_missing_topics_are_fatal_and_come_with_the_remedy(kafka: Bus) -> None:
    found = await topics.check(kafka, KafkaBroker.new_cluster())
    assert [(d.found, d.fatal) for d in found] == [("missing", True)] * 4 + [("missing", False)] * 2
    assert {d.remedy for d in found} == {"outfitter topics create"}


async def test_a_setting_that_differs_is_found_with_both_values_the_reason_and_the_command(
    kafka: Bus, kafka_broker: KafkaBroker
) -> None:
    cluster = KafkaBroker.new_cluster()
    name = topic_names(cluster).registrations
    await made_differently(kafka, cluster, {name: {"retention.ms": "60000", "message.timestamp.type": "CreateTime"}})
    found = await topics.check(kafka, cluster)
    command = f"kafka-configs --bootstrap-server {kafka_broker.bootstrap} --alter --topic {name} --add-config "
    week = str(7 * topics.DAY_MS)
    assert {(d.topic, d.setting, d.found, d.wanted, d.remedy, d.fatal) for d in found} == {
        (name, "retention.ms", "60000", f"at least {week}", f"{command}retention.ms={week}", False),
        (
            name, "message.timestamp.type", "CreateTime", "LogAppendTime",
            f"{command}message.timestamp.type=LogAppendTime", False,
        ),
    }  # fmt: skip
    assert all(d.why for d in found)


BAD_VALUES = {
    "registrations": {
        "retention.bytes": "1000000", "max.message.bytes": "1048588", "compression.type": "uncompressed",
        "unclean.leader.election.enable": "true", "min.insync.replicas": "3",
    },
    "allocations": {
        "delete.retention.ms": "3600000", "min.cleanable.dirty.ratio": "0.5", "segment.ms": "604800000",
        "segment.bytes": "1073741824", "max.message.bytes": "65536", "compression.type": "zstd",
        "unclean.leader.election.enable": "true", "min.insync.replicas": "2",
    },
    "history": {
        "cleanup.policy": "compact", "retention.ms": "1000", "max.message.bytes": "1000", "compression.type": "lz4",
        "unclean.leader.election.enable": "true",
    },
    "dead_letters": {
        "cleanup.policy": "delete", "retention.ms": "1000", "max.message.bytes": "1000", "compression.type": "snappy",
        "unclean.leader.election.enable": "true",
    },
}  # fmt: skip
FATAL = {
    ("allocations", "max.message.bytes"),
    ("history", "max.message.bytes"),
    ("dead_letters", "max.message.bytes"),
}
"""A manager is not ready before they take its commits. That a single copy may become leader uncleanly is no danger, as
there is no other."""


@pytest.mark.parametrize("topic", list(BAD_VALUES))
async def test_every_bad_value_is_found_and_the_commands_of_the_check_mend_all_of_them(
    kafka: Bus, kafka_broker: KafkaBroker, topic: str
) -> None:
    cluster = KafkaBroker.new_cluster()
    name = getattr(topic_names(cluster), topic)
    await made_differently(kafka, cluster, {name: BAD_VALUES[topic]})
    found = await topics.check(kafka, cluster)
    assert {d.setting: d.found for d in found} == BAD_VALUES[topic]
    assert {(topic, d.setting) for d in found if d.fatal} == {pair for pair in FATAL if pair[0] == topic}
    mended = changed([d.remedy for d in found], f"kafka-configs --bootstrap-server {kafka_broker.bootstrap}", name)
    await set_all(
        kafka_broker, name, {s.name: s.value for s in topics.required(cluster)[name]} | BAD_VALUES[topic] | mended
    )
    with anyio.move_on_after(20):  # the controller has it at once, the broker that answers a moment later
        while await topics.check(kafka, cluster):  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.02)
    assert await topics.check(kafka, cluster) == []


def changed(remedies: list[str], tool: str, topic: str) -> dict[str, str]:
    """What the commands set. Kafka's tool takes seconds a call, so the test sends its request instead."""
    command = f"{tool} --alter --topic {topic} --add-config "
    assert all(remedy.startswith(command) for remedy in remedies)
    pairs = [remedy.removeprefix(command).strip("'").partition("=") for remedy in remedies]
    return {setting: value.strip("[]") for setting, _, value in pairs}  # brackets keep a list's commas together


async def set_all(broker: KafkaBroker, topic: str, settings: dict[str, str]) -> None:
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    [response] = await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=settings)])
    await admin.close()
    assert [code for code, *_ in response.resources] == [0], response.resources


async def test_better_values_are_no_difference(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    names = topic_names(cluster)
    better = {
        names.registrations: {"retention.ms": "-1"},
        names.allocations: {
            "segment.ms": "60000", "delete.retention.ms": str(7 * topics.DAY_MS), "max.message.bytes": "5000000"
        },
        names.dead_letters: {"cleanup.policy": "delete,compact", "retention.ms": "-1"},
    }  # fmt: skip
    await made_differently(kafka, cluster, better)
    assert await topics.check(kafka, cluster) == []


async def test_a_ledger_whose_deletions_go_before_they_can_be_read_is_fatal(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    await made_differently(kafka, cluster, {topic_names(cluster).allocations: {"delete.retention.ms": "100"}})
    [difference] = await topics.check(kafka, cluster)
    assert (difference.setting, difference.found, difference.fatal) == ("delete.retention.ms", "100", True)


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
async def test_a_ledger_that_evaporates_is_fatal(kafka: Bus, policy: str) -> None:
    cluster = KafkaBroker.new_cluster()
    await made_differently(kafka, cluster, {topic_names(cluster).allocations: {"cleanup.policy": policy}})
    [difference] = await topics.check(kafka, cluster)
    assert (difference.setting, difference.found, difference.fatal) == ("cleanup.policy", policy, True)


async def test_compacted_registrations_are_fatal(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    await made_differently(kafka, cluster, {topic_names(cluster).registrations: {"cleanup.policy": "compact"}})
    [difference] = await topics.check(kafka, cluster)
    assert difference.fatal


async def test_unequal_partition_counts_are_fatal_and_each_count_is_shown(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    name = topic_names(cluster).history
    await made_differently(kafka, cluster, {name: {}}, partitions=4)
    [difference] = await topics.check(kafka, cluster)
    assert (difference.setting, difference.fatal) == ("partitions", True)
    assert f"{name}: 4" in difference.found


async def test_a_topic_that_was_made_anew_has_another_id(kafka: Bus, kafka_broker: KafkaBroker) -> None:
    """A checkpoint's input position is one of a topic, not of a name."""
    from aiokafka.admin import AIOKafkaAdminClient

    name = KafkaBroker.new_cluster()
    await kafka.create_topics([TopicSpec(name, 1, {})])
    first = (await kafka.topic(name)).id
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_broker.bootstrap)
    await admin.start()
    await admin.delete_topics([name])
    with anyio.fail_after(60):
        while name in await admin.list_topics():
            pass  # the controller has deleted it, and the broker has not yet heard of it
    await admin.close()
    await kafka.create_topics([TopicSpec(name, 1, {})])
    assert (await kafka.topic(name)).id != first


async def test_the_topics_that_an_old_fleet_lacks_are_made_that_of_managers_with_as_many_partitions(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    of = topics.required(cluster)
    await kafka.create_topics([TopicSpec(name, 3, {s.name: s.value for s in of[name]}) for name in of])
    missing = await topics.check(kafka, cluster)
    optional = [managers_topic(cluster), control_topic(cluster)]
    assert [(item.topic, item.found, item.fatal) for item in missing] == [(name, "missing", False) for name in optional]
    assert {item.remedy for item in missing} == {"outfitter topics create"}
    count = await topics.partition_count(kafka, cluster)
    assert await topics.create(kafka, cluster, partitions=count or 0) == optional
    assert await topics.check(kafka, cluster) == []
    assert [(await kafka.topic(name)).partitions for name in optional] == [3, 1]


async def test_bad_values_of_the_topic_of_managers_keep_no_manager_from_starting(
    kafka: Bus, kafka_broker: KafkaBroker
) -> None:
    cluster = KafkaBroker.new_cluster()
    name = managers_topic(cluster)
    bad = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        "segment.ms": "604800000",
        "segment.bytes": "1073741824",
        "min.cleanable.dirty.ratio": "0.5",
        "max.message.bytes": "1048588",
        "compression.type": "zstd",
        "unclean.leader.election.enable": "true",
        "min.insync.replicas": "3",
    }
    await kafka.create_topics([TopicSpec(name, 2, bad)])
    await topics.create(kafka, cluster, partitions=3)
    found = await topics.check(kafka, cluster)
    assert {d.setting: d.found for d in found} == bad | {"partitions": "2"}
    assert not any(d.fatal for d in found)
    remedy = next(d.remedy for d in found if d.setting == "partitions")
    assert remedy.startswith(f"kafka-topics --bootstrap-server {kafka_broker.bootstrap} --alter --topic {name} ")


async def test_bad_values_of_the_topic_of_orders_keep_no_manager_from_starting(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    bad = {
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        "max.message.bytes": "1048588",
        "compression.type": "zstd",
        "unclean.leader.election.enable": "true",
        "min.insync.replicas": "3",
    }
    await kafka.create_topics([TopicSpec(control_topic(cluster), 3, bad)])
    await topics.create(kafka, cluster, partitions=3)
    found = await topics.check(kafka, cluster)
    assert {d.setting: d.found for d in found} == bad | {"partitions": "3"}
    assert not any(d.fatal for d in found)
