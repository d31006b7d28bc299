"""Prefetches the input of a partition in the background, up to a bound: a commit takes what has piled up.

The reader continues after outages of the bus. It decodes nothing and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import anyio
import structlog
from msgspec import Struct

from outfitter_proto.bus import BusConfigurationError, BusError, Message, OffsetOutOfRangeError, Reader
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.outage_log import OutageLog

log = structlog.get_logger("outfitter.input")

READ_AHEAD = 5000
READ_AHEAD_BYTES = 16 * 1024 * 1024
"""Fetching pauses while so many records or bytes are undecided. This bounds the memory that a flood takes."""

RETRY_S = 0.5
"""Seconds until the next attempt to read after an error."""


class Cursor(Struct, kw_only=True):
    """A processor's committed position in the input. `base` and `begin`: as in `records.InputPosition`."""

    topic_id: str
    """The id of the topic that the offsets are of."""
    position: int
    """The next offset to decide."""
    base: int = 0
    begin: int = 0
    ahead: dict[bytes, int] = {}
    """As in `records.InputPosition`, by message key."""

    def decided_before(self, host: bytes) -> int:
        """The offset before which all messages of `host` are decided."""
        return max(self.position, self.ahead.get(host, 0))

    @property
    def reach(self) -> int:
        """The offset after all decided messages of all hosts."""
        return max([self.position, *self.ahead.values()])

    def advance(self, position: int, ahead: dict[bytes, int]) -> None:
        """All messages before `position` are committed, and those of the hosts in `ahead` before their offsets."""
        self.position, self.ahead = position, ahead

    def begin_again(self, start: int, topic_id: str) -> None:
        """Continue at `start`. If the topic was recreated, its offsets count as later than all earlier ones."""
        if start < self.position or topic_id != self.topic_id:
            self.base += self.reach
            self.begin, self.ahead = 0, {}
        self.topic_id, self.position = topic_id, start


class PrefetchBuffer:
    """Fetched messages that are not decided yet, in order, and their `bytes`. One fetch may exceed the limits of
    messages and of bytes."""

    def __init__(self, most: int) -> None:
        """`most`: the number of messages with which it is full."""
        self.messages: deque[Message] = deque()
        self.bytes = 0
        self._most = most
        self._drained: anyio.Event | None = None
        self._filled = anyio.Event()

    @property
    def full(self) -> bool:
        """Whether fetching must pause."""
        return len(self.messages) >= self._most or self.bytes >= READ_AHEAD_BYTES

    async def wait_for_room(self) -> None:
        """Wait until it is not full."""
        if self.full:
            self._filled.set()
            self._drained = anyio.Event()
            await self._drained.wait()

    async def wait_until_full(self) -> None:
        """Wait until the buffer is full."""
        if not self.full:
            self._filled = anyio.Event()
            await self._filled.wait()

    def put(self, messages: Sequence[Message]) -> None:
        """Add the next messages of the input."""
        self.messages.extend(messages)
        self.bytes += sum(len(message.value or b"") for message in messages)

    def pop(self) -> Message:
        """Remove and return the next message. It comes back only by `put_back`."""
        message = self.messages.popleft()
        self.bytes -= len(message.value or b"")
        if self._drained is not None and not self.full:
            self._drained.set()
            self._drained = None
        return message

    def put_back(self, messages: Sequence[Message]) -> None:
        """Put messages first again, because their commit failed."""
        self.messages.extendleft(reversed(messages))
        self.bytes += sum(len(message.value or b"") for message in messages)

    def clear(self) -> None:
        """Drop all messages."""
        self.messages.clear()
        self.bytes = 0
        if self._drained is not None:
            self._drained.set()
            self._drained = None


