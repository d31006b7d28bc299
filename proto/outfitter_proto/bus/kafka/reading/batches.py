"""Record batches as they lie in a fetch answer: which to skip, and what the others hold. Pure, and bounded in memory.

What a batch header tells is read here; records are decoded by aiokafka's C code. Formats: Kafka's protocol guide,
"Record Batch"; the handling of aborted transactions: KIP-98.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiokafka import errors as kafka_errors
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c

from outfitter_proto.bus.kafka.reading import codecs
from outfitter_proto.bus.port import Message

MAX_RECORDS = 20_000
"""In one batch: empty records pack so well that a few kilobytes could hold half a million, each a dead letter."""

FEW_RECORDS = 1000
"""So many may be in any batch of workers' messages; more only where each takes a byte of the packed batch. 1,000
heartbeats of one worker, which nobody can tell apart, take 1,580 bytes with zstd."""

# base offset, length, leader epoch, magic: of every format
_START = struct.Struct(">qiib")
# attributes, last offset delta, first and last timestamp, producer: of format 2
_HEADER = struct.Struct(">hiqqq")
_COUNT = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12
_CRC_AT = 17
_ATTRIBUTES = struct.Struct(">h")
_ATTRIBUTES_AT = 21
_COUNT_AT, _RECORDS_START = 57, 61
_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20
_SHORTEST_OLD = 14
"""What `length` counts at least in the formats before 2: checksum, magic, attributes, and two lengths of nothing."""
_OLD_HEADER = (0, 0, -1, -1, -1)
_LAST_OFFSET = 2**63 - 1


class CorruptBatchError(Exception):
    """The bytes differ from what was written: fetch them again."""


class UnreadableBatchError(Exception):
    """Whole, but nothing we take: an unknown format or codec, or larger than we unpack."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"the record batch at offset {offset} {why}")


class Batch(NamedTuple):
    """A record batch that is not decoded yet. `next` is the offset after it, holes included."""

    data: bytes
    base: int
    next: int
    attributes: int
    producer: int
    last_timestamp_ms: int
    modern: bool

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)


def split(data: bytes) -> Iterator[Batch]:
    """The whole batches in `data`. A fetch answer may end in the middle of one.

    Each begins where the one before it ended or later, ends after it began, and has room for its own header: the
    checksum covers neither a batch's length nor its offset, and aiokafka's C code believes both.

    Raises:
        CorruptBatchError: the next batch is not so.
    """
    position = 0
    least = 0
    while position + _START.size <= len(data):
        base, length, _, magic = _START.unpack_from(data, position)
        modern = magic == 2
        if length < (_RECORDS_START - _LENGTH_END if modern else _SHORTEST_OLD):
            raise CorruptBatchError(f"the record batch at offset {base} says that it has {length} bytes: too few")
        end = position + _LENGTH_END + length
        if end > len(data):
            return
        attributes, last_delta, _, last_timestamp, producer = (
            _HEADER.unpack_from(data, position + _ATTRIBUTES_AT) if modern else _OLD_HEADER
        )
        following = base + last_delta + 1
        if not least <= base < following <= _LAST_OFFSET:
            raise CorruptBatchError(
                f"a record batch says that it has the offsets {base} to {following - 1}, and comes after {least - 1}"
            )
        yield Batch(data[position:end], base, following, attributes, producer, last_timestamp, modern)
        position, least = end, following


