"""Jepsen's case: a request to commit that arrives late ends the producer's next transaction, whatever that is about.

In version 1 of transactions, Kafka tells a producer's requests apart by the epoch with which it took its id: shown here
to break a producer that is kept, aiokafka's. A writer of ours is replaced then. In version 2 (KIP-890) each transaction
has an epoch of its own, so ours goes on.
"""

from __future__ import annotations

import struct

import anyio
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from chaos.harm import Harmed
from outfitter_proto.bus import Bus, Entry, TopicSpec, connect
from support.bus.committed import committed
from support.kafka.broker import KafkaBroker
from support.kafka.proxy import END_TXN, Fault, Harm
from support.kafka.transactions import held_by, leave_open

pytestmark = pytest.mark.kafka

INVALID_PRODUCER_EPOCH, PRODUCER_FENCED = 47, 90


async def values(bus: Bus, topic: str) -> list[bytes | None]:
    """What a committed reader sees by now."""
    return [message.value for message in await committed(bus, topic)]


def error_of(fault: Fault) -> int:
    """What the broker answered to the late request: length, correlation id, (tags,) throttle time, error code."""
    [answer] = fault.answers
    return int(struct.unpack_from(">iixih" if fault.version == 5 else ">iiih", answer)[3])


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


async def test_a_late_commit_changes_nothing_for_a_writer_that_goes_on_as_it_says(harmed: Harmed) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(harmed.broker.url) as bus, connect(f"kafka://{harmed.broker.direct}") as beside:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        late = harmed.proxy.harm(END_TXN, Harm.LATE_REQUEST, client=topic, hold=True)
        writer = await bus.open_writer(topic, 0)
        await writer.commit([(topic, [Entry(b"k", b"first")])])
        is_version_1 = held_by(writer).version == 1
        assert writer.must_reopen is is_version_1
        if is_version_1:
            await writer.aclose()
            writer = await bus.open_writer(topic, 0)
        await leave_open(writer, topic, value=b"never")
        await delivered(harmed, late)  # in the middle of this transaction, which is then given up
        await writer.aclose()
        assert error_of(late) == (INVALID_PRODUCER_EPOCH if is_version_1 else PRODUCER_FENCED)
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"last")])])
        assert await values(beside, topic) == [b"first", b"last"]
