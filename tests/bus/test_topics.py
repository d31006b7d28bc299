"""The four topics on a real broker: made as they must be, and every difference found."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outfitter_proto import topics
from outfitter_proto.bus import Bus, TopicSpec, connect
from outfitter_proto.names import topics as topic_names
from support.broker import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
async def kafka(kafka_broker: KafkaBroker) -> AsyncIterator[Bus]:
    async with connect(kafka_broker.url) as bus:
        yield bus


async def made_differently(bus: Bus, cluster: str, topic: str, partitions: int = 3, **changes: str) -> None:
    """Make all topics as they must be, but `topic` with other settings (`_` for `.`) or another partition count."""
    config = {s.name: s.value for s in topics.wanted(cluster)[topic]}
    config |= {name.replace("_", "."): value for name, value in changes.items()}
    await bus.create_topics([TopicSpec(topic, partitions, config)])
    await topics.create(bus, cluster, partitions=3)


async def test_topics_are_made_once_and_pass_the_check(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    names = list(topic_names(cluster))
    assert await topics.create(kafka, cluster, partitions=3) == names
    assert await topics.create(kafka, cluster, partitions=5) == []
    assert await topics.check(kafka, cluster) == []
    described = [await kafka.topic(name) for name in names]
    assert [info.partitions for info in described] == [3] * 4
    assert [info.replication for info in described] == [1] * 4
    assert len({info.id for info in described}) == 4


async def test_missing_topics_are_fatal_and_come_with_the_remedy(kafka: Bus) -> None:
    found = await topics.check(kafka, KafkaBroker.new_cluster())
    assert [(d.found, d.fatal) for d in found] == [("missing", True)] * 4
    assert all("outfitter topics create" in d.why for d in found)


async def test_a_setting_that_differs_is_found_with_both_values_and_the_reason(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    name = topic_names(cluster).registrations
    await made_differently(kafka, cluster, name, retention_ms="60000", message_timestamp_type="CreateTime")
    found = await topics.check(kafka, cluster)
    assert {(d.topic, d.setting, d.found, d.wanted, d.fatal) for d in found} == {
        (name, "retention.ms", "60000", str(7 * topics.DAY_MS), False),
        (name, "message.timestamp.type", "CreateTime", "LogAppendTime", False),
    }
    assert all(d.why for d in found)


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
async def test_a_ledger_that_evaporates_is_fatal(kafka: Bus, policy: str) -> None:
    cluster = KafkaBroker.new_cluster()
    await made_differently(kafka, cluster, topic_names(cluster).allocations, cleanup_policy=policy)
    [difference] = await topics.check(kafka, cluster)
    assert (difference.setting, difference.found, difference.fatal) == ("cleanup.policy", policy, True)


async def test_compacted_registrations_are_fatal(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    await made_differently(kafka, cluster, topic_names(cluster).registrations, cleanup_policy="compact")
    [difference] = await topics.check(kafka, cluster)
    assert difference.fatal


async def test_unequal_partition_counts_are_fatal_and_each_count_is_shown(kafka: Bus) -> None:
    cluster = KafkaBroker.new_cluster()
    name = topic_names(cluster).history
    await made_differently(kafka, cluster, name, partitions=4)
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
    await admin.close()
    await kafka.create_topics([TopicSpec(name, 1, {})])
    assert (await kafka.topic(name)).id != first
