"""The last changes of the model, for readers of the event stream.

A reader has the id of the last event that it got. It gets all later ones, or learns that some are no longer here. The
log has a name of its own in each id, because another log (after a restart) counts other changes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import anyio
from msgspec import Struct

MOST_EVENTS = 20_000
"""Most events that are kept."""
MOST_BYTES = 16 * 1024 * 1024
"""Most bytes of events that are kept, as they are sent. One event is always kept."""


class Event(Struct, frozen=True, gc=False):
    """One change."""

    sequence: int
    """Its number."""
    kind: str
    """The kind of the changed record."""
    host: str | None
    """The host that it is about, if any."""
    wire: bytes
    """Its bytes in the stream."""


class EventLog:
    """The last events."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or secrets.token_hex(6)
        """Distinguishes this log's ids from those of others."""
        self.last = 0
        """The last event's number."""
        self.changed_at: float | None = None
        """When it was added, in seconds since the epoch; None: there was none yet."""
        self.is_closed = False
        """Its model is shown no more, so that readers begin anew."""
        self._events: dict[int, Event] = {}
        """By number, without gaps."""
        self._bytes = 0
        self._changed = anyio.Event()

    def add(self, kind: str, host: str | None, data: bytes) -> None:
        """Add an event. `data`: JSON without line feeds."""
        self.last += 1
        self.changed_at = time.time()
        wire = b"id: %s\nevent: %s\ndata: %s\n\n" % (self.id_of(self.last).encode(), kind.encode(), data)
        self._events[self.last] = Event(self.last, kind, host, wire)
        self._bytes += len(wire)
        while len(self._events) > MOST_EVENTS or (self._bytes > MOST_BYTES and len(self._events) > 1):
            oldest = self._events.pop(self.last - len(self._events) + 1)
            self._bytes -= len(oldest.wire)
        self._wake()

    def close(self) -> None:
        """Wake all readers for good."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def id_of(self, sequence: int) -> str:
        """The id of the event with this number, on the wire."""
        return f"{self.name}-{sequence}"

    @property
    def last_id(self) -> str:
        """The id of the last event. Whoever has read the model has seen all events up to this one."""
        return self.id_of(self.last)

    def sequence_of(self, event_id: str) -> int | None:
        """The number of an event, if all later ones are still here; else None."""
        name, _, number = event_id.rpartition("-")
        if name != self.name or not (number.isascii() and number.isdigit()) or len(number) > 18:
            return None
        return int(number) if self.has_all_after(int(number)) else None

    def has_all_after(self, sequence: int) -> bool:
        """Whether all events after this number are still here."""
        return self.last - len(self._events) <= sequence <= self.last

    def after(self, sequence: int, most: int, most_bytes: int = MOST_BYTES) -> Sequence[Event]:
        """The first events after this number: at most `most` with `most_bytes` in all, but one at least.
        `has_all_after` must be true."""
        found: list[Event] = []
        for number in range(sequence + 1, min(self.last, sequence + most) + 1):
            most_bytes -= len(self._events[number].wire)
            if found and most_bytes < 0:
                break
            found.append(self._events[number])
        return found

    async def wait(self, sequence: int) -> None:
        """Wait for an event after this number, or for the end of the log."""
        while self.last <= sequence and not self.is_closed:
            await self._changed.wait()
