"""Owners' deaths that the manager has seen and not judged yet.

The kernel reports a death before the bus delivers the worker's last messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock

LAST_WORDS_S = 5.0
"""The most seconds that a death waits for the worker's last messages if the bus is away or the input piles up. To free
the device matters more than the exact reason of the end."""


class Death(Struct):
    """An owner's death."""

    detail: str
    """How the manager knows of it."""
    seen_at: float
    """When it saw the death, in monotonic seconds."""
    end: int | None = None
    """The input's end offset, sampled after that; None: not sampled yet."""


class OwnerDeaths:
    """Deaths by allocation key."""

    def __init__(self, clock: Clock, *, suspect: Callable[[], None]) -> None:
        """`suspect` is called when a death needs a sample of the input's end."""
        self._now = clock.monotonic
        self._suspect = suspect
        self._deaths: dict[AllocationKey, Death] = {}

    def __contains__(self, key: AllocationKey) -> bool:
        return key in self._deaths

    def __len__(self) -> int:
        return len(self._deaths)

    def keys(self) -> set[AllocationKey]:
        """The allocations whose owners are dead."""
        return set(self._deaths)

    def seen(self, key: AllocationKey, detail: str) -> None:
        """The allocation's owner is dead. `detail`: the proof."""
        if key not in self._deaths:
            self._deaths[key] = Death(detail, self._now())
            self._suspect()

    def forget(self, keys: Iterable[AllocationKey]) -> None:
        """Drop the deaths of these allocations: they have ended, or their deaths are queued."""
        for key in keys:
            self._deaths.pop(key, None)

    def clear(self) -> None:
        """Drop all deaths."""
        self._deaths.clear()

    def unsampled(self) -> list[Death]:
        """The deaths without a sample of the input's end."""
        return [death for death in self._deaths.values() if death.end is None]

    def sampled(self, deaths: Collection[Death], end: int) -> None:
        """The input ended at this offset after these deaths were seen."""
        for death in deaths:
            death.end = end

    def sample_again(self) -> None:
        """The input could not be read for a while: sample its end again for each death."""
        for death in self._deaths.values():
            death.end = None
            self._suspect()

    def judged(self, position: int) -> list[m.OwnerDied]:
        """Remove and return the deaths that can be judged once everything before `position` is decided."""
        if not self._deaths:
            return []
        late = self._now() - LAST_WORDS_S
        judged = [
            m.OwnerDied(allocation=key, detail=death.detail)
            for key, death in self._deaths.items()
            if death.seen_at <= late or (death.end is not None and position >= death.end)
        ]
        self.forget(event.allocation for event in judged)
        return judged
