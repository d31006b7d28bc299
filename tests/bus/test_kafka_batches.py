"""Record batches as they lie in a fetch answer: what is skipped, decoded, and refused."""

from __future__ import annotations

import gzip
import struct

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from outfitter_proto.bus.kafka import batches

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


def test_gzip_is_read() -> None:
    [batch] = batches.split(batch_of(b"x" * 1000, b"y", codec=1))
    assert [m.value for m in batches.messages(batch, "t", 0)] == [b"x" * 1000, b"y"]


def test_a_wrong_checksum_is_corruption_and_not_a_bad_message() -> None:
    data = bytearray(batch_of(b"value"))
    data[-3] ^= 1
    [batch] = batches.split(bytes(data))
    with pytest.raises(batches.CorruptBatchError, match="checksum"):
        batches.messages(batch, "t", 0)


@pytest.mark.parametrize(("codec", "name"), [(2, "snappy"), (3, "lz4"), (4, "zstd")])
def test_other_codecs_are_refused_by_name_whether_or_not_a_library_for_them_is_there(codec: int, name: str) -> None:
    batch = next(batches.split(batch_of(b"x")))._replace(attributes=codec)
    with pytest.raises(batches.UnreadableBatchError, match=name):
        batches.messages(batch, "t", 0)


def test_a_batch_that_unpacks_to_more_than_the_limit_is_refused_without_unpacking_it() -> None:
    bomb = gzip.compress(bytes(batches.MAX_DECOMPRESSED + 1))
    head = with_attributes(batch_of(b"x"), 1)[:61]
    batch = batches.Batch(head + bomb, 0, 1, 1, 7, 0, True)
    with pytest.raises(batches.UnreadableBatchError, match="more than"):
        batches._check_unpacks(batch)
    batches._check_unpacks(batch._replace(data=head + gzip.compress(bytes(batches.MAX_DECOMPRESSED - 1))))


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
