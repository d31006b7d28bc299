"""Requests to write, put together by ourselves: the bytes are aiokafka's."""

from __future__ import annotations

import pytest
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import EndTxnRequest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.bus.kafka.connecting.connection import Connector
from outfitter_proto.bus.kafka.connecting.login import login_of
from outfitter_proto.bus.kafka.connecting.protocol import EpochEndTxnRequest, JoiningProduceRequest, pieces
from support.kafka.broker import KafkaBroker

RECORDS = st.binary(max_size=40) | st.binary(max_size=40).map(bytearray) | st.none()
RECORD = bytearray(b"records")
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


@given(topics=st.lists(st.tuples(st.text(max_size=5), st.integers(0, 9), st.binary(max_size=300)), max_size=3))
def test_records_of_a_transaction_of_version_2_are_written_as_their_schema_says(
    topics: list[tuple[str, int, bytes]],
) -> None:
    flexible = JoiningProduceRequest("w", 1000, topics).prepare({JoiningProduceRequest.API_KEY: (3, 13)})
    assert flexible.API_VERSION == 12
    assert b"".join(pieces(flexible)) == flexible.encode()


@pytest.mark.parametrize(
    "asked", [request([("t", [(0, RECORD)])], None), JoiningProduceRequest("w", 1000, [("t", 0, RECORD)])]
)
def test_records_are_not_copied(asked: ProduceRequest | JoiningProduceRequest) -> None:
    prepared = asked.prepare({ProduceRequest.API_KEY: (3, 12)})
    assert any(piece is RECORD for piece in pieces(prepared))


@pytest.mark.parametrize("kind", ["produce", "end the transaction", "end one of version 2"])
async def test_a_write_to_a_connection_that_is_lost_can_be_tried_again(kafka_broker: KafkaBroker, kind: str) -> None:
    """Until aiokafka hears of the loss a transport may take whatever it gets, or fail in its own way."""
    connector = Connector(login_of(kafka_broker.url))
    [node] = connector.login.nodes
    connection = await connector.connect(node, timeout=3)
    connection._writer.transport.abort()
    written = {
        "produce": request([("t", [(0, b"x")])], None),
        "end the transaction": EndTxnRequest("w", 1, 0, True),
        "end one of version 2": EpochEndTxnRequest("w", 1, 0, True),
    }[kind]
    with pytest.raises(KafkaConnectionError) as raised:
        connection.send(written)
    assert raised.value.retriable
    assert connection.idle
    assert not connection.connected()
