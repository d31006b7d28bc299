"""Record batches as they lie in a fetch answer: which to skip, and what the others hold. Pure, and bounded in memory.

What a batch header tells is read here; records are decoded by aiokafka's C code. Formats: Kafka's protocol guide,
"Record Batch"; the handling of aborted transactions: KIP-98.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiokafka import errors as kafka_errors
from aiokafka.record.default_records import DefaultRecordBatch

from outfitter_proto.bus.kafka import codecs
from outfitter_proto.bus.port import Message

MAX_RECORDS = 20_000
"""In one batch: empty records pack so well that a few kilobytes could hold half a million, each a dead letter."""

# base offset, length, leader epoch, magic, crc, attributes, last offset delta, first and last timestamp, producer
_HEADER = struct.Struct(">qiibIhiqqq")
_COUNT = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12
_ATTRIBUTES_AT = 21
_COUNT_AT, _RECORDS_START = 57, 61
_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20


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
    """The whole batches in `data`. A fetch answer may end in the middle of one."""
    position = 0
    while position + _RECORDS_START <= len(data):
        base, length, _, magic, _, attributes, last_delta, _, last_timestamp, producer = _HEADER.unpack_from(
            data, position
        )
        end = position + _LENGTH_END + length
        if end > len(data):
            return
        modern = magic == 2
        following = base + last_delta + 1 if modern else base + 1
        yield Batch(data[position:end], base, following, attributes if modern else 0, producer, last_timestamp, modern)
        position = end


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
        raise UnreadableBatchError(batch.base, "is of a format from before Kafka 0.11")
    if not DefaultRecordBatch(batch.data).validate_crc():
        raise CorruptBatchError(f"the record batch at offset {batch.base} of {topic}/{partition} has a wrong checksum")
    (count,) = _COUNT.unpack_from(batch.data, _COUNT_AT)
    if count > MAX_RECORDS:
        raise UnreadableBatchError(batch.base, f"holds {count} records; at most {MAX_RECORDS} are read")
    records = DefaultRecordBatch(_unpacked(batch))
    try:
        return [
            Message(topic, partition, record.offset, record.key, record.value, record.timestamp) for record in records
        ]
    except (kafka_errors.KafkaError, ValueError, OSError, EOFError) as error:
        raise UnreadableBatchError(batch.base, f"cannot be decoded: {error}") from error


def raw_message(batch: Batch, topic: str, partition: int) -> Message:
    """An unreadable batch as one message without a key, so that it can be reported like any other bad message."""
    return Message(topic, partition, batch.next - 1, None, batch.data[_RECORDS_START:], batch.last_timestamp_ms)


def _unpacked(batch: Batch) -> bytes:
    """The batch as it would be without compression; its checksum is void then."""
    codec = batch.attributes & _CODEC
    if codec == codecs.NONE:
        return batch.data
    try:
        records = codecs.unpack(codec, batch.data[_RECORDS_START:])
    except codecs.UnpackingError as error:
        raise UnreadableBatchError(batch.base, str(error)) from error
    head = bytearray(batch.data[:_RECORDS_START])
    struct.pack_into(">i", head, _LENGTH_AT, _RECORDS_START - _LENGTH_END + len(records))
    struct.pack_into(">h", head, _ATTRIBUTES_AT, batch.attributes & ~_CODEC)
    return bytes(head) + records
