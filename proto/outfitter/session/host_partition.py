"""The partition of one host's messages and records, and a reader of its ledger."""

from __future__ import annotations

import logging
import math

import anyio

from outfitter_proto import keys
from outfitter_proto.bus.port import Bus, Message, OffsetOutOfRangeError, Reader, TopicLayout, UnknownTopicError
from outfitter_proto.names import Topics
from outfitter_proto.partitioning import partition_of

PARTITION_CHECK_S = 30.0
"""Seconds between two checks whether the host's partition has changed, in a session that publishes nothing. It also
checks before each message, because no manager reads a message in the wrong partition."""

_FETCH_TIMEOUT = 5.0

log = logging.getLogger("outfitter")


class HostPartition:
    """The host's partition, which changes if partitions are added, or the topics made anew."""

    def __init__(self, bus: Bus, topics: Topics, host: str, *, worker: str) -> None:
        """`worker`: the name of the session in log lines."""
        self.number = 0
        """The partition's."""
        self.count = 0
        """The number of partitions."""
        self.topic_id = ""
        """The ledger's."""
        self.checkpoint_keys: frozenset[bytes] = frozenset()
        """The keys under which its managers commit checkpoints."""
        self._bus = bus
        self._topic = topics.allocations
        self._host = host
        self._worker = worker
        self._checked_at = 0.0
        self._reader: Reader | None = None
        self._read = (0, "")  # the number and the topic's id of what is read

    @property
    def position(self) -> int | None:
        """The reader's position; None: there is no reader."""
        return self._reader.position if self._reader is not None else None

    @property
    def has_answered(self) -> bool:
        """See `Reader.has_answered`."""
        return self._reader is not None and self._reader.has_answered

    @property
    def is_left(self) -> bool:
        """Whether the reader still reads the host's former partition, or the former topic."""
        return self._read != (self.number, self.topic_id)

    def assign(self, layout: TopicLayout) -> None:
        """Compute the host's partition in a ledger of this `layout`."""
        self.count, self.topic_id = layout.partitions, layout.id
        self.number = partition_of(self._host, self.count)
        writers = keys.host_writer(self._host), keys.partition_writer(self.number)
        self.checkpoint_keys = frozenset(keys.checkpoint_key(writer).encode() for writer in writers)
        self._checked_at = anyio.current_time()

    async def open(self, *, start: int | None) -> None:
        """Read the partition from the offset `start`; None: from the earliest."""
        self._read = (self.number, self.topic_id)
        self._reader = await self._bus.open_reader(self._topic, self.number, start=start, committed=True)

    async def stable_end(self) -> int:
        """See `Bus.stable_end`."""
        return await self._bus.stable_end(self._topic, self.number)

    async def has_changed(self) -> bool:
        """Look at the ledger's layout and compute the partition again. Returns whether it, or the topic, is another."""
        layout = (await self._bus.layouts([self._topic])).get(self._topic)
        if layout is None or layout == TopicLayout(self.topic_id, self.count):
            self._checked_at = anyio.current_time()
            return False
        what = "the ledger was made anew, and has" if layout.id != self.topic_id else "the ledger has"
        log.info("%s: %s %d partitions now", self._worker, what, layout.partitions)
        self.assign(layout)
        return True

    def is_check_due(self) -> bool:
        return anyio.current_time() - self._checked_at > PARTITION_CHECK_S

    def is_behind(self, end: int) -> bool:
        """Whether the reader has not read the partition up to the offset `end` yet."""
        reader = self._reader
        return reader is not None and (self.is_left or reader.position < end)

    async def follow(self) -> None:
        """If the host has left the partition, or the topic was made anew, read its new one from the beginning."""
        if not self.is_left:
            return
        new = (self.number, self.topic_id)
        reader = await self._bus.open_reader(self._topic, self.number, start=None, committed=True)
        former, self._reader, self._read = self._reader, reader, new
        if former is not None:
            await former.aclose()

    async def fetch(self) -> list[Message]:
        """See `Reader.fetch`."""
        if self._reader is None:
            raise RuntimeError("the partition is not open")
        try:
            return await self._reader.fetch(timeout=_FETCH_TIMEOUT)
        except (UnknownTopicError, OffsetOutOfRangeError):
            self._checked_at = -math.inf  # somebody may be making the topic anew
            raise

    async def seek(self, offset: int) -> None:
        """See `Reader.seek`."""
        if self._reader is not None:
            await self._reader.seek(offset)

    async def aclose(self) -> None:
        """Close the reader. Repeatable."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.aclose()
