"""Requests to write, put together by ourselves: the bytes are aiokafka's."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import EndTxnRequest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_proto.bus.kafka.connecting.protocol import pieces
from outfitter_proto.bus.kafka.writing.producer import TransactionalProducer
from support.kafka.broker import KafkaBroker

RECORDS = st.binary(max_size=40) | st.binary(max_size=40).map(bytearray) | st.none()
TOPICS = st.lists(
    st.tuples(st.text(max_size=5), st.lists(st.tuples(st.integers(0, 9), RECORDS), max_size=3)), max_size=3
)


def request(topics: list[tuple[str, list[tuple[int, bytes]]]], identity: str | None) -> ProduceRequest:
    acks = -1 if identity is not None else 1
    return ProduceRequest(required_acks=acks, timeout=1000, topics=topics, transactional_id=identity)


@given(topics=TOPICS, identity=st.none() | st.text(max_size=5), version=st.integers(3, 7))
def test_records_are_written_as_aiokafka_writes_them(
    topics: list[tuple[str, list[tuple[int, bytes]]]], identity: str | None, version: int
) -> None:
    plain = request(topics, identity).prepare({ProduceRequest.API_KEY: (version, version)})
    assert b"".join(pieces(plain)) == plain.encode()


def test_records_are_not_copied() -> None:
    records = bytearray(b"records")
    prepared = request([("t", [(0, records)])], None).prepare({ProduceRequest.API_KEY: (3, 7)})
    assert any(piece is records for piece in pieces(prepared))


@pytest.mark.parametrize("kind", ["produce", "end the transaction"])
async def test_a_write_to_a_connection_that_is_lost_can_be_tried_again(kafka_broker: KafkaBroker, kind: str) -> None:
    """Until aiokafka hears of the loss a transport may take whatever it gets, or fail in its own way."""
    connector = Connector(login_of(kafka_broker.url))
    [node] = connector.login.nodes
    connection = await connector.connect(node, timeout=3)
    connection._writer.transport.abort()
    written = request([("t", [(0, b"x")])], None) if kind == "produce" else EndTxnRequest("w", 1, 0, True)
    with pytest.raises(KafkaConnectionError) as raised:
        connection.send(written)
    assert raised.value.retriable
    assert connection.idle
    assert not connection.connected()


async def test_connections_that_do_not_close_in_time_cancel_nobody(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka awaits the same futures at each attempt, and the end of the first attempt's time cancels them."""
    producer = TransactionalProducer(
        Connector(login_of(kafka_broker.url)), kafka_broker.new_cluster(), last=None, request_timeout=3,
        transaction_timeout=10,
    )  # fmt: skip
    await producer.start()
    close, closed = producer.client.close, asyncio.get_running_loop().create_future()

    async def hang() -> None:
        await closed

    monkeypatch.setattr(producer.client, "close", hang)
    await producer.dispose(1.0)
    assert closed.cancelled()
    await close()
