"""What is checked: the partitions of a cluster's four topics as they stand on a bus, whatever bus that is.

Values only. Where they come from is the sources' business (`kafka`, `embedded`, or a test's own hand).
"""

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
    """Where a record stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


class Log(NamedTuple):
    """One partition of one topic: its records in order, from offset `start` to before `end`.

    `unseen` are places, from an offset to before another, that the client could not pass: what is there is not known.
    """

    topic: str
    partition: int
    start: int
    end: int
    records: Sequence[Record]
    unseen: Sequence[tuple[int, int]] = ()

    def hides(self, offset: int) -> bool:
        """Whether `offset` is in a place that was not looked at."""
        return any(begin <= offset < end for begin, end in self.unseen)

    def place(self, offset: int) -> Place:
        return Place(self.topic, self.partition, offset)

    def at(self, offset: int) -> Record | None:
        """The record at `offset`, None where there is none (any more)."""
        index = bisect_left(self.records, offset, key=lambda record: record.offset)
        found = self.records[index] if index < len(self.records) else None
        return found if found is not None and found.offset == offset else None

    def holes(self, after: int, before: int) -> int:
        """How many offsets between `after` and `before` (both exclusive) hold no record that can be seen."""
        first = bisect_left(self.records, after + 1, key=lambda record: record.offset)
        last = bisect_left(self.records, before, key=lambda record: record.offset)
        return max(before - after - 1, 0) - (last - first)


class Partition(NamedTuple):
    """One partition of all four topics. The ledger must have been read before the three others."""

    registrations: Log
    allocations: Log
    history: Log
    dead_letters: Log


class Reading(NamedTuple):
    """All there is of a cluster.

    `partitions` is each topic's partition count, `topic_id` the id of the registrations topic where it is known.
    `markers`: the bus puts a control record behind each transaction (Kafka), which takes an offset and is never seen.
    """

    cluster: str
    partitions: int
    topic_id: str | None
    markers: bool
    logs: Iterable[Partition]
