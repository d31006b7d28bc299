"""How much goes into one commit: everything that waits, and smaller pieces after a commit was too large.

If the bus refuses a commit for its size, the manager tries it again with fewer events, then with a lower limit of
bytes. By this limit the core divides one event's effects into smaller pieces, and finds the grant that is too large. An
event that cannot be committed even then is alone in its commit. The manager tries it once more, as brief as possible,
before it gives up this one event. It never gives up a deregistration, nor the first commit of a tenure: these wait
until the topics take more.
"""

from __future__ import annotations

from outfitter_proto.bus import TooLargeError

RESERVED_SHARE = 16
"""One part in so many of a commit is reserved. It holds the checkpoint, half of which may be hosts that are ahead, and
the final reason of a grant that fills all the rest."""
FILL = 0.8
"""A commit fills this part of the largest possible ledger batch, so that the next event's output still fits."""
SMALLEST_BYTES = 4096
"""The lowest limit of bytes: a record without devices takes some hundred bytes."""


class BatchLimits:
    """The current limits. `records`: most events in a commit. `max_bytes`: most bytes of one event, see `Rules`.
    `brief`: see `Rules`. `rejected_offset`: the message that is refused because its answer alone is too large. `full`
    and `history_bytes`: a commit with so many bytes in the ledger's batch, or in history's, has no room for more.
    `shortage`: the topics take less than the smallest commit of what comes next; None: nothing waits for that."""

    def __init__(self, *, records: int, max_bytes: int) -> None:
        self._most = (records, max_bytes)
        self.records, self.max_bytes = self._most
        self.brief = False
        self.rejected_offset: int | None = None
        self.shortage: TooLargeError | None = None
        self._small_until: int | None = None
        self._refused_bytes: int | None = None
        self.full = max_bytes * FILL
        self.history_bytes = max_bytes

    @property
    def is_normal(self) -> bool:
        """Whether effects have their usual size."""
        return self.max_bytes == self._most[1]

    def set_batch_bytes(self, batch_bytes: int) -> None:
        """The bus takes so many bytes in one commit."""
        self.full = batch_bytes * FILL
        self.history_bytes = batch_bytes  # in one batch, because a second one would wait for the first
        most = batch_bytes - batch_bytes // RESERVED_SHARE
        self._most = (self._most[0], most)
        self.max_bytes = most if self._small_until is None else min(self.max_bytes, most)

    def shrink(self, events: int, size: int) -> bool:
        """A commit of so many events and bytes was too large: allow less. Returns False if that would not help."""
        if self.records > 1:
            self.records = max(1, min(self.records, events) // 2)
        elif self._refused_bytes is None or size < self._refused_bytes * 9 // 10:
            self._refused_bytes = size
            self.max_bytes = min(self.max_bytes, max(SMALLEST_BYTES, min(self.max_bytes, size) // 2))
        elif not self.brief:
            self.brief = True  # the event's own record: with a lower limit it was as large as before
        else:
            return False
        return True

    def refuse(self, offset: int) -> bool:
        """The answer to the message at `offset` is too large. Returns False if it was refused already."""
        is_new = self.rejected_offset != offset
        self.rejected_offset = offset
        return is_new

    def wait(self, shortage: TooLargeError, *, until: int) -> None:
        """Nothing smaller is left to try, and what comes next must not be given up. It is the input up to the offset
        `until`."""
        self.shortage = shortage
        self.stay_small(until=until)

    def stay_small(self, *, until: int) -> None:
        """Keep the low limits until the commits have passed the offset `until`: by then the events that were too large
        are decided again."""
        self._small_until = max(until, self._small_until or 0)

    def grow(self, position: int, *, idle: bool) -> None:
        """A commit up to `position` succeeded: restore the usual limits if the events that were too large are done.
        `idle`: no internal event waits, and none is decided and not committed."""
        if self._small_until is None or (position >= self._small_until and idle):
            self._small_until = self._refused_bytes = None
            self.brief = False
            self.shortage = None
            self.records, self.max_bytes = self._most

    def forget(self) -> None:
        """The input began again, so earlier positions mean nothing."""
        self._small_until = self._refused_bytes = None
        self.rejected_offset = None
        self.shortage = None
