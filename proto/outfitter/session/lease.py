"""A worker's own view of how much of its lease is left.

The worker counts from when it began to send the last message that renewed the lease. The manager counts from when it
read that message, so the worker's lease always ends first. The clock is boot time, which includes suspension: a worker
that wakes up knows at once that its lease is over.

A heartbeat that is acknowledged before the lease ends renews it, because the manager cannot have ended it before.
After the end an acknowledgement proves nothing, because another worker may have the devices. Then the worker registers
again. The manager's answer renews the lease from the time of that registration, or of a later heartbeat that was
acknowledged in time. So even a manager that is more than a lease behind with its input can confirm a worker.

Nor does an acknowledgement prove anything while a manager serves a ledger that was made anew and lacks the allocation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from msgspec import Struct

AT_RISK_AFTER = 2 / 3
"""The share of a lease after which it is at risk: two heartbeats are missing, and one can still come."""

HEARTBEATS_PER_LEASE = 3

MOST_CLAIMS = 16
"""Most open registrations, that is, without an answer. The oldest one is dropped."""

Clock = Callable[[], float]


class _Claim(Struct):
    """An open registration."""

    sent_at: float
    """When the worker began to send it."""
    offset: int
    """Its place in the input."""
    alive_at: float
    """The worker was alive until then, if the allocation still stands when the manager reads the registration."""


def boot_time() -> float:
    """Seconds since boot, with suspension (clock_gettime(2), CLOCK_BOOTTIME); monotonic time on other systems."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Lease:
    """One worker's lease. Its session writes it, any thread reads it; each field changes in one step."""

    def __init__(self, clock: Clock = boot_time) -> None:
        self.clock = clock
        """Its time in seconds."""
        self.watched = False
        """A manager on this machine watches the worker's process. The lease has no end while that process lives."""
        self._seconds: float | None = None
        self._alive_at = clock()
        self._claims: deque[_Claim] = deque(maxlen=MOST_CLAIMS)
        self._doubted = False

    @property
    def seconds(self) -> float | None:
        """The lease's length; None if it is unknown or there is no lease."""
        return self._seconds

    def begin(self, sent_at: float) -> None:
        """Count the lease from `sent_at` (by `clock`), when the worker began to send its registration."""
        self._alive_at = sent_at

    def grant(self, seconds: float | None) -> None:
        """Set the lease's length, from the manager's record. None: no lease."""
        self._seconds = seconds

    def acknowledge(self, sent_at: float) -> bool:
        """Note an acknowledged heartbeat, which the worker began to send at `sent_at`. Returns whether it renews the
        lease."""
        now, seconds = self.clock(), self._seconds
        for claim in self._claims:
            if seconds is not None and now < claim.alive_at + seconds:
                claim.alive_at = max(claim.alive_at, sent_at)
        if self.unconfirmed:
            return False
        self.confirm(sent_at)
        return True

    def doubt(self) -> None:
        """Note that a manager serves a new ledger, in which the allocation was not found yet."""
        self._doubted = True

    def trust(self) -> None:
        """Note that the ledger has the allocation."""
        self._doubted = False

    @property
    def unconfirmed(self) -> bool:
        """Whether an acknowledged heartbeat would prove nothing: the lease is over, or the allocation in doubt."""
        return self._doubted or self.over

    def set_watched(self, watched: bool) -> bool:
        """Set whether a manager watches the worker's process. Returns whether that has changed."""
        changed = watched != self.watched
        self.watched = watched
        return changed

    def claim(self, sent_at: float, offset: int) -> None:
        """Note an acknowledged registration at `offset` of the input, which the worker began to send at `sent_at`."""
        self._claims.append(_Claim(sent_at, offset, alive_at=sent_at))

    def withdraw_claims(self) -> None:
        """Stop waiting for answers to earlier registrations."""
        self._claims.clear()

    @property
    def claimed(self) -> bool:
        """Whether a registration is open."""
        return bool(self._claims)

    @property
    def claimed_lately(self) -> bool:
        """Whether an open registration is younger than a lease, so that its answer would renew the lease."""
        if not self._claims or self._seconds is None:
            return bool(self._claims)
        return self.clock() < self._claims[-1].sent_at + self._seconds

    def answer(self, reached: int) -> bool:
        """Note that the allocation stood after the manager had read all before offset `reached`. Returns whether that
        answers a registration."""
        answered = False
        while self._claims and self._claims[0].offset < reached:
            self.confirm(self._claims.popleft().alive_at)
            answered = True
        return answered

    def confirm(self, alive_at: float) -> None:
        """Count the lease from `alive_at`: the allocation stood and the worker was heard then."""
        self._alive_at = max(self._alive_at, alive_at)

    @property
    def remaining(self) -> float | None:
        """Seconds until the lease ends if nothing renews it, negative afterwards; None if it has no end."""
        return self._until(1.0)

    @property
    def until_risk(self) -> float | None:
        """Seconds until the lease is at risk, 0 or negative when it is; None if it has no end."""
        return self._until(AT_RISK_AFTER)

    @property
    def at_risk(self) -> bool:
        """True when nothing has renewed the lease for two thirds of it."""
        left = self.until_risk
        return left is not None and left <= 0

    @property
    def over(self) -> bool:
        """True when nothing has renewed the lease for all of it. Another worker may have the devices."""
        left = self.remaining
        return left is not None and left <= 0

    @property
    def interval(self) -> float | None:
        """Seconds between heartbeats; None without a lease."""
        seconds = self._seconds
        return None if seconds is None else seconds / HEARTBEATS_PER_LEASE

    def _until(self, share: float) -> float | None:
        seconds = self._seconds
        return None if seconds is None or self.watched else self._alive_at + seconds * share - self.clock()
