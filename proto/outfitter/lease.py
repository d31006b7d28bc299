"""How much of a worker's lease is left, as the worker itself must judge it.

The worker counts from the moment at which it began to send the last message that kept the lease alive, the manager
from when it read it: the worker's lease always ends first. The clock is boot time, which goes on while the machine
sleeps, so that a worker that wakes up knows at once.

A heartbeat that is acknowledged before the lease ends renews it: the manager cannot have given up before. Once the
lease is over, an acknowledgement says nothing, for the devices may be somebody else's. Then only an answer renews it
that the manager has given after it read a message of this worker (`answered`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

AT_RISK_AFTER = 2 / 3
"""The share of a lease after which silence counts as trouble: two heartbeats are missing, one can still come."""

HEARTBEATS_PER_LEASE = 3

Clock = Callable[[], float]


def boot_time() -> float:
    """Seconds since boot, sleep included (clock_gettime(2), CLOCK_BOOTTIME); monotonic time where there is none."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Lease:
    """One worker's lease. Written by its session, read by any thread: each field changes in one step.

    `watched`: a manager on this machine watches the worker's process. As long as the process lives, silence then takes
    nothing away, and there is no end to count to.
    """

    def __init__(self, clock: Clock = boot_time) -> None:
        self.clock = clock
        self.watched = False
        self._seconds: float | None = None
        self._alive_at = clock()

    @property
    def seconds(self) -> float | None:
        """The lease's length; None while unknown, or when there is none."""
        return self._seconds

    def begin(self, sent_at: float) -> None:
        """The registration was sent, from `sent_at` (by `clock`) on: the lease counts from there."""
        self._alive_at = sent_at

    def grant(self, seconds: float | None) -> None:
        """The manager has said how long the lease is."""
        self._seconds = seconds

    def acknowledge(self, sent_at: float) -> bool:
        """A heartbeat that was begun at `sent_at` has been acknowledged: whether that renews the lease."""
        if self.over:
            return False
        self.answered(sent_at)
        return True

    def answered(self, sent_at: float) -> None:
        """The manager has read what was begun to be sent at `sent_at`, and the allocation still stood."""
        self._alive_at = max(self._alive_at, sent_at)

    @property
    def remaining(self) -> float | None:
        """Seconds until the lease ends if nothing is heard, negative afterwards; None where it has no end."""
        return self._until(1.0)

    @property
    def until_risk(self) -> float | None:
        """Seconds until the lease is at risk, none or negative when it is; None where it has no end."""
        return self._until(AT_RISK_AFTER)

    @property
    def at_risk(self) -> bool:
        """True when the worker was not heard for most of the lease."""
        left = self.until_risk
        return left is not None and left <= 0

    @property
    def over(self) -> bool:
        """True when the worker was not heard for all of the lease: its devices may be somebody else's."""
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
