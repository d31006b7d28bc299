"""One commit in the making, or under way: its decisions, and what led to them, to be decided again if it fails."""

from __future__ import annotations

from msgspec import UNSET, Struct

from outfitter_proto.bus import BusError, Message
from outfitter_proto.records import InputPosition
from outfitter_service.core import model as m
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.processor.commit.batch import Batch
from outfitter_service.runtime.processor.commit.batch_limits import BatchLimits


class Sealed(Struct, frozen=True, kw_only=True):
    """What is known of a commit once nothing more is decided in it. `notes`: how many of the event queue's notes it
    writes. `stale_positions`: hosts whose queue positions it had to bring up to date. `deaths_left`: deaths by the end
    of an earlier boot are left for later commits. `closing`: it is the last one of the tenure."""

    notes: int = 0
    stale_positions: frozenset[str] = frozenset()
    deaths_left: bool = False
    closing: bool = False


class PendingCommit(Struct, kw_only=True):
    """It is begun with four fields, and its own methods write the others.

    `batch`: the decisions. `position`: the input's next offset after it; `ahead`: how much further it goes for some
    hosts. `internal`: the manager's own events. `messages` come from the input reader, `looked_ahead` from the
    look-ahead, whether they had been decided before or not; `newest` is the offset of the last decided one. Messages of
    others are not kept. `opening`: it is the first one of the tenure. `done`: the bus has answered, after so many
    `seconds`; `trouble`: why it failed."""

    batch: Batch
    position: int
    ahead: dict[bytes, int]
    internal: list[m.Event] = []
    messages: list[Message] = []
    looked_ahead: list[Message] = []
    newest: int = -1
    opening: bool = False
    sealed: Sealed = Sealed()
    done: bool = False
    trouble: BusError | None = None
    seconds: float = 0.0

    def decide_event(self, event: m.Event) -> None:
        """Decide an event of the manager's own."""
        self.internal.append(event)
        self.batch.decide(event)

    def decide_in_turn(self, message: Message, scope: Scope, batch_limits: BatchLimits) -> None:
        """Decide the input's next message, unless it was decided before its turn."""
        self.position = message.offset + 1
        ahead = self.ahead
        if (ahead and message.offset < ahead.get(message.key or b"", 0)) or self.decide(message, scope, batch_limits):
            self.messages.append(message)

    def read_to(self, position: int) -> None:
        """Nothing is left to decide before `position`: what comes before it has holes."""
        self.position = max(self.position, position)

    def seal(self, sealed: Sealed) -> None:
        """Nothing more is decided in it."""
        self.sealed = sealed

    def ended(self, trouble: BusError | None, seconds: float) -> None:
        """The bus has answered after so many seconds: it is written, or it failed for this `trouble`."""
        self.trouble = trouble
        self.seconds = seconds
        self.done = True

    def has_room(self, limits: BatchLimits) -> bool:
        """Whether more may be decided for this commit."""
        output = self.batch.output
        has_bytes = output.ledger_bytes < limits.full and output.history_bytes < limits.history_bytes
        return has_bytes and self.batch.events < limits.records

    def decide(self, message: Message, scope: Scope, batch_limits: BatchLimits) -> bool:
        """Decide a message if it is this processor's; whether it is."""
        if message.offset == batch_limits.rejected_offset:
            self.batch.refuse(message, "the answer to it would be larger than the topics take")
        elif scope.serves(message):
            self.batch.message(message)
        elif (reason := scope.refusal(message)) is not None:
            self.batch.refuse(message, reason)
        else:
            return False
        self.newest = message.offset
        return True

    def decide_ahead(self, lookahead_buffer: LookAheadBuffer, scope: Scope, batch_limits: BatchLimits) -> None:
        """Decide the look-ahead's next message before its turn. Each source passes over what was decided from the
        other one, and keeps it all the same: if this commit fails, both come again as they were."""
        message = lookahead_buffer.take()
        self.looked_ahead.append(message)
        if message.offset >= self.position:
            self.decide(message, scope, batch_limits)
            self.ahead[message.key or b""] = message.offset + 1

    def reading(self, place: Cursor, partition: int, since: int) -> InputPosition:
        """What this commit says of the input, of which it has read from `since` on."""
        ahead = {key.decode(): offset for key, offset in self.ahead.items() if offset > self.position}
        return InputPosition(
            topic_id=place.topic_id,
            partition=partition,
            from_=since,
            to=self.position,
            base=place.base or UNSET,
            begin=place.begin or UNSET,
            ahead=ahead or UNSET,
        )
