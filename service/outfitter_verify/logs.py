"""The data to check: the partitions of a cluster's topics, as values. A source (`kafka`, `embedded`, or a test) reads
them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Record(NamedTuple):
    """One record. `timestamp_ms` is the bus's, in milliseconds since the epoch."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int = 0


class Place(NamedTuple):
    """The place of a record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Log(NamedTuple):
    """One partition of one topic: its records in order, from offset `start` to before `end`.

    `unseen`: ranges of offsets, without their ends, that the client could not read.
    """

    topic: str
    partition: int
    start: int
    end: int
    records: Sequence[Record]
    unseen: Sequence[tuple[int, int]] = ()

    def hides(self, offset: int) -> bool:
        """Whether `offset` is in an unread range."""
        return any(begin <= offset < end for begin, end in self.unseen)

    def place(self, offset: int) -> Place:
        return Place(self.topic, self.partition, offset)

    def at(self, offset: int) -> Record | None:
        """The record at `offset`; None if there is none, or no longer."""
        index = bisect_left(self.records, offset, key=lambda record: record.offset)
        record = self.records[index] if index < len(self.records) else None
        return record if record is not None and record.offset == offset else None

    def holes(self, after: int, before: int) -> int:
        """The number of offsets between `after` and `before` (both exclusive) without a visible record."""
        first = bisect_left(self.records, after + 1, key=lambda record: record.offset)
        last = bisect_left(self.records, before, key=lambda record: record.offset)
        return max(before - after - 1, 0) - (last - first)


class Control(NamedTuple):
    """The topic of operators' orders, if it can be read, and its id, if known."""

    log: Log | None = None
    topic_id: str | None = None
    why: str = "there is no topic of orders"
    """Why it cannot be read."""


class Partition(NamedTuple):
    """One partition of the four topics that have several. The ledger must have been read before all others."""

    registrations: Log
    allocations: Log
    history: Log
    dead_letters: Log
    control: Control = Control()
    """The orders to all hosts."""

    @property
    def logs(self) -> list[Log]:
        """All of these logs."""
        own = [self.registrations, self.allocations, self.history, self.dead_letters]
        return own if self.control.log is None else [*own, self.control.log]


class Reading(NamedTuple):
    """All data of a cluster."""

    cluster: str
    partitions: int
    """Each topic's number of partitions."""
    topic_id: str | None
    """The registrations topic's id, if known."""
    markers: bool
    """The bus writes a control record after each transaction (Kafka), which takes an offset and is invisible."""
    logs: Iterable[Partition]
