"""How much of a worker's lease is left, as the worker itself must judge it.

The worker counts from the moment at which it began to send the last heartbeat that was acknowledged, the
manager from when it read it: the worker's lease always ends first. The clock is boot time, which goes on while
the machine sleeps, so that a worker that wakes up knows at once.
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
    """One worker's lease. Written by its heartbeats, read by any thread: each field changes in one step."""

    def __init__(self, clock: Clock = boot_time) -> None:
        self.clock = clock
        self._seconds: float | None = None
        self._acknowledged = clock()

    @property
    def seconds(self) -> float | None:
        """The lease's length; None while unknown, or when there is none."""
        return self._seconds

    def grant(self, seconds: float | None) -> None:
        """The manager has said how long the lease is. One that was not known begins now."""
        if seconds != self._seconds:
            self._acknowledged = self.clock()
            self._seconds = seconds

    def acknowledge(self, sent_at: float) -> None:
        """A heartbeat that was begun at `sent_at` (by `clock`) has been acknowledged."""
        self._acknowledged = max(self._acknowledged, sent_at)

    @property
    def remaining(self) -> float | None:
        """Seconds until the lease ends if nothing is heard, negative afterwards; None without a lease."""
        seconds = self._seconds
        return None if seconds is None else self._acknowledged + seconds - self.clock()

    def ended_by(self, moment: float) -> bool:
        """Whether nothing was heard for so long before `moment` (by `clock`) that the lease was over then."""
        return self._seconds is not None and moment >= self._acknowledged + self._seconds

    @property
    def until_risk(self) -> float | None:
        """Seconds until the lease is at risk, none or negative when it is; None without a lease."""
        seconds = self._seconds
        return None if seconds is None else self._acknowledged + seconds * AT_RISK_AFTER - self.clock()

    @property
    def at_risk(self) -> bool:
        """True when no heartbeat was acknowledged for most of the lease."""
        left = self.until_risk
        return left is not None and left <= 0

    @property
    def interval(self) -> float | None:
        """Seconds between heartbeats; None without a lease."""
        seconds = self._seconds
        return None if seconds is None else seconds / HEARTBEATS_PER_LEASE
