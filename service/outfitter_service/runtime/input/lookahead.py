"""A second look at the input of many hosts, far ahead of the first: one host's flood must not hold up the others.

Order is promised within a host only. The input reader prefetches up to a bound. While the input is longer, the
look-ahead reads on to the end. It keeps messages of hosts that send few: they may be decided before their turn. All
else is left to the input reader, with everything that the same host sends later, until the input reader has been
there. The look-ahead stores no flood and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog
from msgspec import Struct

from outfitter_proto.bus import BusError, Message, Reader
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import (
    READ_AHEAD,
    RETRY_S,
    Cursor,
    InputLag,
    InputReader,
    PrefetchBuffer,
)
from outfitter_service.runtime.input.scope import Scope

log = structlog.get_logger("outfitter.scout")

QUIET_LIMIT = 256
"""Messages of one host that may be ahead in any case: a machine's workers that all begin at once. Beyond that it is its
share of what was decided meanwhile."""

ENTRY_BYTES = 24
"""What a host takes in a checkpoint besides its name."""


class LookAheadBuffer(PrefetchBuffer):
    """Messages read ahead of the input reader in one go, from offset `start` up to `position`. They may be decided once
    everything before `start` is."""

    def __init__(self, start: int, place: Cursor, scope: Scope, *, quiet_limit: int, room: int, most: int) -> None:
        """`place` is followed as it moves on. `quiet_limit` messages of a host may be ahead in any case. `room`: bytes
        that the names of hosts ahead may take in a checkpoint. Further hosts are left to the input reader. `most`:
        messages that are kept at most."""
        super().__init__(most)
        self.start = self.position = start
        self._place = place
        self._scope = scope
        self._quiet_limit = quiet_limit
        self._room = room
        self._left: dict[bytes, int] = {}
        """The last message that was left to the input reader, by host."""
        self._kept: dict[bytes, int] = {}
        """How many messages were kept of each host, since one was left."""
        self._newest: dict[bytes, int] = {}
        """The last message of each host, of those that are followed."""
        self._unknown = -1
        """The last message of a host that there was no room for."""
        for key in place.ahead:
            self._follow(key)

    def see(self, messages: Sequence[Message], position: int) -> None:
        """Take in what comes next, up to `position`: keep it or leave it."""
        self.put([message for message in messages if self._keeps(message)])
        self.position = position

    def _keeps(self, message: Message) -> bool:
        key, place = message.key, self._place
        if key is None or not self._scope.serves(message):
            return False  # the input reader's, all of them
        if not self._follow(key):
            self._unknown = message.offset
            return False
        self._newest[key] = message.offset
        if message.offset < place.heard(key):
            return False  # it is decided for good
        left = self._left.get(key)
        if left is not None:
            if left >= place.position:
                self._left[key] = message.offset
                return False
            # the input reader has been there: what comes now is the host's next message
            del self._left[key]
            self._kept[key] = 0
        kept = self._kept[key]
        if kept >= self._quiet_limit and kept * len(self._kept) > place.position - self.start:
            self._left[key] = message.offset
            return False
        self._kept[key] = kept + 1
        return True

    def heard(self, host: bytes) -> int:
        """The offset before which everything is decided that `host` said: what it is silent in counts as well."""
        place = self._place
        heard = place.heard(host)
        newest = self._newest.get(host, -1) if host in self._kept else self._unknown
        return max(heard, self.position) if newest < heard and place.position >= self.start else heard

    def _follow(self, key: bytes) -> bool:
        """Whether a host's messages are looked at; a host that there was no room for stays out."""
        if key not in self._kept:
            size = len(key) + ENTRY_BYTES
            if size > self._room:
                return False
            self._room -= size
            self._kept[key] = 0
        return True


class LookAhead:
    """Reads ahead in one partition's input whenever its input reader does not keep up. `lookahead_buffer` has the
    messages; None: the input reader has all there are."""

    def __init__(
        self,
        assignment: Assignment,
        input_reader: InputReader,
        *,
        wake: Callable[[], None],
        quiet_limit: int = QUIET_LIMIT,
    ) -> None:
        """`wake` is called when there is something to decide. `quiet_limit`: messages of one host that may be ahead in
        any case."""
        self._assignment = assignment
        self._input_reader = input_reader
        self._wake = wake
        self._quiet_limit = quiet_limit
        self._place = Cursor(topic_id="", position=0)
        self._room = 0
        self._rests_until = 0
        self.lookahead_buffer: LookAheadBuffer | None = None

    def reset(self, place: Cursor, *, room: int | None = None) -> None:
        """Forget what was seen; what comes is ahead of `place`, and takes at most `room` (as it was, if left out)."""
        self._end()
        self._place = place
        self._room = self._room if room is None else room

    def heard(self, host: str) -> int:
        """The offset before which everything is decided that `host` said, as far as is known."""
        key = host.encode()
        return self._place.heard(key) if self.lookahead_buffer is None else self.lookahead_buffer.heard(key)

    def give_back(self, messages: Sequence[Message]) -> None:
        """What was taken comes first again, its commit having failed; the input reader has by now what an
        earlier buffer had seen."""
        lookahead_buffer = self.lookahead_buffer
        if lookahead_buffer is not None:
            lookahead_buffer.give_back([message for message in messages if message.offset >= lookahead_buffer.start])

    def rest(self, *, until: int) -> None:
        """Leave everything before `until` to the input reader: what is looked ahead to would come again and again."""
        self._rests_until = until

    async def run(self) -> None:
        """Look ahead whenever there is need to, until cancelled."""
        while True:
            await self._input_reader.overflow()
            if self._input_reader.position < self._rests_until:
                await anyio.sleep(RETRY_S)
                continue
            lookahead_buffer = self.lookahead_buffer = LookAheadBuffer(
                self._input_reader.position,
                self._place,
                self._assignment.scope,
                quiet_limit=self._quiet_limit,
                room=self._room,
                most=READ_AHEAD,
            )
            while self.lookahead_buffer is lookahead_buffer:
                try:
                    async with await self._assignment.open_input(lookahead_buffer.position) as reader:
                        await self._look(lookahead_buffer, reader)
                except BusError as error:
                    # the input reader meets it as well: what has to be done about it is done there
                    log.debug("cannot look ahead", partition=self._assignment.partition, error=str(error))
                    await anyio.sleep(RETRY_S)

    async def _look(self, lookahead_buffer: LookAheadBuffer, reader: Reader) -> None:
        """Read on until the input reader has caught up."""
        input_reader = self._input_reader
        while self.lookahead_buffer is lookahead_buffer:
            await lookahead_buffer.room()
            lookahead_buffer.see(await reader.fetch(max_records=READ_AHEAD, timeout=1.0), reader.position)
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
    """The two windows on one partition's input: what is decided in turn, and what may be decided before. `lag`: how far
    both are from its end."""

    reader: InputReader
    lookahead: LookAhead
    lag: InputLag

    def reset(self, cursor: Cursor, *, room: int | None = None) -> None:
        """Forget what was read and go on at `cursor`; `room` as in `LookAhead.reset`."""
        self.reader.reset(cursor.position)
        self.lookahead.reset(cursor, room=room)
        self.lag.reset(cursor.position)

    def give_back(self, messages: Sequence[Message], looked_ahead: Sequence[Message]) -> None:
        """What was taken from each window comes first again: its commit failed."""
        self.reader.give_back(messages)
        self.lookahead.give_back(looked_ahead)

    def clear(self) -> None:
        """Hold nothing any more."""
        self.reader.clear()
        self.lookahead.reset(Cursor(topic_id="", position=0))