class InputReader(PrefetchBuffer):
    """The messages that are decided in turn."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        wake: Callable[[], None],
        on_recovery: Callable[[], None],
        on_late: Callable[[float], None],
        outage: OutageLog,
        most: int = READ_AHEAD,
    ) -> None:
        """`wake` is called when there are messages or errors to handle, `on_recovery` when reading works again after an
        outage, `on_late` after a late answer, with the seconds for which it was owed. `most`: records that are read
        ahead."""
        super().__init__(most)
        self._outage = outage
        self._assignment = assignment
        self._wake = wake
        self._on_recovery = on_recovery
        self._on_late = on_late
        self._late_since = 0.0
        self._resumed = anyio.Event()
        self._fetching = anyio.CancelScope()
        self._replaced: OffsetOutOfRangeError | None = None
        self.position = 0
        """The offset after the last fetched message, gaps included."""
        self.obstacle: str | None = None
        """Why nothing can be fetched now, or None."""
        self.is_late = False
        """The bus owes an answer, perhaps because it is away."""
        self.outages = 0
        """How many obstacles have ended."""
        self.lost: OffsetOutOfRangeError | None = None
        """The error if `position` is out of range."""
        self.trouble: BusConfigurationError | None = None
        """The error if the bus was replaced; then reading has ended."""

    def reset(self, start: int) -> None:
        """Drop the fetched messages; `run` continues at `start`."""
        self.clear()
        self.position = start
        self._replaced = None
        self.obstacle = None
        self._outage.passed(self._activity)
        self.lost = None
        self.trouble = None
        self._resumed.set()

    def replace_topic(self, error: OffsetOutOfRangeError) -> None:
        """The topic was replaced, and nobody has read the new topic's records before `position`: treat `position` as
        out of range."""
        self._replaced = error
        self._fetching.cancel()

    async def run(self) -> None:
        """Fetch from `position` on, until cancelled. If it is out of range, `lost` has the error until `reset`."""
        while True:
            try:
                with anyio.CancelScope() as self._fetching:
                    async with await self._assignment.open_input(self.position) as reader:
                        await self._fetch(reader)
                replaced, self._replaced = self._replaced, None
                if replaced is not None:
                    raise replaced
            except OffsetOutOfRangeError as error:
                log.error("input position is out of range", wanted=self.position, start=error.start, end=error.end)
                self._resumed = anyio.Event()
                self.lost = error
                self._wake()
                await self._resumed.wait()
            except BusError as error:
                if self._assignment.bus.local and isinstance(error, BusConfigurationError):
                    self.trouble = error  # the file was replaced, and trying again cannot help
                    self._wake()
                    return
                self._outage.met(self._activity, error)
                if self.is_readable:
                    self._wake()
                self.obstacle = str(error)
                await anyio.sleep(RETRY_S)

    async def _fetch(self, reader: Reader) -> None:
        self.is_late = False  # what an earlier reader waited for ended in an error, and so is an outage
        while True:
            await self.wait_for_room()
            messages = await reader.fetch(max_records=self._most, timeout=1.0)
            self.position = reader.position
            if not self.is_readable and reader.has_answered:
                self._outage.passed(self._activity)
                self.obstacle = None
                self.outages += 1
                self._on_recovery()
                self._wake()
            self._note_lateness(reader)
            if messages:
                self.put(messages)
                self._wake()

    def _note_lateness(self, reader: Reader) -> None:
        """A short outage, in which no request fails, is an answer that comes late."""
        now = anyio.current_time()
        if reader.late_s and not self.is_late:
            self._late_since = now - reader.late_s
        elif self.is_late and not reader.late_s:
            self._on_late(now - self._late_since)
        self.is_late = reader.late_s > 0

    @property
    def _activity(self) -> str:
        return f"reading registrations of partition {self._assignment.partition}"

    @property
    def is_readable(self) -> bool:
        """Whether the bus can be read; if not, `obstacle` says why."""
        return self.obstacle is None

    @property
    def shows_silence(self) -> bool:
        """Whether nobody is silent because of the bus."""
        return self.is_readable and not self.is_late
