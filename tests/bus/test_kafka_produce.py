"""Requests to write, put together by ourselves: the bytes are aiokafka's."""

from __future__ import annotations

from aiokafka.protocol.produce import ProduceRequest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.bus.kafka.protocol import pieces

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
