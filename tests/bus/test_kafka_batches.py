"""Record batches as they lie in a fetch answer: what is skipped, decoded, and refused."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc

import cramjam
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.bus.kafka import batches, codecs

CONTROL = 0x20
TRANSACTIONAL = 0x10


def batch_of(
    *values: bytes | None, base: int = 0, producer: int = 7, codec: int = 0, transactional: bool = False
) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=int(transactional), producer_id=producer, producer_epoch=0,
        base_sequence=0, batch_size=2**30,
    )  # fmt: skip
    for number, value in enumerate(values):
        builder.append(number, 1_000 + number, b"k%d" % number, value, [])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, 0, base)  # the base offset is the broker's, outside the checksum
    return bytes(data)


def with_attributes(data: bytes, attributes: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(">h", changed, 21, attributes)
    return bytes(changed)


def visible(data: bytes, aborted: list[tuple[int, int]]) -> list[int]:
    return [batch.base for batch, seen in batches.committed(batches.split(data), aborted) if seen]


def test_a_batch_cut_off_at_the_end_is_left_for_the_next_fetch() -> None:
    whole, cut = batch_of(b"a", base=5), batch_of(b"b", base=6)
    for length in range(len(cut)):
        assert [batch.base for batch in batches.split(whole + cut[:length])] == [5]
    assert [batch.next for batch in batches.split(whole + cut)] == [6, 7]


def test_records_keep_their_offsets_keys_values_and_times() -> None:
    [batch] = batches.split(batch_of(b"x", None, b"", base=40))
    found = batches.messages(batch, "t", 3)
    assert [(m.topic, m.partition, m.offset, m.key, m.value, m.timestamp_ms) for m in found] == [
        ("t", 3, 40, b"k0", b"x", 1000),
        ("t", 3, 41, b"k1", None, 1001),
        ("t", 3, 42, b"k2", b"", 1002),
    ]


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@given(values=st.lists(st.none() | st.binary(max_size=300), min_size=1, max_size=20), times=st.integers(1, 500))
@settings(deadline=None, max_examples=20)
def test_what_any_codec_packed_is_read_as_it_was(codec: int, values: list[bytes | None], times: int) -> None:
    written = [None if value is None else value * times for value in values]
    [batch] = batches.split(batch_of(*written, codec=codec))
    assert batch.attributes & 7 == codec
    assert [m.value for m in batches.messages(batch, "t", 0)] == written


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@given(data=st.binary(max_size=2000))
def test_what_no_codec_packed_is_an_unreadable_batch_and_nothing_worse(codec: int, data: bytes) -> None:
    for bytes_ in (data, b"\x82SNAPPY\x00" + data):
        with contextlib.suppress(codecs.UnpackingError):
            codecs.unpack(codec, bytes_)


def test_java_s_snappy_stream_is_read() -> None:
    blocks = [b"a" * 5000, b"", b"b"]
    packed = [bytes(cramjam.snappy.compress_raw(block)) for block in blocks]
    stream = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(p)) + p for p in packed)
    assert codecs.unpack(codecs.SNAPPY, stream) == b"".join(blocks)
    for cut in range(16, len(stream)):
        if cut not in (16, 20 + len(packed[0]), 24 + len(packed[0]) + len(packed[1])):
            with pytest.raises(codecs.UnpackingError, match="snappy"):
                codecs.unpack(codecs.SNAPPY, stream[:cut])


def test_a_wrong_checksum_is_corruption_and_not_a_bad_message() -> None:
    data = bytearray(batch_of(b"value"))
    data[-3] ^= 1
    [batch] = batches.split(bytes(data))
    with pytest.raises(batches.CorruptBatchError, match="checksum"):
        batches.messages(batch, "t", 0)


@pytest.mark.parametrize(("codec", "name"), [(2, "snappy"), (3, "lz4"), (4, "zstd")])
def test_without_a_library_for_it_a_codec_is_refused_by_name(
    codec: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [batch] = batches.split(batch_of(b"x", codec=codec))
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(batches.UnreadableBatchError, match=name):
        batches.messages(batch, "t", 0)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_that_unpacks_to_more_than_the_limit_is_refused_in_bounded_memory(codec: int) -> None:
    just = batches.messages(next(batches.split(batch_of(bytes(codecs.MAX_UNPACKED - 20), codec=codec))), "t", 0)
    assert len(just[0].value or b"") == codecs.MAX_UNPACKED - 20
    [bomb] = batches.split(batch_of(bytes(50_000_000), codec=codec))
    tracemalloc.start()
    try:
        with pytest.raises(batches.UnreadableBatchError, match="more than"):
            batches.messages(bomb, "t", 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * codecs.MAX_UNPACKED


def test_a_batch_of_more_records_than_anybody_sends_is_refused_whole() -> None:
    most = batch_of(*([b""] * batches.MAX_RECORDS), codec=4)
    assert len(batches.messages(next(batches.split(most)), "t", 0)) == batches.MAX_RECORDS
    more = batch_of(*([b""] * (batches.MAX_RECORDS + 1)), codec=4)
    with pytest.raises(batches.UnreadableBatchError, match="20001 records"):
        batches.messages(next(batches.split(more)), "t", 0)


def test_an_unreadable_batch_is_one_message_without_a_key_at_its_last_offset() -> None:
    [batch] = batches.split(batch_of(b"a", b"b", base=9))
    raw = batches.raw_message(batch, "t", 1)
    assert (raw.key, raw.offset, raw.partition) == (None, 10, 1)
    assert raw.value == batch.data[61:]


def test_records_of_an_aborted_transaction_are_skipped_until_its_marker() -> None:
    data = (
        batch_of(b"committed", base=0, producer=1, transactional=True)
        + with_attributes(batch_of(b"m", base=1, producer=1, transactional=True), TRANSACTIONAL | CONTROL)
        + batch_of(b"aborted", base=2, producer=1, transactional=True)
        + batch_of(b"other", base=3, producer=2, transactional=True)
        + batch_of(b"plain", base=4, producer=-1)
        + with_attributes(batch_of(b"m", base=5, producer=1, transactional=True), TRANSACTIONAL | CONTROL)
        + batch_of(b"later", base=6, producer=1, transactional=True)
    )
    assert visible(data, [(1, 2)]) == [0, 3, 4, 6]
    assert visible(data, []) == [0, 2, 3, 4, 6]


def test_an_emptied_control_batch_ends_its_producers_transaction_too() -> None:
    emptied = with_attributes(batch_of(b"m", base=1, producer=1, transactional=True), TRANSACTIONAL | CONTROL)[:61]
    emptied = emptied[:8] + struct.pack(">i", 61 - 12) + emptied[12:]
    data = (
        batch_of(b"aborted", base=0, producer=1, transactional=True)
        + emptied
        + batch_of(b"later", base=2, producer=1, transactional=True)
    )
    assert visible(data, [(1, 0)]) == [2]
