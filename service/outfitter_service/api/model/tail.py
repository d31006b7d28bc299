"""The newest messages of a topic that only grows: steps of history, dead letters."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T")

MOST_ITEMS = 10_000
"""Most items that a tail keeps."""
MOST_BYTES = 32 * 1024 * 1024
"""Most bytes of messages that a tail keeps."""

_FIRST = datetime.min.replace(tzinfo=timezone(timedelta(hours=23, minutes=59)))
"""The earliest time that can be."""
_MICROSECOND = timedelta(microseconds=1)


class TailItem(Struct, Generic[T], frozen=True):
    """One message."""

    position: str
    """Its place in the order of the tail, as text."""
    at: datetime
    """Its time."""
    value: T
    size: int
    """Its bytes."""


def position_of(at: datetime, partition: int, offset: int) -> str:
    """Times sort first, whatever their zones, and messages of one time by partition and offset."""
    return f"{(at - _FIRST) // _MICROSECOND:018d}-{partition:06d}-{offset:019d}"


class Tail(Generic[T]):
    """The newest items, in the order of time. `oldest`: of any partition, earlier items may be left out; None: nothing
    is left out. `unavailable`: why the topic cannot be read, or None."""

    def __init__(self) -> None:
        self.oldest: datetime | None = None
        self.unavailable: str | None = None
        self._items: list[TailItem[T]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def leave_out_before(self, at: datetime) -> None:
        """Earlier items are left out, at least of one partition."""
        self.oldest = at if self.oldest is None else max(self.oldest, at)

    def add(self, item: TailItem[T]) -> None:
        """Add an item in its place, and drop the oldest ones beyond the bounds."""
        if self._items and item.position < self._items[-1].position:
            insort(self._items, item, key=lambda each: each.position)
        else:
            self._items.append(item)
        self._bytes += item.size
        excess = max(0, len(self._items) - MOST_ITEMS)
        self._bytes -= sum(each.size for each in self._items[:excess])
        while self._bytes > MOST_BYTES and excess < len(self._items) - 1:
            self._bytes -= self._items[excess].size
            excess += 1
        if excess:
            del self._items[:excess]
            self.leave_out_before(self._items[0].at)

    def newest_first(self, before: str | None = None) -> Iterator[TailItem[T]]:
        """The items before a position (None: all), the newest first."""
        end = len(self._items)
        if before is not None:
            end = bisect_left(self._items, before, key=lambda each: each.position)
        for index in range(end - 1, -1, -1):
            yield self._items[index]
