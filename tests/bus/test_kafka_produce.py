"""Requests to write, encoded by ourselves: the bytes are aiokafka's."""

from __future__ import annotations

import gc
import weakref

from aiokafka.protocol.produce import ProduceRequest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_proto.bus.kafka.protocol import LargeRequest

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
    versions = {ProduceRequest.API_KEY: (version, version)}
    plain = request(topics, identity).prepare(versions)
    ours = LargeRequest(request(topics, identity)).prepare(versions)
    assert ours.encode() == plain.encode()
    assert (ours.API_VERSION, ours.RESPONSE_TYPE) == (plain.API_VERSION, plain.RESPONSE_TYPE)


def test_what_was_written_is_free_without_the_collector() -> None:
    """A commit's megabytes would pile up until it runs."""
    prepared = LargeRequest(request([("t", [(0, b"x")])], None)).prepare({ProduceRequest.API_KEY: (3, 7)})
    prepared.encode()
    left = weakref.ref(prepared)
    gc.disable()
    try:
        del prepared
        assert left() is None
    finally:
        gc.enable()
