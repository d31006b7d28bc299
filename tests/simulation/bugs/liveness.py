"""Bugs of the failure detector: leases that end too early, by a wrong clock, or because of an outage of the bus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_proto.records import ResolvedRequest
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from simulation.bugs.bug import Bug, jumping, nothing
from simulation.hosts import workers
from simulation.model import client
from simulation.world import settings


def _judge_by_the_clock(self: LivenessTracker, heard: object) -> list[m.LeaseExpired]:
    due = self.leases.due(self._now())
    for key in due:
        self.leases.drop(key)
    return [m.LeaseExpired(allocation=key) for key in due]


@contextmanager
def _short_leases() -> Iterator[None]:
    start = Leases.start

    def start_shorter(self: Leases, key: str, length_s: float, now: float) -> None:
        start(self, key, length_s * 0.25, now)

    with patch.object(Leases, "start", start_shorter):
        yield


def _renew_what_is_over(self: Leases, now: float) -> None:
    for key in self.keys():
        if self.deadline(key) <= now:
            self.renew(key, now)


@contextmanager
def _crashing(*faults: str) -> Iterator[None]:
    """Looked for where most workers end without a word, and these faults happen."""
    with (
        patch.object(workers, "CRASHES", 0.9),
        patch.object(settings, "TENACIOUS", 0.0),
        patch.object(settings, "FAULTS", faults),
    ):
        yield


@contextmanager
def _grace(share: float) -> Iterator[None]:
    """A share of the grace, where managers have a long one."""
    begin = Leases.__init__

    def begin_with_less(self: Leases, grace_s: float) -> None:
        begin(self, grace_s * share)

    with (
        _crashing("worker", "slow", "compaction"),
        patch.object(Leases, "__init__", begin_with_less),
        patch.object(settings, "PATIENT", 1.0),
    ):
        yield


@contextmanager
def _outages(renew_all: Callable[..., None]) -> Iterator[None]:
    """Leases are renewed in this way after an outage, where there are many and no long grace makes up for it."""
    with (
        _crashing("down", "worker", "slow"),
        patch.object(settings, "PATIENT", 0.0),
        patch.object(Leases, "renew_all", renew_all),
    ):
        yield


@contextmanager
def _short_outages() -> Iterator[None]:
    """A fetch that is answered late is taken for one that was answered in time."""
    with (
        patch.object(settings, "TENACIOUS", 1.0),
        patch.object(settings, "FAULTS", ("down", "slow", "compaction")),
        patch.object(settings, "REFUSING", 1.0),
        patch.object(settings, "PATIENT", 0.0),
        patch.object(client, "LATE_S", math.inf),
    ):
        yield


@contextmanager
def _leased_out_of_sight() -> Iterator[None]:
    """A lease for whom nobody sends heartbeats, where managers start in another PID namespace."""
    with (
        patch.object(ResolvedRequest, "waits_for_owner", property(lambda _: False)),
        patch.object(settings, "WALLED", 1.0),
        patch.object(settings, "FAULTS", ("kill", "end", "slow")),
    ):
        yield


class _WallClock(Clock):
    """Another clock, whose monotonic seconds are the wall's."""

    def __init__(self, clock: Clock) -> None:
        self.utc = clock.utc  # type: ignore[method-assign]
        self.suspended = clock.suspended  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.utc().timestamp()


@contextmanager
def _by_the_wall() -> Iterator[None]:
    begin = LivenessTracker.__init__

    def begin_by_the_wall(self: LivenessTracker, *args: Any, clock: Clock, **options: Any) -> None:
        begin(self, *args, clock=_WallClock(clock), **options)

    with patch.object(LivenessTracker, "__init__", begin_by_the_wall), jumping():
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="lease-judged-while-behind",
        what="a lease is over when its time is, whatever heartbeats lie unread in the input",
        within=200,
        patches=lambda: patch.object(LivenessTracker, "expired", _judge_by_the_clock),
    ),
    Bug(
        name="nobody-attended-to",
        what="leases and owners of before a restore are forgotten by it",
        within=100,
        patches=lambda: patch.object(LivenessTracker, "restart", nothing),
    ),
    Bug(
        name="short-leases",
        what="a lease is over before the worker believes so",
        within=120,
        patches=_short_leases,
    ),
    Bug(
        name="leases-by-the-wall",
        what="leases are judged by the wall clock, which jumps",
        within=40,
        patches=_by_the_wall,
    ),
    Bug(
        name="no-grace",
        what="a lease is judged as soon as its time is over, whatever the grace",
        within=20,
        patches=lambda: _grace(0.0),
    ),
    Bug(
        name="half-of-the-grace",
        what="a lease is judged after half of the grace",
        within=80,
        patches=lambda: _grace(0.5),
    ),
    Bug(
        name="outage-blamed",
        what="nobody has a whole lease after an outage of the bus",
        within=100,
        patches=lambda: _outages(nothing),
    ),
    Bug(
        name="outage-blamed-on-the-quiet",
        what="after an outage of the bus only those have a whole lease whose lease was over by then",
        within=200,  # 21 of 600 seeds find it
        patches=lambda: _outages(_renew_what_is_over),
    ),
    Bug(
        name="short-outage-blamed",
        what="silence counts during an outage of the bus in which no request failed",
        within=150,  # 3 of 260 seeds find it
        patches=_short_outages,
    ),
    Bug(
        name="leased-out-of-sight",
        what="a device is lent while its worker, whose heartbeats nobody sends, is out of the manager's sight",
        within=150,
        patches=_leased_out_of_sight,
    ),
)
