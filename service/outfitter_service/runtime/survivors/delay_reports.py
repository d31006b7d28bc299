"""When a delay that lasts is reported again: after 10 s, after 20 s more, then 40 s and so on.

A record and a step of history are written for each new reason. Who causes a delay can change its reason as often as he
likes, for example by processes that take turns. A reason that has not changed is reported again as well, because the
manager may have had no room for it.
"""

from __future__ import annotations

from collections.abc import Callable

from outfitter_proto.support.backoff import Backoff

FIRST_S = 10.0
LONGEST_S = 320.0
"""Seconds between two reports, at first and at most."""


class DelayReports:
    """The reports of one delay."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._backoff = Backoff(FIRST_S, LONGEST_S)
        self._due_at = clock()
        self._reported = ""

    @property
    def is_due(self) -> bool:
        """Whether a report is due."""
        return self._clock() >= self._due_at

    def report(self, reason: str) -> bool:
        """A report that was due is made. Returns whether its reason is new."""
        self._due_at = self._clock() + self._backoff.next_delay()
        is_new, self._reported = reason != self._reported, reason
        return is_new
