"""Reads the history topic from about a moment on, in order of time.

It writes nothing, and keeps only the last fetch in memory, so the topic may have any length.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from typing import TypeVar

from outfitter_proto import codec, names
from outfitter_proto.bus import Bus, Message, Reader, UnknownTopicError
from outfitter_proto.bus.patience import Patience
from outfitter_proto.bus.reading import fetch_what_is_left
from outfitter_service.config import BusConnection
from outfitter_service.query.errors import OutfitterCliError

log = logging.getLogger("outfitter.query")

_Record = TypeVar("_Record")

MARGIN = timedelta(minutes=10)
"""Longest difference between clocks or in the order of messages. A search begins this much earlier."""
MAX_SCANNED = 10_000
"""Most messages that are read instead of halving the search range again."""
READ_WITHIN_S = 60.0
"""Seconds without a message, before the end, after which the reading fails."""


async def topic_of(bus: Bus, where: BusConnection) -> str:
    """The history topic's name.

    Raises:
        OutfitterCliError: there is none.
    """
    topic = names.topics(where.cluster).history
    try:
        await bus.topic(topic)
    except UnknownTopicError as error:
        if not where.history:
            raise OutfitterCliError(
                f"history is switched off (history = false), and there is no topic {topic}"
            ) from error
        raise
    return topic


def no_history_text(where: BusConnection, topic: str) -> str:
    """The text why there may be no history."""
    off = (
        "history is switched off (history = false)" if not where.history else "it may be switched off (history = false)"
    )
    return f"there is no history in {topic}: {off}, nothing has happened yet, or its retention has deleted all"


def decoded(message: Message, decode: Callable[[bytes], _Record]) -> _Record | None:
    """The record in `message`. None if its type is of a later version, or after a warning if it is damaged or stands
    for a batch that cannot be read."""
    if message.unreadable is not None:
        log.warning("passed over %s/%s: %s", message.topic, message.partition, message.unreadable)
        return None
    try:
        return decode(message.value or b"")
    except codec.UnknownTypeError:
        return None
    except codec.WireError as error:
        log.warning("passed over offset %s of %s/%s: %s", message.offset, message.topic, message.partition, error)
        return None


async def offset_at(bus: Bus, topic: str, partition: int, moment: datetime) -> int:
    """An offset slightly before the first message written at `moment` or later."""
    low, high = await bus.offsets(topic, partition)
    if high - low <= MAX_SCANNED:
        return low
    moment_ms = (moment - MARGIN).timestamp() * 1000
    high = await bus.stable_end(topic, partition)  # undecided records cannot be read yet
    async with await bus.open_reader(topic, partition, start=low, committed=True, lenient=True) as reader:
        while high - low > MAX_SCANNED:
            middle = (low + high) // 2
            await reader.seek(middle)
            messages: list[Message] = []
            while not messages and reader.position < high:  # a slow bus, or only a commit's marker
                messages = await reader.fetch(max_records=1)
            if messages and 0 < messages[0].timestamp_ms < moment_ms:
                low = middle
            else:
                high = middle
    return low


class HistoryRange:
    """One partition's messages between two offsets, one by one."""

    def __init__(self, reader: Reader, topic: str, partition: int, end: int, patience: Patience) -> None:
        self.reader = reader
        self._patience = patience
        self._where = f"{topic}/{partition}"
        self._end = end
        self._messages: list[Message] = []

    async def next(self) -> Message | None:
        """The next message; None at the end."""
        deadline = self._patience.now() + READ_WITHIN_S
        while not self._messages:
            if self.reader.position >= self._end:
                return None
            self._messages = (await fetch_what_is_left(self.reader))[::-1]
            if not self._messages and self._patience.now() > deadline:
                raise OutfitterCliError(f"{self._where} could not be read from offset {self.reader.position} on")
        return self._messages.pop() if self._messages[-1].offset < self._end else None

    def rest(self) -> list[Message]:
        """The fetched messages behind the end."""
        rest, self._messages = self._messages[::-1], []
        return rest


async def open_range(
    stack: AsyncExitStack, bus: Bus, topic: str, partition: int, *, start: int | None, end: int | None = None
) -> HistoryRange:
    """Open a range up to the committed end, or up to another end. `stack` closes it."""
    if end is None:
        end = await bus.stable_end(topic, partition)
    reader = await bus.open_reader(topic, partition, start=start, committed=True, lenient=True)
    await stack.enter_async_context(reader)
    return HistoryRange(reader, topic, partition, end, bus.patience)


async def open_ranges(
    stack: AsyncExitStack, bus: Bus, topic: str, partitions: Iterable[int], since: datetime | None
) -> list[HistoryRange]:
    """Open a range of each partition from about `since` on (None: all) up to the committed end. `stack` closes them."""
    ranges: list[HistoryRange] = []
    for partition in partitions:
        start = None if since is None else await offset_at(bus, topic, partition, since)
        ranges.append(await open_range(stack, bus, topic, partition, start=start))
    return ranges


async def merged(ranges: list[HistoryRange]) -> AsyncIterator[Message]:
    """The messages of all ranges in the order of time, as far as each range is in that order."""
    import heapq

    heads: list[tuple[int, int, Message]] = []

    async def advance(index: int) -> None:
        message = await ranges[index].next()
        if message is not None:
            heapq.heappush(heads, (message.timestamp_ms, index, message))

    for index in range(len(ranges)):
        await advance(index)
    while heads:
        _, index, message = heapq.heappop(heads)
        yield message
        await advance(index)
