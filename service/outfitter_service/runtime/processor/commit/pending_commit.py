"""One commit, open or under way: its decisions and their events. If it fails, the events are decided again."""

from __future__ import annotations

from msgspec import UNSET, Struct

from outfitter_proto.bus import BusError, Message
from outfitter_proto.records import InputPosition
from outfitter_service.core import model as m
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.processor.commit.batch import Batch


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
    including those that were decided before; messages of other scopes are dropped. `opening`: it is the first commit of
    the tenure. `sealed`: what is fixed since its completion; the default until then. `done`: the bus has answered,
    after so many `seconds`. `trouble`: why the commit failed, or None."""

    batch: Batch
    position: int
    ahead: dict[bytes, int]
    internal: list[m.Event] = []
    messages: list[Message] = []
    looked_ahead: list[Message] = []
    opening: bool = False
    sealed: Sealed = Sealed()
    done: bool = False
    trouble: BusError | None = None
    seconds: float = 0.0

    def decide_event(self, event: m.Event) -> bool:
        """Decide an internal event. Returns False if it has no room."""
        if self.batch.decide(event) is None:
            return False
        self.internal.append(event)
        return True

    def decide_in_turn(self, message: Message, scope: Scope) -> bool:
        """Decide the input's next message, unless it was decided before its turn. Returns False if it has no room."""
        ahead = self.ahead
        is_decided = ahead and message.offset < ahead.get(message.key or b"", 0)
        if is_decided or self._decide(message, scope):
            self.messages.append(message)
        elif self.batch.is_full:
            return False
        self.position = message.offset + 1
        return True

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

    def has_room(self, most_events: int) -> bool:
        """Whether more may be decided for this commit, which has at most so many events."""
        batch, output = self.batch, self.batch.output
        has_bytes = output.ledger_bytes < batch.full and output.history_bytes < batch.rules.max_bytes
        return has_bytes and not batch.is_full and batch.events < most_events

    def _decide(self, message: Message, scope: Scope) -> bool:
        """Decide a message if it belongs to this processor and has room. Returns whether it was decided."""
        if scope.serves(message):
            return self.batch.message(message)
        if (reason := scope.refusal(message)) is None:
            return False
        self.batch.refuse(message, reason)
        return True

    def decide_ahead(self, lookahead_buffer: LookAheadBuffer, scope: Scope) -> bool:
        """Decide the look-ahead's next message before its turn. Each source skips messages that were decided from the
        other one, but keeps them in this commit: if it fails, both sources get them back. Returns False if the message
        has no room."""
        message = lookahead_buffer.pop()
        if message.offset >= self.position:
            if not self._decide(message, scope) and self.batch.is_full:
                lookahead_buffer.give_back([message])
                return False
            self.ahead[message.key or b""] = message.offset + 1
        self.looked_ahead.append(message)
        return True

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
