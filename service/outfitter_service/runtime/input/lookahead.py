"""A second reader of the input, far ahead of the first, so that one host's flood does not delay the others.

Outfitter promises order within a host only. The input reader prefetches up to a bound. While the input is longer, the
look-ahead reads on to its end. It keeps messages of hosts that send few, which may be decided before their turn. It
leaves all others to the input reader. It then leaves all later messages of the same host as well, until the input
reader has read them. The look-ahead stores no flood and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog
from msgspec import Struct

from outfitter_proto.bus import BusError, Message, Reader
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_end import InputEnd
from outfitter_service.runtime.input.input_reader import READ_AHEAD, RETRY_S, Cursor, InputReader, PrefetchBuffer
from outfitter_service.runtime.input.scope import Scope

log = structlog.get_logger("outfitter.lookahead")

QUIET_LIMIT = 256
"""Messages that each host may have ahead in any case: the workers of one machine may all start at once. A host may have
more ahead as long as that is no more than its share of the messages decided since the look-ahead began."""

ENTRY_BYTES = 24
"""Bytes that a host takes in a checkpoint besides its name."""


class LookAheadBuffer(PrefetchBuffer):
    """Messages read ahead of the input reader, from offset `start` up to `position`. They may be decided once all
    messages before `start` are decided."""

    def __init__(self, start: int, cursor: Cursor, scope: Scope, *, quiet_limit: int, room: int, most: int) -> None:
        """`cursor`: the processor's, which moves on. `quiet_limit`: messages that a host may have ahead in any case.
        `room`: bytes that the names of hosts ahead may take in a checkpoint; further hosts are left to the input
        reader. `most`: messages that are kept at most."""
        super().__init__(most)
        self.start = self.position = start
        self._cursor = cursor
        self._scope = scope
        self._quiet_limit = quiet_limit
        self._room = room
        self._left: dict[bytes, int] = {}
        """The offset of the last message that was left to the input reader, by host."""
        self._kept: dict[bytes, int] = {}
        """How many messages of each tracked host were kept since one was left."""
        self._newest: dict[bytes, int] = {}
        """The offset of the last message of each tracked host."""
        self._newest_untracked = -1
        """The offset of the last message of a host that is not tracked, for lack of room."""
        for key in cursor.ahead:
            self._track(key)

    def add(self, messages: Sequence[Message], position: int) -> None:
        """Keep or leave each of the next messages, up to `position`."""
        self.put([message for message in messages if self._accepts(message)])
        self.position = position

    def _accepts(self, message: Message) -> bool:
        key, cursor = message.key, self._cursor
        if key is None or not self._scope.serves(message):
            return False  # left to the input reader
        if not self._track(key):
            self._newest_untracked = message.offset
            return False
        self._newest[key] = message.offset
        if message.offset < cursor.decided_before(key):
            return False  # it is committed
        left_offset = self._left.get(key)
        if left_offset is not None:
            if left_offset >= cursor.position:
                self._left[key] = message.offset
                return False
            # all messages up to that offset are committed, and this is the host's next one
            del self._left[key]
            self._kept[key] = 0
        count = self._kept[key]
        if count >= self._quiet_limit and count * len(self._kept) > cursor.position - self.start:
            self._left[key] = message.offset
            return False
        self._kept[key] = count + 1
        return True

    def decided_before(self, host: bytes) -> int:
        """The offset before which all messages of `host` are decided. It counts parts of the input in which the host
        has no message."""
        cursor = self._cursor
        decided = cursor.decided_before(host)
        newest = self._newest.get(host, -1) if host in self._kept else self._newest_untracked
        return max(decided, self.position) if newest < decided and cursor.position >= self.start else decided

    def _track(self, key: bytes) -> bool:
        """Track a host's messages if there is room. Returns whether they are tracked."""
        if key not in self._kept:
            size = len(key) + ENTRY_BYTES
            if size > self._room:
                return False
            self._room -= size
            self._kept[key] = 0
        return True


class LookAhead:
    """Reads ahead in one partition's input while its input reader does not keep up. `lookahead_buffer` has the
    messages; None: the input reader has them all."""

    def __init__(
        self,
        assignment: Assignment,
        input_reader: InputReader,
        *,
        wake: Callable[[], None],
        quiet_limit: int = QUIET_LIMIT,
    ) -> None:
        """`wake` is called when there is something to decide. `quiet_limit`: messages that a host may have ahead in any
        case."""
        self._assignment = assignment
        self._input_reader = input_reader
        self._wake = wake
        self._quiet_limit = quiet_limit
        self._cursor = Cursor(topic_id="", position=0)
        self._room = 0
        self.lookahead_buffer: LookAheadBuffer | None = None

    def reset(self, cursor: Cursor, *, room: int | None = None) -> None:
        """Drop everything and look ahead of `cursor`. `room`: as in `LookAheadBuffer` (default: as before)."""
        self._end()
        self._cursor = cursor
        self._room = self._room if room is None else room

    def decided_before(self, host: str) -> int:
        """The offset before which all messages of `host` are certainly decided."""
        key = host.encode()
        return (
            self._cursor.decided_before(key)
            if self.lookahead_buffer is None
            else self.lookahead_buffer.decided_before(key)
        )

    async def run(self) -> None:
        """Look ahead whenever the input reader is full, until cancelled."""
        while True:
            await self._input_reader.wait_until_full()
            lookahead_buffer = self.lookahead_buffer = LookAheadBuffer(
                self._input_reader.position,
                self._cursor,
                self._assignment.scope,
                quiet_limit=self._quiet_limit,
                room=self._room,
                most=READ_AHEAD,
            )
            while self.lookahead_buffer is lookahead_buffer:
                try:
                    async with await self._assignment.open_input(lookahead_buffer.position) as reader:
                        await self._read_ahead(lookahead_buffer, reader)
                except BusError as error:
                    # the input reader meets the same error, and handles it
                    log.debug("cannot look ahead", partition=self._assignment.partition, error=str(error))
                    await anyio.sleep(RETRY_S)

    async def _read_ahead(self, lookahead_buffer: LookAheadBuffer, reader: Reader) -> None:
        """Read until the input reader has caught up."""
        input_reader = self._input_reader
        while self.lookahead_buffer is lookahead_buffer:
            await lookahead_buffer.wait_for_room()
            lookahead_buffer.add(await reader.fetch(max_records=READ_AHEAD, timeout=1.0), reader.position)
            if lookahead_buffer.messages:
                self._wake()
            if (
                self.lookahead_buffer is lookahead_buffer
                and input_reader.position >= lookahead_buffer.position
                and not input_reader.full
            ):
                self._end()

    def _end(self) -> None:
        if self.lookahead_buffer is not None:
            self.lookahead_buffer.clear()
            self.lookahead_buffer = None


class Inputs(Struct, frozen=True):
    """One partition's input."""

    reader: InputReader
    """Has the messages that are decided in turn."""
    lookahead: LookAhead
    """Has those that are decided before their turn."""
    end: InputEnd
    """The end of the input."""

    def reset(self, cursor: Cursor, *, room: int | None = None) -> None:
        """Drop everything read and continue at `cursor`; `room` as in `LookAhead.reset`."""
        self.reader.reset(cursor.position)
        self.lookahead.reset(cursor, room=room)
        self.end.reset(cursor.position)

    def clear(self) -> None:
        """Drop everything."""
        self.reader.clear()
        self.lookahead.reset(Cursor(topic_id="", position=0))
