"""The record batches in a fetch answer: finds the visible ones and decodes their records. Pure, with bounded memory.

This module parses the headers; aiokafka's C code decodes the records. Formats: Kafka's protocol guide, "Record Batch".
Aborted transactions: KIP-98.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from aiokafka import errors as kafka_errors
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.util import calc_crc32c

from outfitter_proto.bus.kafka.reading import codecs
from outfitter_proto.bus.port import Message
from outfitter_proto.records import Heartbeat

MAX_RECORDS = 20_000
"""Limit of one batch. A few kilobytes can hold half a million empty records, and each becomes a dead letter."""

FEW_RECORDS = 1000
"""Limit of a batch of workers' messages, or one record per compressed byte if that is more. 1,000 equal heartbeats of
one worker take 1,580 bytes with zstd."""
ANSWERED_BYTES = 5
"""Of the messages in a batch that are no heartbeats, `FEW_RECORDS` are read, or one for so many packed bytes if that is
more. Each has records written. With zstd one takes 3 bytes if they differ in a number alone, and 20 or more if each
incarnation is a UUID."""

_heartbeat: msgspec.json.Decoder[Heartbeat] = msgspec.json.Decoder(Heartbeat)

# every format: base offset, length, leader epoch, magic
_START = struct.Struct(">qiib")
# format 2: attributes, last offset delta, first and last timestamp, producer
_HEADER = struct.Struct(">hiqqq")
_COUNT = struct.Struct(">i")
_LENGTH_AT, _LENGTH_END = 8, 12
_CRC_AT = 17
_ATTRIBUTES = struct.Struct(">h")
_ATTRIBUTES_AT = 21
_COUNT_AT, _RECORDS_START = 57, 61
_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20
_SHORTEST_OLD = 14
"""Least `length` in the formats before 2: checksum, magic, attributes, and two lengths of 0."""
_OLD_HEADER = (0, 0, -1, -1, -1)
_LAST_OFFSET = 2**63 - 1


class CorruptBatchError(Exception):
    """The bytes are damaged: fetch them again."""


class UnreadableBatchError(Exception):
    """The batch is intact, but has an unknown format or codec, or is larger than our limits."""

    def __init__(self, offset: int, why: str) -> None:
        super().__init__(f"the record batch at offset {offset} {why}")


class RecordBatch(NamedTuple):
    """A record batch that is not decoded yet."""

    data: bytes
    """Its bytes with the header."""
    base: int
    """Its first offset."""
    next: int
    """The offset after it and its holes."""
    attributes: int
    producer: int
    """The producer's id. -1: none."""
    last_timestamp_ms: int
    modern: bool
    """It has format 2."""

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)


def split(data: bytes) -> Iterator[RecordBatch]:
    """The complete batches in `data`. A fetch answer may end in the middle of a batch.

    The checksum covers neither a batch's length nor its offset, but aiokafka's C code trusts both. So we check them:
    each batch starts at or after the end of the one before, has a positive length and room for its header.

    Raises:
        CorruptBatchError: the next batch fails this check.
    """
    position = 0
    first_valid = 0  # the lowest offset that the next batch may have
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
        if not first_valid <= base < following <= _LAST_OFFSET:
            raise CorruptBatchError(
                f"a record batch after offset {first_valid - 1} says that it has the offsets {base} to {following - 1}"
            )
        yield RecordBatch(data[position:end], base, following, attributes, producer, last_timestamp, modern)
        position, first_valid = end, following


