"""How much goes into one commit: as much as piled up, until one was too large; then smaller and smaller pieces.

A commit that the bus refuses for its size is taken back and tried again with fewer events, then with less than the bus
has promised to take, so that the core cuts one event's effects into smaller pieces and finds out whose grant is too
large. What cannot be committed even so stands alone.
"""

from __future__ import annotations

KEPT_BACK = 16
"""Such a part of a commit is for what stands beside decisions: the checkpoint, half of it for hosts that are ahead, and
the reason for which a grant ends that has all the rest."""
FILL = 0.8
"""How full of the largest possible ledger batch a commit is made: the next event's output must still fit."""
SMALLEST_BYTES = 4096
"""Less is in no commit: a record without devices takes some hundred."""


class BatchLimits:
    """`records`: events in a commit at most. `max_bytes`: what one event may write, see `Rules`. `rejected_offset`: the
    offset of a message that is refused, since the answer to it is too large by itself. `full` and `history_bytes`: from
    so many bytes in the ledger's batch, and in history's, a commit has no room for more."""

    def __init__(self, *, records: int, max_bytes: int) -> None:
        self._most = (records, max_bytes)
        self.records, self.max_bytes = self._most
        self.rejected_offset: int | None = None
        self._small_until: int | None = None
        self._refused_bytes: int | None = None
        self.full = max_bytes * FILL
        self.history_bytes = max_bytes

    @property
    def whole(self) -> bool:
        """Effects are not cut smaller than usual."""
        return self.max_bytes == self._most[1]

    def take(self, batch_bytes: int) -> None:
        """The bus takes so many bytes with one commit, as far as it says."""
        self.full = batch_bytes * FILL
        self.history_bytes = batch_bytes  # in one batch: a second one waits for the first
        most = batch_bytes - batch_bytes // KEPT_BACK
        self._most = (self._most[0], most)
        self.max_bytes = most if self._small_until is None else min(self.max_bytes, most)

    def shrink(self, events: int, size: int) -> bool:
        """A commit of so many events and bytes was too large: less from now on. False if that would not help."""
        if self.records > 1:
            self.records = max(1, min(self.records, events) // 2)
        elif self._refused_bytes is None or size < self._refused_bytes * 9 // 10:
            self._refused_bytes = size
            self.max_bytes = max(SMALLEST_BYTES, min(self.max_bytes, size) // 2)
        else:
            return False  # the event's own record: with a lower bound it was as large as before
        return True

    def refuse(self, offset: int) -> bool:
        """The message at `offset` is too large by itself. False if it was refused already, and that did not help."""
        news = self.rejected_offset != offset
        self.rejected_offset = offset
        return news

    def stay_small(self, *, until: int) -> None:
        """What was too large comes again, in the input before `until`, behind what is observed anew."""
        self._small_until = max(until, self._small_until or 0)

    def grow(self, position: int, *, idle: bool) -> None:
        """A commit succeeded, up to `position`: back to the usual size, once what was too large is through. `idle`: no
        event of the manager's own waits, or is decided and not committed."""
        if self._small_until is None or (position >= self._small_until and idle):
            self._small_until = self._refused_bytes = None
            self.records, self.max_bytes = self._most

    def forget(self) -> None:
        """The input began again: positions of before mean nothing now."""
        self._small_until = self._refused_bytes = None
        self.rejected_offset = None
