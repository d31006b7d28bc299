"""Events that could not be decided or committed, for another try: nothing says them twice, and their record waits.

Levels (inventories, leases, time) are observed again by themselves and do not come here. Each event is tried again
once in `AGAIN_S`, so that one that never succeeds costs a line of the log each time and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock

AGAIN_S = 30.0


class Retries:
    """The events kept for later, each once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_at: dict[m.Event, float] = {}

    def __iter__(self) -> Iterator[m.Event]:
        return iter(self._due_at)

    def keep(self, event: m.Event) -> None:
        """Keep an event if it is one that nothing says again."""
        if isinstance(event, m.OwnerDied | m.OwnerUnwatched | m.Prepared | m.Unprepared | m.DriverRetry):
            self._due_at[event] = self._clock.monotonic() + AGAIN_S

    def due(self) -> list[m.Event]:
        """Hand out those whose time has come: who fails once more is to be kept once more."""
        now = self._clock.monotonic()
        found = [event for event, at in self._due_at.items() if at <= now]
        for event in found:
            del self._due_at[event]
        return found


def edges(queued: Iterable[m.Event], aside: Iterable[m.Event]) -> deque[m.Event]:
    """What is not observed anew when the partition is taken anew: each death once, however often it was seen
    meanwhile, and not while it is set `aside`."""
    deaths = {event.allocation for event in aside if isinstance(event, m.OwnerDied)}
    kept: dict[object, m.Event] = {}
    for event in queued:
        if isinstance(event, m.OwnerDied):
            if event.allocation not in deaths:
                kept.setdefault((m.OwnerDied, event.allocation), event)
        elif not isinstance(event, m.DriverReport | m.Reschedule | m.LeaseExpired | m.OwnerUnwatched | m.Tick):
            kept[event] = event
    return deque(kept.values())
