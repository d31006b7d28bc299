"""Jepsen's case: a request to commit that arrives late ends the producer's next transaction, whatever that is about.

Kafka tells a producer's requests apart by its epoch alone (KIP-890 mends it for clients of a later protocol than
aiokafka's): shown here to break a producer that is kept, and not a writer of ours, which is replaced.
"""

from __future__ import annotations

import struct

import anyio
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from chaos.harm import Harmed
from outfitter_proto.bus import Bus, Entry, TopicSpec, connect
from outfitter_proto.bus.kafka.writing.producer import TransactionalProducer
from support.bus.committed import committed
from support.kafka.broker import KafkaBroker
from support.kafka.proxy import END_TXN, Fault, Harm

pytestmark = pytest.mark.kafka

INVALID_PRODUCER_EPOCH = 47


async def values(bus: Bus, topic: str) -> list[bytes | None]:
    """What a committed reader sees by now."""
    return [message.value for message in await committed(bus, topic)]


def error_of(fault: Fault) -> int:
    """What the broker answered to the late request: length, correlation id, throttle time, error code."""
    [answer] = fault.answers
    return int(struct.unpack_from(">iiih", answer)[3])


async def delivered(harmed: Harmed, fault: Fault) -> None:
    harmed.proxy.release(fault)
    assert await anyio.to_thread.run_sync(fault.delivered.wait, 20.0)


async def test_a_late_commit_makes_visible_what_a_kept_producer_has_aborted(harmed: Harmed) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(f"kafka://{harmed.broker.direct}") as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        producer = AIOKafkaProducer(
            bootstrap_servers=harmed.broker.bootstrap, client_id=topic, transactional_id=topic, request_timeout_ms=3000
        )
        await producer.start()
        try:
            late = harmed.proxy.harm(END_TXN, Harm.LATE_REQUEST, client=topic, hold=True)
            async with producer.transaction():  # which asks again by itself, and succeeds
                await producer.send_and_wait(topic, b"first", partition=0)
            await producer.begin_transaction()
            await producer.send_and_wait(topic, b"never", partition=0)
            await delivered(harmed, late)
            assert error_of(late) == 0
            with pytest.raises(KafkaError):  # there is no transaction any more that could be aborted
                await producer.abort_transaction()
        finally:
            await producer.stop()
        assert await values(bus, topic) == [b"first", b"never"]


async def test_a_late_commit_changes_nothing_for_a_writer_that_is_replaced_when_it_says_so(harmed: Harmed) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(harmed.broker.url) as bus, connect(f"kafka://{harmed.broker.direct}") as beside:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        late = harmed.proxy.harm(END_TXN, Harm.LATE_REQUEST, client=topic, hold=True)
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"first")])])
            assert writer.must_reopen
        async with await bus.open_writer(topic, 0) as writer:
            producer: TransactionalProducer = writer._producer  # type: ignore[attr-defined]
            await producer.begin_transaction()
            [batch] = producer.pack([Entry(b"k", b"never")])
            await (await producer.send_batch(batch, topic, partition=0))
            await delivered(harmed, late)  # in the middle of this transaction, which is then given up
        assert error_of(late) == INVALID_PRODUCER_EPOCH
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"last")])])
        assert await values(beside, topic) == [b"first", b"last"]
