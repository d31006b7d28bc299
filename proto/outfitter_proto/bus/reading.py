"""Reading a topic's partition up to an end that is known: by whoever wants what is committed there, and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator

from outfitter_proto.bus.port import Message, OffsetOutOfRangeError, Reader

MARKERS_WAIT_S = 0.05
"""How long one fetch may wait: where nothing but transaction markers is left, nothing comes, and the position moves."""
AT_ONCE = 10_000
"""Records of one fetch, at most."""


async def read_to(reader: Reader, end: int) -> AsyncIterator[list[Message]]:
    """What is between the reader's position and `end`, fetch by fetch. If the log's start has moved past the position
    meanwhile, it goes on there: what was deleted is superseded by what is left.

    Raises:
        BusError: the partition cannot be read.
    """
    while reader.position < end:
        try:
            messages = await reader.fetch(max_records=AT_ONCE, timeout=MARKERS_WAIT_S)
        except OffsetOutOfRangeError as error:
            await reader.seek(error.start)
            continue
        yield messages
