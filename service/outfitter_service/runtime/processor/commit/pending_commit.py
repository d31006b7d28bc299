"""One commit, open or under way: its decisions and their events. If it fails, the events are decided again."""

from __future__ import annotations

from contextlib import suppress

from msgspec import UNSET, Struct

from outfitter_proto.bus import BusError, Message
from outfitter_proto.codec import WireError, decode_registration
from outfitter_proto.records import Deregister, InputPosition
from outfitter_service.core import model as m
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.processor.commit.batch import Batch
from outfitter_service.runtime.processor.commit.batch_limits import BatchLimits


class Sealed(Struct, frozen=True, kw_only=True):
    """What is fixed when a commit is completed. `notes`: how many of the event queue's notes it writes.
    `stale_positions`: hosts whose queue positions it had to refresh. `deaths_left`: later commits have more deaths by
    the end of an earlier boot. `closing`: it is the last commit of the tenure."""

    notes: int = 0
    stale_positions: frozenset[str] = frozenset()
    deaths_left: bool = False
    closing: bool = False


class PendingCommit(Struct, kw_only=True):
    """It is begun with four fields, and its own methods write the others.

    `batch`: the decisions. `position`: the input's next offset after them; `ahead`: the same for hosts that are ahead.
    `internal`: the manager's own events. `messages` come from the input reader, `looked_ahead` from the look-ahead,
    including those that were decided before; messages of other scopes are dropped. `newest`: the offset of the last
    decided message. `opening`: it is the first commit of the tenure. `sealed`: what is fixed since its completion; the
    default until then. `done`: the bus has answered, after so many `seconds`. `trouble`: why the commit failed, or
    None."""

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
        """Decide an internal event."""
        self.internal.append(event)
        self.batch.decide(event)

    def decide_in_turn(self, message: Message, scope: Scope, batch_limits: BatchLimits) -> None:
        """Decide the input's next message, unless it was decided before its turn."""
        self.position = message.offset + 1
        ahead = self.ahead
        if (ahead and message.offset < ahead.get(message.key or b"", 0)) or self.decide(message, scope, batch_limits):
            self.messages.append(message)

    def read_to(self, position: int) -> None:
        """All messages before `position` are decided. The offsets before it may have gaps."""
        self.position = max(self.position, position)

    def seal(self, sealed: Sealed) -> None:
        """Complete the commit: nothing more is decided in it."""
        self.sealed = sealed

    def ended(self, trouble: BusError | None, seconds: float) -> None:
        """The bus has answered after so many seconds. The commit is written, or it failed with this `trouble`."""
        self.trouble = trouble
        self.seconds = seconds
        self.done = True

    def has_room(self, limits: BatchLimits) -> bool:
        """Whether more may be decided for this commit."""
        output = self.batch.output
        has_bytes = output.ledger_bytes < limits.full and output.history_bytes < limits.history_bytes
        return has_bytes and self.batch.events < limits.records

    def decide(self, message: Message, scope: Scope, batch_limits: BatchLimits) -> bool:
        """Decide a message if it belongs to this processor. Returns whether it does."""
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
        """Decide the look-ahead's next message before its turn. Each source skips messages that were decided from the
        other one, but keeps them in this commit: if it fails, both sources get them back."""
        message = lookahead_buffer.pop()
        self.looked_ahead.append(message)
        if message.offset >= self.position:
            self.decide(message, scope, batch_limits)
            self.ahead[message.key or b""] = message.offset + 1

    @property
    def deregisters(self) -> bool:
        """Whether the last decided message is a deregistration, which must not become a dead letter for its size."""
        for message in (*self.messages[-1:], *self.looked_ahead[-1:]):
            if message.offset == self.newest:
                with suppress(WireError):
                    return isinstance(decode_registration(message.value, key=message.key), Deregister)
        return False

    def input_position(self, cursor: Cursor, partition: int, since: int) -> InputPosition:
        """The input position for the checkpoint. `since`: the offset from which on the commit has read the input."""
        ahead = {key.decode(): offset for key, offset in self.ahead.items() if offset > self.position}
        return InputPosition(
            topic_id=cursor.topic_id,
            partition=partition,
            from_=since,
            to=self.position,
            base=cursor.base or UNSET,
            begin=cursor.begin or UNSET,
            ahead=ahead or UNSET,
        )
