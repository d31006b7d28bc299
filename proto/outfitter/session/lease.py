"""How much of a worker's lease is left, as the worker itself must judge it.

The worker counts from the moment at which it began to send the last message that kept the lease alive, the manager
from when it read it: the worker's lease always ends first. The clock is boot time, which goes on while the machine
sleeps, so that a worker that wakes up knows at once.

A heartbeat that is acknowledged before the lease ends renews it: the manager cannot have given up before. Once the
lease is over, an acknowledgement says nothing, for the devices may be somebody else's. Then the worker registers again,
and the manager's answer renews the lease: from that registration on, and from each heartbeat that was acknowledged in
time since. So a manager that is behind with its input, by more than a lease even, confirms a worker all the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

AT_RISK_AFTER = 2 / 3
"""The share of a lease after which silence counts as trouble: two heartbeats are missing, one can still come."""

HEARTBEATS_PER_LEASE = 3

MOST_CLAIMS = 16
"""Registrations whose answers are waited for: the latest ones."""

Clock = Callable[[], float]


class _Claim:
    """A registration at `offset` of the input, begun to be sent at `sent_at`. If the manager finds the allocation alive
    when it reads it, the worker was alive until `alive_at`."""

    __slots__ = ("alive_at", "offset", "sent_at")

    def __init__(self, sent_at: float, offset: int) -> None:
        self.sent_at = self.alive_at = sent_at
        self.offset = offset


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
        self._claims: deque[_Claim] = deque(maxlen=MOST_CLAIMS)

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
        now, seconds = self.clock(), self._seconds
        for claim in self._claims:
            if seconds is not None and now < claim.alive_at + seconds:
                claim.alive_at = max(claim.alive_at, sent_at)
        if self.over:
            return False
        self.confirm(sent_at)
        return True

    def claim(self, sent_at: float, offset: int) -> None:
        """A registration that was begun at `sent_at` has been acknowledged; the input has it at `offset`."""
        self._claims.append(_Claim(sent_at, offset))

    def withdraw_claims(self) -> None:
        """No answer to an earlier registration is waited for."""
        self._claims.clear()

    @property
    def claimed(self) -> bool:
        """Whether an answer is waited for."""
        return bool(self._claims)

    @property
    def claimed_lately(self) -> bool:
        """Whether an answer is waited for that would renew the lease, to a registration not older than a lease."""
        if not self._claims or self._seconds is None:
            return bool(self._claims)
        return self.clock() < self._claims[-1].sent_at + self._seconds

    def answer(self, reached: int) -> bool:
        """The manager has read all before offset `reached`, and the allocation still stood: whether that is news."""
        news = False
        while self._claims and self._claims[0].offset < reached:
            self.confirm(self._claims.popleft().alive_at)
            news = True
        return news

    def confirm(self, alive_at: float) -> None:
        """The worker is known to have been heard at `alive_at`, and its allocation stood."""
        self._alive_at = max(self._alive_at, alive_at)

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
