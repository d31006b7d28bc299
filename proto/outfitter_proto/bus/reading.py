"""Reads a partition, even if retention or compaction moves its start past the reader meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from outfitter_proto.bus.port import Message, OffsetOutOfRangeError, Reader

MARKERS_WAIT_S = 0.05
"""Time limit of one fetch. If only transaction markers are left, a fetch returns nothing but moves the position."""
AT_ONCE = 10_000
"""Most records of one fetch."""
FOLLOW_WAIT_S = 5.0
"""Time limit of one fetch while a reader waits for new messages."""


async def fetch_what_is_left(reader: Reader, *, max_records: int = AT_ONCE, timeout: float = 1.0) -> list[Message]:
    """See `Reader.fetch`. If the log's start has moved past the position, return nothing and continue at the start.

    In a compacted topic later records supersede the deleted ones; in other topics they are lost.

    Raises:
        BusError: the partition cannot be read.
    """
    try:
        return await reader.fetch(max_records=max_records, timeout=timeout)
    except OffsetOutOfRangeError as error:
        await reader.seek(error.start)
        return []


async def read_to(reader: Reader, end: int, *, max_records: int = AT_ONCE) -> AsyncIterator[list[Message]]:
    """Yield the messages from the reader's position to the offset `end`, one list a fetch (see `fetch_what_is_left`).
    The last list may have messages from behind `end`.

    Raises:
        BusError: the partition cannot be read.
    """
    while reader.position < end:
        yield await fetch_what_is_left(reader, max_records=max_records, timeout=MARKERS_WAIT_S)


async def read_on(reader: Reader, *, seconds_left: Callable[[], float] | None = None) -> AsyncIterator[list[Message]]:
    """Yield the messages from the reader's position on as they come, one list a fetch, which may be empty.

    It ends when `seconds_left()` is not positive; without this function, never. See `fetch_what_is_left`.

    Raises:
        BusError: the partition cannot be read.
    """
    while (left := FOLLOW_WAIT_S if seconds_left is None else seconds_left()) > 0:
        yield await fetch_what_is_left(reader, timeout=min(left, FOLLOW_WAIT_S))
