"""What a manager's log says of a bus that is away: a line when that begins, one a minute, and one when it is over.

Several activities fail together, each again and again: reading, committing, sweeping. It is one outage. Each failure is
a line at debug.
"""

from __future__ import annotations

import structlog

from outfitter_service.runtime.clock import SYSTEM, Clock

SAY_AGAIN_S = 60.0
"""Between two lines about one outage."""

log = structlog.get_logger("outfitter.bus")


class OutageLog:
    """One manager's outages of its bus: one begins when the first activity fails, and is over when all go on."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._failing: dict[str, str] = {}
        self._begun = 0.0
        self._said = 0.0

    @property
    def on(self) -> bool:
        return bool(self._failing)

    def met(self, activity: str, error: object) -> None:
        """`activity` has failed, or failed once more, and is tried again."""
        now = self._clock.monotonic()
        first, told = not self._failing, str(error)
        self._failing[activity] = told
        if first:
            self._begun = self._said = now
            log.warning("the bus is away, trying until it works", activity=activity, error=told)
        elif now - self._said >= SAY_AGAIN_S:
            self._said = now
            failing = sorted(self._failing)
            log.warning("the bus is away for longer", after_s=round(now - self._begun), activities=failing, error=told)
        else:
            log.debug("the bus is still away", activity=activity, error=told)

    def passed(self, activity: str) -> None:
        """`activity` works."""
        if self._failing.pop(activity, None) is not None and not self._failing:
            log.info("the bus works again", after_s=round(self._clock.monotonic() - self._begun, 1))

    def drop(self, activity: str) -> None:
        """`activity` is not wanted any more."""
        self._failing.pop(activity, None)
