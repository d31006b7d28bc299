"""The judgement of silence: a lease that has run out counts once everything that was sent before its end is decided."""

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

log = structlog.get_logger("outfitter.attendance")

SUSPECTS_AT_ONCE = 500
"""Leases that have run out, or may have, that are looked at in one turn of the event loop."""
MOST_SAMPLES = 1000
"""Samples of the input's end that wait to be come to. Beyond that every second one is left out: leases that ran out in
between wait for the next one."""


class _Sample(Struct, frozen=True):
    """The offset at which the input ended (`end`) when that was asked, `at` monotonic seconds."""

    at: float
    end: int


_AT = attrgetter("at")


class SilenceJudge:
    """Judges leases by samples of the input's end. Of many that have run out at once it looks at some in each turn."""

    def __init__(self, leases: Leases, clock: Clock, *, suspect: Callable[[], None]) -> None:
        """`suspect` is called when a lease has run out for which no sample is late enough."""
        self._leases = leases
        self._now = clock.monotonic
        self._suspend = SuspendWatch(clock)
        self._suspect = suspect
        self._samples: list[_Sample] = []
        self._earliest = math.inf
        self._round_at: float | None = None

    @property
    def more_suspects(self) -> bool:
        """Whether leases that had run out when `expired` was asked are still to be looked at."""
        return self._round_at is not None

    def sampled(self, at: float, end: int) -> None:
        """The input ended at this offset when that was asked `at`."""
        self._samples.append(_Sample(at, end))
        if len(self._samples) > MOST_SAMPLES:
            del self._samples[1::2]

    def expired(self, heard: Callable[[str], int]) -> list[m.LeaseExpired]:
        """The leases that have run out, judged with everything decided that a host said before the offset `heard`. Of
        many at once some: `more_suspects` says that the others are still to be looked at."""
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
            # each lease has its own sample: where the input is never read to its end, the newest one is never come to
            first = bisect_left(samples, deadline(key), key=_AT)
            if first == len(samples):
                self._suspect()
                break
            if heard(allocation_names(key).host) >= samples[first].end:
                judged.append(key)
        for key in judged:
            self._leases.drop(key)
        self._round_at = now if self._leases.left else None
        if self._round_at is None:
            del samples[: bisect_left(samples, self._earliest, key=_AT)]  # nobody waits for those
            self._earliest = math.inf
        return [m.LeaseExpired(allocation=key) for key in judged]
