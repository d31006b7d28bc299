"""Record batches as they lie in a fetch answer: which to skip, and what the others hold. Pure, and bounded in memory.

What a batch header tells is read here; records are decoded by aiokafka's C code. Formats: Kafka's protocol guide,
"Record Batch"; the handling of aborted transactions: KIP-98.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from aiokafka import errors as kafka_errors
from aiokafka.record.default_records import DefaultRecordBatch

from outfitter_proto.bus.port import Message

MAX_DECOMPRESSED = 16 * 1024 * 1024
"""Bytes. A topic's limit counts compressed bytes; 64 kB of them can hold 200 MB."""

# base offset, length, leader epoch, magic, crc, attributes, last offset delta, first and last timestamp, producer
_HEADER = struct.Struct(">qiibIhiqqq")
_LENGTH_END = 12
_RECORDS_START = 61
_CODEC, _TRANSACTIONAL, _CONTROL = 0x07, 0x10, 0x20
_NONE, _GZIP = 0, 1
_CODECS = {0: "none", 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}


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
    records = DefaultRecordBatch(batch.data)
    if not records.validate_crc():
        raise CorruptBatchError(f"the record batch at offset {batch.base} of {topic}/{partition} has a wrong checksum")
    _check_unpacks(batch)
    try:
        return [
            Message(topic, partition, record.offset, record.key, record.value, record.timestamp) for record in records
        ]
    except (kafka_errors.KafkaError, ValueError, OSError, EOFError) as error:
        raise UnreadableBatchError(batch.base, f"cannot be decoded: {error}") from error


def raw_message(batch: Batch, topic: str, partition: int) -> Message:
    """An unreadable batch as one message without a key, so that it can be reported like any other bad message."""
    return Message(topic, partition, batch.next - 1, None, batch.data[_RECORDS_START:], batch.last_timestamp_ms)


def _check_unpacks(batch: Batch) -> None:
    codec = batch.attributes & _CODEC
    if codec == _NONE:
        return
    if codec != _GZIP:
        raise UnreadableBatchError(
            batch.base, f"is compressed with {_CODECS.get(codec, codec)}; write uncompressed or gzip"
        )
    unpacking = zlib.decompressobj(wbits=31)
    try:
        unpacking.decompress(batch.data[_RECORDS_START:], MAX_DECOMPRESSED)
    except zlib.error as error:
        raise UnreadableBatchError(batch.base, f"is not gzip: {error}") from error
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise UnreadableBatchError(batch.base, f"is cut off, or unpacks to more than {MAX_DECOMPRESSED} bytes")
