"""Deaths of owners that have been seen and not been judged.

The kernel tells a death sooner than the bus tells what the worker's last words were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock

LAST_WORDS_S = 5.0
"""How long a death waits at most for what was said before it, where the bus is away or the input piles up: the device
is worth more than the right word for the end."""


class Death(Struct):
    """An owner's death, `seen_at` monotonic seconds; `detail` says why it is known. `end`: the input's end offset,
    sampled since the death was seen."""

    detail: str
    seen_at: float
    end: int | None = None


class OwnerDeaths:
    """Deaths by allocation key."""

    def __init__(self, clock: Clock, *, suspect: Callable[[], None]) -> None:
        """`suspect` is called when the input's end is to be sampled for a death."""
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
        """The allocation's owner is dead; `detail` says why that is known."""
        if key not in self._deaths:
            self._deaths[key] = Death(detail, self._now())
            self._suspect()

    def forget(self, keys: Iterable[AllocationKey]) -> None:
        """These allocations are over, or their deaths were handed out."""
        for key in keys:
            self._deaths.pop(key, None)

    def clear(self) -> None:
        """Nobody is dead any more."""
        self._deaths.clear()

    def unsampled(self) -> list[Death]:
        """The deaths since which the input's end was not sampled."""
        return [death for death in self._deaths.values() if death.end is None]

    def sampled(self, deaths: Collection[Death], end: int) -> None:
        """The input ended at this offset after these deaths were seen."""
        for death in deaths:
            death.end = end

    def listen_anew(self) -> None:
        """Nobody could be heard for a while: what was said before each death is listened for anew."""
        for death in self._deaths.values():
            death.end = None
            self._suspect()

    def judged(self, position: int) -> list[m.OwnerDied]:
        """Hand out the deaths that can be judged with everything before `position` decided."""
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
