"""A batch that unpacks to more than is read, in a topic that only managers write. In history and dead letters it costs
itself alone. In the ledger it may hide what is lent: nobody reads past it, and each says where it is and what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from confluent_kafka import Producer

from outfitter_proto import topics
from outfitter_proto.bus import connect
from outfitter_proto.names import topics as names_of
from outfitter_service.api.follower import Follower
from support.kafka.broker import KafkaBroker
from support.managers.process import OUTFITTER, environment

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

WITHIN_S = 60.0
Say = Callable[..., tuple[int, str]]


@pytest.fixture
def cluster(kafka_broker: KafkaBroker) -> str:
    name = kafka_broker.new_cluster()

    async def make() -> None:
        async with connect(kafka_broker.url) as bus:
            await topics.create(bus, name, partitions=2)

    anyio.run(make)
    return name


@pytest.fixture
def say(kafka_broker: KafkaBroker, cluster: str, tmp_path: Path) -> Say:
    """Run a command: its exit code and its output."""
    (tmp_path / "outfitter.toml").write_text("external-resources = []\n")

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*OUTFITTER, *words],
            env=environment(
                OUTFITTER_BUS=kafka_broker.url, OUTFITTER_CLUSTER=cluster, OUTFITTER_HOST=f"t-{os.getpid()}"
            ),
            cwd=tmp_path, check=False, text=True, timeout=WITHIN_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def publish_bomb(broker: KafkaBroker, topic: str, partition: int, *, in_transaction: bool) -> None:
    """A few kilobytes, which are 40 MB of zeros."""
    options = {
        "bootstrap.servers": broker.bootstrap, "compression.type": "zstd", "message.max.bytes": 100_000_000,
    }  # fmt: skip
    if in_transaction:
        options["transactional.id"] = f"a-manager-of-another-host-{topic}"
    producer = Producer(options)
    if in_transaction:
        producer.init_transactions(30)
        producer.begin_transaction()
    producer.produce(topic, bytes(40_000_000), b"no/worker/run", partition=partition)
    assert producer.flush(30) == 0
    if in_transaction:
        producer.commit_transaction(30)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_history_and_dead_letters_are_read_past_it(
    kafka_broker: KafkaBroker, cluster: str, say: Say, in_transaction: bool
) -> None:
    of = names_of(cluster)
    for topic in (of.history, of.dead_letters):
        for partition in (0, 1):
            publish_bomb(kafka_broker, topic, partition, in_transaction=in_transaction)
    for command, topic in (("history", of.history), ("dead-letters", of.dead_letters)):
        code, text = say(command)
        assert code == 0, text
        for partition in (0, 1):
            assert f"passed over {topic}/{partition}: the record batch at offset 0 is no zstd, or unpacks to" in text
    code, text = say("status")
    assert code == 0, text
    assert "cannot tell" not in text

    async def follow() -> None:
        async with connect(kafka_broker.url) as bus:
            follower = Follower(bus, cluster)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follower.run)
                with anyio.fail_after(WITHIN_S):
                    while follower.fleet is None or follower.outage is not None:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    since = follower.as_of
                    while follower.as_of == since:  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                tasks.cancel_scope.cancel()

    anyio.run(follow)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_of_the_ledger_it_is_said_where_it_is_and_what_to_do(
    kafka_broker: KafkaBroker, cluster: str, say: Say, in_transaction: bool
) -> None:
    topic = names_of(cluster).allocations
    for partition in (0, 1):
        publish_bomb(kafka_broker, topic, partition, in_transaction=in_transaction)
    for words in (["status"], ["backup", "--out", "ledger.backup"], ["doctor", "--config", "outfitter.toml"]):
        code, text = say(*words)
        assert code != 0, (words, text)
        assert f"{topic}/" in text, (words, text)
        assert "the record batch at offset 0 is no zstd" in text, (words, text)
        assert "Restore a backup into new topics" in text, (words, text)
