"""Dead letters have quotas: so many of one host are written down a minute, and the rest is counted.

Whoever can write registrations can write bad ones, faster than anybody would read of them. What is beyond the quota
is told in one letter when its minute is over: the first one of them, with their number. It knows no reasons. What
cannot be understood has a quota of its own, because nobody waits for an answer to it: garbage must not take the
letters that tell workers why they are refused.

Naming the unknown fields of messages, which takes as long as finding faults, has a quota of its own: a worker that
misspells a field in each heartbeat must not cost its host's dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from outfitter_proto.records import DeadLetter

A_MINUTE = 100
"""Dead letters of one host, and of one kind, that are written down within `WINDOW_S`."""
WINDOW_S = 60.0

Payer = str | tuple[str, bool]
"""Whose quota it is: a host's name with whether its messages were understood, or another name."""


class Omitted(Struct, kw_only=True, frozen=True, gc=False):
    """Messages without a dead letter of their own. `first`: the letter that the first of them would have had; `until`:
    the offset after the last; `count`: how many they are."""

    first: DeadLetter
    until: int
    count: int = 1

    def with_one(self, offset: int) -> Omitted:
        return structs.replace(self, until=offset + 1, count=self.count + 1)

    def with_more(self, more: Omitted) -> Omitted:
        return structs.replace(self, until=max(self.until, more.until), count=self.count + more.count)

    def summary(self) -> DeadLetter:
        """One dead letter for all of them."""
        reason = (
            f"{self.count} messages before offset {self.until}, of which this is the first, were refused beyond the "
            f"{A_MINUTE} a minute that have a dead letter each: {self.first.reason}"
        )
        return structs.replace(self.first, reason=reason, count=self.count, until=self.until)


class _Window(Struct):
    """A payer's minute, which is `over_at` monotonic seconds: letters `written` in it, messages `omitted`."""

    over_at: float
    written: int = 0
    omitted: Omitted | None = None


class DeadLetterQuota:
    """The dead letters of one writer. Those of hosts that it does not know share their quotas, under an empty name."""

    def __init__(self, clock: Callable[[], float], *, most: int = A_MINUTE) -> None:
        """`clock` tells seconds that only grow. `most`: letters of one payer within `WINDOW_S`."""
        self._clock = clock
        self._most = most
        self._windows: dict[Payer, _Window] = {}
        self.spent: set[Payer] = set()
        """Those for whom nothing is left now: to look whether there are any costs nothing."""

    def take(self, payer: Payer) -> bool:
        """Whether one more letter may be written now."""
        window = self._windows.get(payer)
        if window is None:
            window = self._windows[payer] = _Window(self._clock() + WINDOW_S)
        if window.written >= self._most:
            return False
        window.written += 1
        if window.written >= self._most:
            self.spent.add(payer)
        return True

    def give_back(self, taken: Mapping[Payer, int]) -> None:
        """So many letters were not written after all."""
        for payer, count in taken.items():
            if (window := self._windows.get(payer)) is not None:
                window.written = max(0, window.written - count)
                self.spent.discard(payer)

    def omit(self, payer: Payer, omitted: Omitted) -> None:
        """These were refused and not written down."""
        window = self._windows.setdefault(payer, _Window(0.0))
        window.omitted = omitted if window.omitted is None else window.omitted.with_more(omitted)

    def due(self, *, all_of_them: bool = False) -> dict[Payer, Omitted]:
        """What was omitted in the minutes that are over; those begin anew."""
        now = self._clock()
        over = [payer for payer, window in self._windows.items() if all_of_them or window.over_at <= now]
        self.spent.difference_update(over)
        ended = {payer: self._windows.pop(payer).omitted for payer in over}
        return {payer: omitted for payer, omitted in ended.items() if omitted is not None}


class Quotas(Struct, frozen=True):
    """One writer's quotas: of `letters`, and of messages whose unknown fields are named (`naming`)."""

    letters: DeadLetterQuota
    naming: DeadLetterQuota
