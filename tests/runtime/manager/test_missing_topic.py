"""Somebody deletes one of the four topics of a served cluster: the manager names it, and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from outfitter_proto.names import topics
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, serving_on

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180), pytest.mark.slow]


@pytest.fixture
def two_gpus(tmp_path: Path, kafka_broker: KafkaBroker) -> Iterator[Manager]:
    cluster = KafkaBroker.new_cluster()
    with serving_on(kafka_broker, tmp_path / "manager", gpus=2, partitions=1, cluster=cluster) as manager:
        yield manager


def register(manager: Manager, worker: str, *arguments: str) -> None:
    done = manager.outfitter("register", "--worker", worker, "--resource", "gpu=1", "--lease", "none", *arguments)
    assert done.returncode == 0, done.stderr


def delete(broker: KafkaBroker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.delete_topics([topic])[topic].result(15)


def publish(broker: KafkaBroker, manager: Manager, value: bytes) -> None:
    """What is no registration, and becomes a dead letter."""
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topics(manager.cluster).registrations, value, manager.host.encode())
    producer.flush(15)


@pytest.mark.parametrize("which", ["dead_letters", "history"])
def test_a_manager_names_the_topic_that_is_gone_and_continues_once_it_is_made_again(
    two_gpus: Manager, kafka_broker: KafkaBroker, which: str
) -> None:
    register(two_gpus, "a")
    gone = getattr(topics(two_gpus.cluster), which)
    delete(kafka_broker, gone)
    publish(kafka_broker, two_gpus, b"no registration")
    sentence = f"there is no topic '{gone}'; make it with `outfitter topics create`"
    two_gpus.wait_for(lambda: sentence in two_gpus.readiness(), timeout=60)
    two_gpus.wait_for(lambda: sentence in two_gpus.log.read_text())  # a moment after readiness
    said = two_gpus.log.read_text()
    assert said.count(sentence) <= said.count("the bus works again") + 1  # a commit without dead letter works meanwhile
    created = two_gpus.outfitter("topics", "create", "--partitions", "1", "--replication", "1")
    assert created.stdout.split() == [gone]
    two_gpus.wait_for(lambda: two_gpus.readiness() == "ok\n", timeout=60)
    two_gpus.wait_for(lambda: two_gpus.host in two_gpus.outfitter("dead-letters").stdout)
    register(two_gpus, "b")
    two_gpus.wait_for_state("b", "allocated")


def test_devices_are_granted_without_the_topic_of_dead_letters_until_one_is_due(
    two_gpus: Manager, kafka_broker: KafkaBroker
) -> None:
    """A dead letter is an answer, and is written with the others or not at all."""
    delete(kafka_broker, topics(two_gpus.cluster).dead_letters)
    publish(kafka_broker, two_gpus, VALID % two_gpus.host.encode())
    two_gpus.wait_for_state("b", "allocated")
    assert two_gpus.readiness() == "ok\n"


VALID = b'{"type":"register","host":"%s","worker":"b","incarnation":"1","resources":{"gpu":{"amount":1}},"lease_s":600}'
