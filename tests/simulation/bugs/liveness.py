"""Bugs of the failure detector: leases that end too early, or by a wrong clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from simulation.bugs.bug import Bug, jumping, nothing


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
)
