"""What a worker's log says of a bus that is away: a line when that begins, one a minute, and one when it is over.

Several activities fail together, each again and again: reading the ledger, sending heartbeats. It is one trouble.
"""

from __future__ import annotations

import logging

from outfitter.session.lease import Clock

SAY_AGAIN_AFTER = 60.0
"""Seconds between two lines about one trouble."""

log = logging.getLogger("outfitter")


class WorkerOutageLog:
    """The trouble that `who` has with its bus, begun when the first of its activities fails, over when all go on."""

    def __init__(self, who: str, clock: Clock) -> None:
        self._who = who
        self._clock = clock
        self._failing: set[str] = set()
        self._begun = 0.0
        self._said = 0.0

    def met(self, activity: str, problem: object) -> None:
        """`activity` has failed (once more), for the reason `problem`."""
        now = self._clock()
        if not self._failing:
            self._begun = self._said = now
            log.warning("%s: %s fails and is tried again: %s", self._who, activity, problem)
        elif now - self._said >= SAY_AGAIN_AFTER:
            self._said = now
            log.warning("%s: %s still fails after %.0f s: %s", self._who, activity, now - self._begun, problem)
        self._failing.add(activity)

    def passed(self, activity: str) -> None:
        """`activity` works."""
        if activity in self._failing:
            self._failing.remove(activity)
            if not self._failing:
                log.warning("%s: all is well again after %.0f s", self._who, self._clock() - self._begun)
