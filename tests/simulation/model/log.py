"""One partition of a topic on the model broker: records and markers at offsets, the last stable offset, compaction.

What a read-committed reader sees is what Kafka shows it: nothing beyond the first offset of a transaction that is not
yet marked, nothing of aborted ones, and markers and holes as offsets without records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outfitter_proto.bus import Entry, Message

NOT_THE_LATEST = 8
"""Offsets at the end that compaction leaves alone, as it leaves a topic's active segment."""
REMEMBERED = 5
"""Batches of each producer that are known again when they come twice (ProducerStateEntry.NUM_BATCHES_TO_RETAIN)."""


class Part:
    """What one transaction wrote to one partition. `committed` is None until its marker is there."""

    __slots__ = ("committed", "decided_at", "first", "producer")

    def __init__(self, producer: int, first: int) -> None:
        self.producer = producer
        self.first = first
        self.committed: bool | None = None
        self.decided_at = 0.0


class Record(NamedTuple):
    """A record, or a transaction's marker (`marker`, without key and value)."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    part: Part | None
    marker: bool = False


class Seen:
    """What a partition knows of a producer: its epoch, and its last batches by their first sequence number."""

    __slots__ = ("batches", "epoch", "next")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next = 0
        self.batches: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)


class Log:
    """See the module. `all_written` keeps every record and marker ever written, whatever compaction does."""

    def __init__(self, topic: str, partition: int, *, compact: bool) -> None:
        self.topic = topic
        self.partition = partition
        self.compact = compact
        self.records: list[Record] = []
        self.all_written: list[Record] = []
        self.start = 0
        self.end = 0
        self.open: dict[int, Part] = {}
        self.seen: dict[int, Seen] = {}
        self._listeners: list[Callable[[], None]] = []

    @property
    def place(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return min((part.first for part in self.open.values()), default=self.end)

    def append(self, entries: Sequence[Entry], now: float, part: Part | None = None) -> int:
        """Write records; the offset of the first."""
        first = self.end
        for entry in entries:
            self._add(Record(self.end, entry.key, entry.value, int(now * 1000), part))
        self.tell()
        return first

    def mark(self, producer: int, epoch: int, *, commit: bool, now: float) -> None:
        """Write a transaction's marker: what it wrote here is decided."""
        part = self.open.pop(producer, None)
        if part is not None:
            part.committed, part.decided_at = commit, now
        seen = self.seen.setdefault(producer, Seen(epoch))
        if epoch > seen.epoch:
            self.seen[producer] = Seen(epoch)
        self._add(Record(self.end, None, None, int(now * 1000), None, marker=True))
        self.tell()

    def _add(self, record: Record) -> None:
        self.records.append(record)
        self.all_written.append(record)
        self.end += 1

    def read(self, position: int, most: int, *, committed: bool) -> tuple[list[Message], int]:
        """The next records from `position`, and the position after them."""
        limit = self.stable if committed else self.end
        found: list[Message] = []
        for place in range(bisect_left(self.records, position, key=_offset), len(self.records)):
            record = self.records[place]
            if record.offset >= limit:
                break
            if record.marker or (committed and record.part is not None and not record.part.committed):
                continue
            if len(found) == most:
                return found, found[-1].offset + 1
            found.append(
                Message(self.topic, self.partition, record.offset, record.key, record.value, record.timestamp_ms)
            )
        return found, max(limit, position)

    def first_since(self, moment_ms: int) -> int:
        """The offset of the first record of that time or later; the end, if there is none."""
        return next((record.offset for record in self.records if record.timestamp_ms >= moment_ms), self.end)

    def committed(self) -> list[tuple[Record, float]]:
        """Everything that was ever committed, in the order of offsets, with the time at which it was."""
        return [
            (record, record.timestamp_ms / 1000 if record.part is None else record.part.decided_at)
            for record in self.all_written
            if not record.marker and (record.part is None or record.part.committed)
        ]

    def clean(self) -> None:
        """Compact what is decided and not the latest: superseded and aborted records go, and markers with them."""
        limit = min(self.stable, self.end - NOT_THE_LATEST)
        last: dict[bytes | None, int] = {}
        for record in self.records:
            if record.offset < self.stable and not record.marker and (record.part is None or record.part.committed):
                last[record.key] = record.offset
        self.records = [
            record
            for record in self.records
            if record.offset >= limit
            or (
                not record.marker
                and (record.part is None or record.part.committed)
                and last[record.key] == record.offset
            )
        ]

    def expire(self, offset: int) -> None:
        """Retention: what stands before `offset` is gone."""
        self.start = max(self.start, min(offset, self.stable))
        self.records = [record for record in self.records if record.offset >= self.start]

    # --- long polls ---

    def listen(self, told: Callable[[], None]) -> None:
        """Call `told` once, when something has changed."""
        self._listeners.append(told)

    def forget(self, told: Callable[[], None]) -> None:
        if told in self._listeners:
            self._listeners.remove(told)

    def tell(self) -> None:
        """Answer those who wait."""
        listeners, self._listeners = self._listeners, []
        for told in listeners:
            told()


def _offset(record: Record) -> int:
    return record.offset
