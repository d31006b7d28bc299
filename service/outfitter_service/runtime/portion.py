"""How much goes into one commit: as much as piled up, until one was too large; then smaller and smaller pieces.

A commit that the bus refuses for its size is taken back and tried again with fewer events, then with smaller
pieces of one event's effects, until what cannot be committed at all stands alone.
"""

from __future__ import annotations


class Portion:
    """`records`: events in a commit at most. `chunk`: allocations that one event may change, see `Rules.chunk`.
    `indigestible`: the offset of a message that is refused, since the answer to it is too large by itself."""

    def __init__(self, *, records: int, chunk: int) -> None:
        self._most = (records, chunk)
        self.records, self.chunk = self._most
        self.indigestible: int | None = None
        self._small_until: int | None = None

    @property
    def whole(self) -> bool:
        """Effects are not cut smaller than usual."""
        return self.chunk == self._most[1]

    def shrink(self, events: int) -> bool:
        """A commit of so many events was too large: less from now on. False if it cannot be less."""
        if self.records > 1:
            self.records = max(1, min(self.records, events) // 2)
        elif self.chunk > 1:
            self.chunk = max(1, self.chunk // 8)
        else:
            return False
        return True

    def refuse(self, offset: int) -> bool:
        """The message at `offset` is too large by itself. False if it was refused already, and that did not help."""
        news = self.indigestible != offset
        self.indigestible = offset
        return news

    def stay_small(self, *, until: int) -> None:
        """What was too large comes again, in the input before `until`, behind what is observed anew."""
        self._small_until = max(until, self._small_until or 0)

    def grow(self, position: int, *, idle: bool) -> None:
        """A commit succeeded, up to `position`: back to the usual size, once what was too large is through."""
        if self._small_until is None or (position >= self._small_until and idle):
            self._small_until = None
            self.records, self.chunk = self._most

    def forget(self) -> None:
        """The input began again: positions of before mean nothing now."""
        self._small_until = None
        self.indigestible = None
