"""Judges silence: a lease has expired once all messages that were sent before its deadline are decided."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from operator import attrgetter

import structlog
from msgspec import Struct

from outfitter_proto.keys import AllocationKey, allocation_names
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.identity import SuspendWatch
from outfitter_service.runtime.liveness.leases import Leases

log = structlog.get_logger("outfitter.liveness")

SUSPECTS_AT_ONCE = 500
"""Leases with a passed deadline that the judge checks in one turn of the event loop."""
MOST_SAMPLES = 1000
"""Most samples of the input's end that the decisions have not reached yet. Beyond that every second one is dropped:
leases with a deadline in between wait for the next sample."""


class _Sample(Struct, frozen=True):
    """A sample of the input's end. `at`: when the bus was asked, in monotonic seconds. `end`: the offset."""

    at: float
    end: int


_AT = attrgetter("at")


class SilenceJudge:
    """Judges leases by samples of the input's end. If many leases are due at once, it checks some in each turn."""

    def __init__(self, leases: Leases, clock: Clock, *, suspect: Callable[[], None]) -> None:
        """`suspect` is called when a lease needs a later sample."""
        self._leases = leases
        self._now = clock.monotonic
        self._suspend = SuspendWatch(clock)
        self._suspect = suspect
        self._samples: list[_Sample] = []
        self._earliest = math.inf
        self._round_at: float | None = None

    @property
    def more_suspects(self) -> bool:
        """Whether leases that were due at the last call of `expired` are not checked yet."""
        return self._round_at is not None

    def sampled(self, at: float, end: int) -> None:
        """The input ended at this offset when it was sampled `at` these monotonic seconds."""
        self._samples.append(_Sample(at, end))
        if len(self._samples) > MOST_SAMPLES:
            del self._samples[1::2]

    def expired(self, decided_before: Callable[[str], int]) -> list[m.LeaseExpired]:
        """The expired leases. `decided_before`: the offset before which all messages of a host are decided. If many
        leases are due, one call judges some of them, and `more_suspects` is true."""
        now = self._now() if self._round_at is None else self._round_at
        if self._suspend.slept():
            log.warning("the machine was suspended: every lease starts anew")
            self._leases.renew_all(self._now())
        due = self._leases.due(now, SUSPECTS_AT_ONCE)
        samples, deadline = self._samples, self._leases.deadline
        if due:
            self._earliest = min(self._earliest, deadline(due[0]))
        judged: list[AllocationKey] = []
        for key in due:
            # each lease has its own sample: if the input is never read to its end, no decision reaches the newest one
            first = bisect_left(samples, deadline(key), key=_AT)
            if first == len(samples):
                self._suspect()
                break
            if decided_before(allocation_names(key).host) >= samples[first].end:
                judged.append(key)
        for key in judged:
            self._leases.drop(key)
        self._round_at = now if self._leases.is_round_open else None
        if self._round_at is None:
            del samples[: bisect_left(samples, self._earliest, key=_AT)]  # no lease waits for these
            self._earliest = math.inf
        return [m.LeaseExpired(allocation=key) for key in judged]
