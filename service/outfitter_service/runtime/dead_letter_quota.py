"""Quotas of dead letters: so many of one host are written per minute, and the rest is counted.

A client can write bad registrations faster than anybody would read about them. When its minute is over, one letter
sums up the messages beyond the quota: the first of them, with their number. Invalid messages have a quota of their own,
because nobody waits for an answer to them: garbage must not use up the letters that tell workers why they are refused.

Naming unknown fields takes as long as finding faults, and has a quota of its own: a worker that misspells a field in
each heartbeat must not use up its host's dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from outfitter_proto.records import DeadLetter

A_MINUTE = 100
"""Dead letters of one host and kind that are written within `WINDOW_S`."""
WINDOW_S = 60.0

Payer = str | tuple[str, bool]
"""The owner of a quota: a host's name and whether its messages were valid, or another name."""


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
            f"{self.count} messages before offset {self.until} were refused, beyond the {A_MINUTE} a minute "
            f"that have a dead letter each. This is the first one: {self.first.reason}"
        )
        return structs.replace(self.first, reason=reason, count=self.count, until=self.until)


class _Window(Struct):
    """A payer's minute, which is `over_at` monotonic seconds: letters `written` in it, messages `omitted`."""

    over_at: float
    written: int = 0
    omitted: Omitted | None = None


class DeadLetterQuota:
    """The quotas of one writer. Unknown hosts share their quotas, under an empty name."""

    def __init__(self, clock: Callable[[], float], *, most: int = A_MINUTE) -> None:
        """`clock`: monotonic seconds. `most`: letters of one payer within `WINDOW_S`."""
        self._clock = clock
        self._most = most
        self._windows: dict[Payer, _Window] = {}
        self.spent: set[Payer] = set()
        """The owners with nothing left now."""

    def use(self, payer: Payer) -> bool:
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
        """So many letters were not written after all, because their commit failed."""
        for payer, count in taken.items():
            if (window := self._windows.get(payer)) is not None:
                window.written = max(0, window.written - count)
                self.spent.discard(payer)

    def omit(self, payer: Payer, omitted: Omitted) -> None:
        """These messages were refused without a letter."""
        window = self._windows.setdefault(payer, _Window(0.0))
        window.omitted = omitted if window.omitted is None else window.omitted.with_more(omitted)

    def due(self, *, all_of_them: bool = False) -> dict[Payer, Omitted]:
        """The omitted messages of the minutes that are over. Starts the next minutes."""
        now = self._clock()
        over = [payer for payer, window in self._windows.items() if all_of_them or window.over_at <= now]
        self.spent.difference_update(over)
        ended = {payer: self._windows.pop(payer).omitted for payer in over}
        return {payer: omitted for payer, omitted in ended.items() if omitted is not None}


class Quotas(Struct, frozen=True):
    """One writer's quotas: of `letters`, and of messages whose unknown fields are named (`naming`)."""

    letters: DeadLetterQuota
    naming: DeadLetterQuota
