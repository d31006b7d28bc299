"""Quotas of dead letters: the manager writes a limited number for each host and minute, and counts the rest.

A client can write bad registrations faster than people can read about them. When its minute is over, one letter sums up
the messages beyond the quota: it has the first of them, and their number. Invalid messages have a quota of their own,
because nobody waits for an answer to them. So they do not use up the letters that tell workers why they are refused.

To name unknown fields takes as long as to find faults, and has a quota of its own. So a worker that misspells a field
in each heartbeat does not use up its host's dead letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from outfitter_proto.records import DeadLetter

A_MINUTE = 100
"""Dead letters of one host and kind that are written within `WINDOW_S`."""
WINDOW_S = 60.0
"""Seconds for which a quota lasts."""

Payer = str | tuple[str, bool]
"""The owner of a quota: a host's name and whether its messages were valid, or another name."""


class Omitted(Struct, kw_only=True, frozen=True, gc=False):
    """Messages without a dead letter of their own."""

    first: DeadLetter
    """The letter that the first message would have had."""
    until: int
    """The offset after the last message."""
    count: int = 1
    """The number of messages."""

    def with_one(self, offset: int) -> Omitted:
        """A copy with the message at `offset` added."""
        return structs.replace(self, until=offset + 1, count=self.count + 1)

    def with_more(self, more: Omitted) -> Omitted:
        """A copy with later messages added."""
        return structs.replace(self, until=max(self.until, more.until), count=self.count + more.count)

    def summary(self) -> DeadLetter:
        """One dead letter for all of them."""
        reason = (
            f"{self.count} messages before offset {self.until} were refused, beyond the {A_MINUTE} a minute "
            f"that have a dead letter each. This is the first one: {self.first.reason}"
        )
        return structs.replace(self.first, reason=reason, count=self.count, until=self.until)


class _Window(Struct):
    """A payer's minute."""

    over_at: float
    """Its end in monotonic seconds."""
    written: int = 0
    """Letters in it."""
    omitted: Omitted | None = None
    """Messages beyond the quota."""


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
        """Use one letter of the quota. Returns False if nothing is left."""
        window = self._windows.get(payer)
        if window is None:
            window = self._windows[payer] = _Window(self._clock() + WINDOW_S)
        if window.written >= self._most:
            return False
        window.written += 1
        if window.written >= self._most:
            self.spent.add(payer)
        return True

    def refund(self, used: Mapping[Payer, int]) -> None:
        """So many letters were not written after all, because their commit failed."""
        for payer, count in used.items():
            if (window := self._windows.get(payer)) is not None:
                window.written = max(0, window.written - count)
                self.spent.discard(payer)

    def omit(self, payer: Payer, omitted: Omitted) -> None:
        """These messages were refused without a letter."""
        window = self._windows.setdefault(payer, _Window(0.0))
        window.omitted = omitted if window.omitted is None else window.omitted.with_more(omitted)

    def due(self, *, all_of_them: bool = False) -> dict[Payer, Omitted]:
        """End the minutes that are over (`all_of_them`: every minute). Returns their omitted messages."""
        now = self._clock()
        payers = [payer for payer, window in self._windows.items() if all_of_them or window.over_at <= now]
        self.spent.difference_update(payers)
        omitted_by_payer = {payer: self._windows.pop(payer).omitted for payer in payers}
        return {payer: omitted for payer, omitted in omitted_by_payer.items() if omitted is not None}
