"""A worker's log lines about an outage of its bus: one when it begins, one a minute, one when it ends.

Several activities fail repeatedly in one outage: reading the ledger, sending heartbeats.
"""

from __future__ import annotations

import logging

from outfitter.session.lease import Clock

LOG_INTERVAL = 60.0
"""Seconds between two lines about one outage."""

log = logging.getLogger("outfitter")


class WorkerOutageLog:
    """An outage of the bus, from the first failed activity of a worker until all its activities work. `who`: the
    worker, for the log lines."""

    def __init__(self, who: str, clock: Clock) -> None:
        self._who = who
        self._clock = clock
        self._failing: set[str] = set()
        self._begun = 0.0
        self._logged_at = 0.0

    def met(self, activity: str, problem: object) -> None:
        """Note that `activity` has failed, perhaps again, because of `problem`."""
        now = self._clock()
        if not self._failing:
            self._begun = self._logged_at = now
            log.warning("%s: %s fails and is tried again: %s", self._who, activity, problem)
        elif now - self._logged_at >= LOG_INTERVAL:
            self._logged_at = now
            log.warning("%s: %s still fails after %.0f s: %s", self._who, activity, now - self._begun, problem)
        self._failing.add(activity)

    def passed(self, activity: str) -> None:
        """Note that `activity` works."""
        if activity in self._failing:
            self._failing.remove(activity)
            if not self._failing:
                log.warning("%s: the bus works again after %.0f s", self._who, self._clock() - self._begun)
