"""Record batches to send. Each is encoded once, however often it is sent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from outfitter_proto.bus.kafka.reading import batches
from outfitter_proto.bus.port import Entry

BATCH_BYTES = 1_000_000
"""Limit of a record batch: below Kafka's default of max.message.bytes, 1,048,588."""
WORTH_PACKING = 4096
"""Bytes of a record batch from which on it is compressed."""

_NO_PRODUCER = {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1}
_NO_HEADERS: list[Any] = []


class Batch:
    """Records of one topic, in order and with one timestamp. `count`: how many; `data`: their bytes, once encoded."""

    def __init__(self, topic: str, builder: Any, count: int) -> None:
        self.topic = topic
        self.count = count
        self.data: bytes | bytearray = b""
        self._builder = builder
        self._packing: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Its bytes without compression."""
        return int(self._builder.size())

    def pack(self, codec: int, level: int) -> None:
        """Have it compressed, if that is worth it. aiokafka's own gzip takes a thousand times as long and saves a tenth
        more."""
        if self.size >= WORTH_PACKING:
            self._packing = codec, level

    def encode(self, producer_id: int = -1, epoch: int = -1, sequence: int = -1) -> None:
        """Encode it, once, for this producer. `sequence`: the number of its first record."""
        self._builder.set_producer_state(producer_id, epoch, sequence)
        plain = self._builder.build()
        self.data = plain if self._packing is None else batches.packed(plain, *self._packing)


def split(topic: str, entries: Sequence[Entry], *, transactional: bool, limit: int = BATCH_BYTES) -> list[Batch]:
    """Batches of at most `limit` bytes with these records. The first record of a batch may have any size."""
    now_ms = int(time.time() * 1000)
    found: list[Batch] = []
    done = 0
    while done < len(entries):
        builder = DefaultRecordBatchBuilder(
            magic=2, compression_type=0, is_transactional=int(transactional), batch_size=limit, **_NO_PRODUCER
        )
        append, count = builder.append, 0
        for entry in entries[done:] if done else entries:
            if append(count, now_ms, entry.key, entry.value, _NO_HEADERS) is None:
                break
            count += 1
        found.append(Batch(topic, builder, count))
        done += count
    return found