def committed(batches: Iterator[RecordBatch], aborted: Sequence[tuple[int, int]]) -> Iterator[tuple[RecordBatch, bool]]:
    """Each batch, and whether it is visible: control batches and aborted transactions are not.

    `aborted` has the broker's pairs (producer, first offset). A control batch ends its producer's transaction even
    without its record, because the log cleaner keeps emptied control batches (KAFKA-7467).
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


def everything(batches: Iterator[RecordBatch]) -> Iterator[tuple[RecordBatch, bool]]:
    """Each batch, and whether it has messages: control batches have none."""
    return ((batch, not batch.is_control) for batch in batches)


def messages(batch: RecordBatch, topic: str, partition: int) -> list[Message]:
    """The records of a batch, in order.

    Raises:
        CorruptBatchError: the checksum does not match.
        UnreadableBatchError: its format, codec or size is not supported.
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
        decoded = [
            Message(topic, partition, record.offset, record.key, record.value, record.timestamp) for record in records
        ]
    except (kafka_errors.KafkaError, ValueError, OSError, EOFError, OverflowError, MemoryError) as error:
        # Lengths from 2**62 raise the last two errors: aiokafka allocates before it checks the length.
        raise UnreadableBatchError(batch.base, f"cannot be decoded: {error or type(error).__name__}") from error
    if not _in_order([message.offset for message in decoded], batch):
        raise UnreadableBatchError(batch.base, "numbers its records otherwise than its header says")
    if not batch.is_transactional and (why := _costly([message.value or b"" for message in decoded], batch)):
        raise UnreadableBatchError(batch.base, why)
    return decoded


def raw_message(batch: RecordBatch, topic: str, partition: int, error: UnreadableBatchError) -> Message:
    """An unreadable batch as one message without a key, which is handled like any other bad message."""
    value = batch.data[_RECORDS_START:]
    return Message(topic, partition, batch.next - 1, None, value, batch.last_timestamp_ms, str(error), batch.base)


def _in_order(offsets: list[int], batch: RecordBatch) -> bool:
    """Whether the offsets ascend within the batch. Brokers do not check it, and a record with a much higher offset
    would make the reader skip all records in between."""
    if not offsets:
        return True
    return batch.base <= offsets[0] and offsets[-1] < batch.next and all(map(operator.lt, offsets, offsets[1:]))


def packed(batch: bytes | bytearray, codec: int, level: int) -> bytearray:
    """A finished uncompressed record batch, with its records compressed with gzip or zstd."""
    (attributes,) = _ATTRIBUTES.unpack_from(batch, _ATTRIBUTES_AT)
    found = bytearray(batch[:_RECORDS_START])
    found += codecs.pack(codec, memoryview(batch)[_RECORDS_START:], level)
    struct.pack_into(">i", found, _LENGTH_AT, len(found) - _LENGTH_END)
    _ATTRIBUTES.pack_into(found, _ATTRIBUTES_AT, attributes | codec)
    struct.pack_into(">I", found, _CRC_AT, calc_crc32c(bytes(found[_ATTRIBUTES_AT:])))
    return found


def _most_records(batch: RecordBatch) -> int:
    """The record limit of a batch. Managers' batches have a higher limit, because they compress better. They are
    transactional, and no worker has a right to a transactional id."""
    if batch.is_transactional:
        return MAX_RECORDS
    return min(MAX_RECORDS, max(FEW_RECORDS, len(batch.data) - _RECORDS_START))


def _most_bytes(batch: RecordBatch) -> int:
    if batch.is_transactional:
        return codecs.MAX_UNPACKED
    return min(codecs.MAX_UNPACKED, codecs.MOST_TIMES * (len(batch.data) - _RECORDS_START))


def _costly(values: list[bytes], batch: RecordBatch) -> str | None:
    """Why a batch of workers' messages has more written than its few packed bytes are worth; None: it has not.
    Heartbeats do not count, because nothing is written for them. After an outage, one batch may have thousands."""
    packed, times = len(batch.data) - _RECORDS_START, codecs.TIMES_OF_GZIP
    most = max(FEW_RECORDS, packed // ANSWERED_BYTES)
    if len(values) <= most and sum(map(len, values)) <= times * packed:
        return None
    answered = [value for value in values if not _is_heartbeat(value)]
    if len(answered) > most:
        return f"holds {len(answered)} messages besides heartbeats; at most {most} are read from one of its size"
    is_gzip = batch.attributes & _CODEC == codecs.GZIP
    if not is_gzip and codecs.outgrows(b"".join(answered), times * packed):
        return f"would take more than {times} times its size with gzip: send fewer messages in one batch, or use gzip"
    return None


def _is_heartbeat(value: bytes) -> bool:
    if b'"heartbeat"' not in value:
        return False  # an error of the decoder takes ten times as long
    try:
        _heartbeat.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _unpacked(batch: RecordBatch) -> bytes:
    """The batch without compression. Its checksum is invalid then."""
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