def committed(batches: Iterator[Batch], aborted: Sequence[tuple[int, int]]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether its records may be seen: not those of control batches and aborted transactions.

    `aborted` holds (producer, first offset) as the broker sent them. A control batch ends its producer's transaction
    whether or not its record is still there: the log cleaner keeps emptied ones (KAFKA-7467).
    """
    coming = sorted(aborted, key=lambda entry: entry[1])
    index = 0
    dropped: set[int] = set()
    for batch in batches:
        while index < len(coming) and coming[index][1] < batch.next:
            dropped.add(coming[index][0])
            index += 1
        if batch.is_control:
            dropped.discard(batch.producer)
            yield batch, False
        else:
            yield batch, not (batch.is_transactional and batch.producer in dropped)


def everything(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Each batch, and whether it holds records of ours at all: control batches do not."""
    return ((batch, not batch.is_control) for batch in batches)


def messages(batch: Batch, topic: str, partition: int) -> list[Message]:
    """The records of a batch, in order.

    Raises:
        CorruptBatchError: the checksum does not match.
        UnreadableBatchError: it is nothing that we take.
    """
    if not batch.modern:
        raise UnreadableBatchError(batch.base, "is not of format 2, which Kafka has written since 0.11")
    if not DefaultRecordBatch(batch.data).validate_crc():
        raise CorruptBatchError(f"the record batch at offset {batch.base} of {topic}/{partition} has a wrong checksum")
    (count,) = _COUNT.unpack_from(batch.data, _COUNT_AT)
    most = _most_records(batch)
    if count > most:
        raise UnreadableBatchError(batch.base, f"holds {count} records; at most {most} are read from one of its size")
    records = DefaultRecordBatch(_unpacked(batch))
    try:
        found = [
            Message(topic, partition, record.offset, record.key, record.value, record.timestamp) for record in records
        ]
    except (kafka_errors.KafkaError, ValueError, OSError, EOFError, OverflowError, MemoryError) as error:
        # Lengths of 2**62 and more make the last two: aiokafka asks for that much before it looks whether it is there.
        raise UnreadableBatchError(batch.base, f"cannot be decoded: {error or type(error).__name__}") from error
    if not _in_order([message.offset for message in found], batch):
        raise UnreadableBatchError(batch.base, "numbers its records otherwise than its header says")
    return found


def raw_message(batch: Batch, topic: str, partition: int, error: UnreadableBatchError) -> Message:
    """An unreadable batch as one message without a key, so that it can be reported like any other bad message."""
    value = batch.data[_RECORDS_START:]
    return Message(topic, partition, batch.next - 1, None, value, batch.last_timestamp_ms, str(error), batch.base)


def _in_order(offsets: list[int], batch: Batch) -> bool:
    """Whether they ascend within the batch. Brokers do not look: a record that says that it is a million further on
    would have its reader leave out all in between."""
    if not offsets:
        return True
    return batch.base <= offsets[0] and offsets[-1] < batch.next and all(map(operator.lt, offsets, offsets[1:]))


def gzipped(batch: bytes | bytearray, level: int = codecs.FAST) -> bytearray:
    """A record batch that was finished unpacked, with its records packed."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, _ATTRIBUTES_AT)
    packed = bytearray(batch[:_RECORDS_START])
    packed += codecs.gzip(memoryview(batch)[_RECORDS_START:], level)
    struct.pack_into(">i", packed, _LENGTH_AT, len(packed) - _LENGTH_END)
    _ATTRIBUTES.pack_into(packed, _ATTRIBUTES_AT, attributes | codecs.GZIP)
    struct.pack_into(">I", packed, _CRC_AT, calc_crc32c(bytes(packed[_ATTRIBUTES_AT:])))
    return packed


def _most_records(batch: Batch) -> int:
    """Who writes in transactions has a right to a transactional id, which no worker has: managers' batches pack better
    than any worker's needs to."""
    if batch.is_transactional:
        return MAX_RECORDS
    return min(MAX_RECORDS, max(FEW_RECORDS, len(batch.data) - _RECORDS_START))


def _most_bytes(batch: Batch) -> int:
    if batch.is_transactional:
        return codecs.MAX_UNPACKED
    return min(codecs.MAX_UNPACKED, codecs.MOST_TIMES * (len(batch.data) - _RECORDS_START))


def _unpacked(batch: Batch) -> bytes:
    """The batch as it would be without compression; its checksum is void then."""
    codec = batch.attributes & _CODEC
    if codec == codecs.NONE:
        return batch.data
    try:
        records = codecs.unpack(codec, batch.data[_RECORDS_START:], _most_bytes(batch))
    except codecs.UnpackingError as error:
        raise UnreadableBatchError(batch.base, str(error)) from error
    head = bytearray(batch.data[:_RECORDS_START])
    struct.pack_into(">i", head, _LENGTH_AT, _RECORDS_START - _LENGTH_END + len(records))
    struct.pack_into(">h", head, _ATTRIBUTES_AT, batch.attributes & ~_CODEC)
    return bytes(head) + records
