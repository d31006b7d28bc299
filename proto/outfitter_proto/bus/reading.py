"""Reading a partition, also where the start of its log moves past the reader meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator

from outfitter_proto.bus.port import Message, OffsetOutOfRangeError, Reader

MARKERS_WAIT_S = 0.05
"""How long one fetch may wait: where nothing but transaction markers is left, nothing comes, and the position moves."""
AT_ONCE = 10_000
"""Records of one fetch, at most."""


async def fetch_what_is_left(reader: Reader, *, max_records: int = AT_ONCE, timeout: float = 1.0) -> list[Message]:
    """See `Reader.fetch`. If the log's start has moved past the position, this fetch brings nothing and the reader goes
    on at the start: later records of a compacted topic supersede what was deleted, and of another topic it is gone.

    Raises:
        BusError: the partition cannot be read.
    """
    try:
        return await reader.fetch(max_records=max_records, timeout=timeout)
    except OffsetOutOfRangeError as error:
        await reader.seek(error.start)
        return []


async def read_to(reader: Reader, end: int, *, max_records: int = AT_ONCE) -> AsyncIterator[list[Message]]:
    """What is between the reader's position and `end`, in fetches of at most `max_records`; see `fetch_what_is_left`.
    The last fetch may bring some from behind the end.

    Raises:
        BusError: the partition cannot be read.
    """
    while reader.position < end:
        yield await fetch_what_is_left(reader, max_records=max_records, timeout=MARKERS_WAIT_S)
