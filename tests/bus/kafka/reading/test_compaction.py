"""A compacted topic on which the log cleaner left an emptied control batch: aiokafka's consumer dies there.

A producer's transaction times out and the producer never comes back; the cleaner removes the abort marker's record
and keeps its batch, as the producer's last sign of life. With these settings that takes some twenty seconds, with
Kafka's defaults a day.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.bus.kafka import bear_emptied_control_batches
from support.bus.committed import committed
from support.kafka.broker import KafkaBroker

pytestmark = pytest.mark.kafka

AGED_WITHIN = 100.0
QUICK_CLEANING = {
    "cleanup.policy": "compact",
    "segment.ms": "1000",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "100",
    "max.compaction.lag.ms": "1000",
}


async def test_a_restore_and_a_repaired_consumer_read_past_an_emptied_control_batch_where_a_plain_one_dies(
    kafka_broker: KafkaBroker,
) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, QUICK_CLEANING)])
        await leave_a_transaction_open(kafka_broker, topic)
        async with await bus.open_writer(f"{topic}-writer", 0) as writer:
            with anyio.fail_after(AGED_WITHIN):
                for number in range(1_000_000):
                    await writer.commit([(topic, [Entry(b"key", b"%d" % number)])])
                    if await plain_consumer_dies(kafka_broker, topic):
                        break
                    await anyio.sleep(1)
            await writer.commit([(topic, [Entry(b"last", b"1")])])
        end = await bus.stable_end(topic, 0)
        found = {message.key: message.value for message in await committed(bus, topic)}
        assert found == {b"key": b"%d" % number, b"last": b"1"}

        assert await plain_consumer_dies(kafka_broker, topic)  # it is still there
        async with reading(kafka_broker, topic) as consumer:
            bear_emptied_control_batches(consumer)
            bear_emptied_control_batches(consumer)
            seen: dict[bytes, bytes] = {}
            while await consumer.position(TopicPartition(topic, 0)) < end:
                for records in (await consumer.getmany(timeout_ms=100)).values():
                    seen |= {record.key: record.value for record in records}
            assert seen == found


async def test_the_repair_refuses_a_consumer_that_was_not_started() -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1")
    with pytest.raises(RuntimeError, match="start the consumer"):
        bear_emptied_control_batches(consumer)
    await consumer.stop()


async def leave_a_transaction_open(broker: KafkaBroker, topic: str) -> None:
    """Begin a transaction that will time out, and vanish."""
    producer = AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap, transactional_id=f"{topic}-lost", transaction_timeout_ms=2000
    )
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"never", key=b"lost", partition=0)
    await producer.stop()  # which does not abort


async def plain_consumer_dies(broker: KafkaBroker, topic: str) -> bool:
    async with reading(broker, topic) as consumer:
        end = (await consumer.end_offsets([TopicPartition(topic, 0)]))[TopicPartition(topic, 0)]
        try:
            while await consumer.position(TopicPartition(topic, 0)) < end:
                await consumer.getmany(timeout_ms=100)
        except KafkaError as error:
            assert "Control batch did not contain any records" in str(error)  # noqa: PT017
            return True
    return False


@asynccontextmanager
async def reading(broker: KafkaBroker, topic: str) -> AsyncIterator[Any]:
    """A plain aiokafka consumer at the beginning of the topic."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=broker.bootstrap,
        isolation_level="read_committed",
        enable_auto_commit=False,
        auto_offset_reset="none",
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), 0)
        yield consumer
    finally:
        await asyncio.sleep(0)  # stop() right after start() raises CancelledError
        await consumer.stop()
