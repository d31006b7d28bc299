"""A bus that knows how many bytes each commit would take at a Kafka broker."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from outfitter_proto.bus import Entry, Writer
from outfitter_proto.bus.kafka.reading import batches, codecs
from outfitter_proto.bus.kafka.writing.record_batches import WORTH_PACKING
from outfitter_proto.bus.kafka.writing.writer import MAX_BATCH_BYTES
from outfitter_proto.names import is_history
from support.bus.faulty_bus import FaultyBus, WrappedWriter
from support.managers.in_process import HOST

ZSTD = 4
BATCH_BYTES = 1024 * 1024
"""What a stock producer puts into a batch before it packs it."""
BATCH_RECORDS = 15_000
"""More empty ones do not fit into what the topic takes."""


class PackingBus(FaultyBus):
    """An embedded bus. `sizes`: bytes by topic, packed as by the Kafka adapter for answers that outgrow their input."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.sizes: Counter[str] = Counter()

    async def open_writer(self, identity: str, partition: int, *, topics: Collection[str] = ()) -> Writer:
        writer = await super().open_writer(identity, partition, topics=topics)
        return writer if identity == "flood" else _PackingWriter(self, writer)


class _PackingWriter(WrappedWriter):
    def __init__(self, bus: PackingBus, inner: Writer) -> None:
        super().__init__(inner)
        self._bus = bus

    @property
    def max_part_bytes(self) -> int:
        return MAX_BATCH_BYTES

    async def commit(self, batches: Sequence[tuple[str, Sequence[Entry]]]) -> None:
        await super().commit(batches)
        for topic, entries in batches:
            self._bus.sizes[topic] += packed_size(topic, entries) if entries else 0


def packed_size(topic: str, entries: Sequence[Entry]) -> int:
    """The bytes of a record batch with these records."""
    builder = DefaultRecordBatchBuilder(2, 0, 1, 1, 1, 1, 2**30)
    for number, entry in enumerate(entries):
        builder.append(number, 1_000, entry.key, entry.value, [])
    plain = builder.build()
    if len(plain) < WORTH_PACKING:
        return len(plain)
    return len(batches.packed(plain, codecs.ZSTD if is_history(topic) else codecs.GZIP, codecs.SMALL))


def packed(
    values: Iterable[bytes],
    *,
    key: str = HOST,
    codec: int = ZSTD,
    most: int = BATCH_BYTES,
    records: int = BATCH_RECORDS,
) -> list[bytes]:
    """Record batches as a stock producer sends them."""
    found: list[bytes] = []
    builder, count = None, 0
    for value in values:
        if builder is not None and (builder.size() + len(value) > most or count >= records):
            found.append(bytes(builder.build()))
            builder = None
        if builder is None:
            builder, count = DefaultRecordBatchBuilder(2, codec, 0, -1, -1, -1, 2 * most), 0
        builder.append(count, 1_000, key.encode(), value, [])
        count += 1
    return found if builder is None else [*found, bytes(builder.build())]


def read(data: bytes) -> list[Entry]:
    """What a manager's reader makes of a batch."""
    [batch] = batches.split(struct.pack(">q", 0) + data[8:])
    try:
        return [Entry(message.key, message.value) for message in batches.messages(batch, "t", 0)]
    except batches.UnreadableBatchError as error:
        message = batches.raw_message(batch, "t", 0, error)
        return [Entry(message.key, message.value)]
