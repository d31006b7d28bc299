"""Logs outages of the bus: a line at the start, one a minute, one for each topic that is gone, and one at the end.

Several activities fail together, each repeatedly: reading, committing, sweeping. Together they are one outage. Each
failure is a line at debug level.
"""

from __future__ import annotations

import structlog

from outfitter_proto.bus import BusConfigurationError, TooLargeError, UnknownTopicError
from outfitter_proto.support import descriptors
from outfitter_service.runtime.clock import SYSTEM, Clock

LOG_AGAIN_S = 60.0
"""Seconds between two lines about one outage."""

log = structlog.get_logger("outfitter.bus")


class OutageLog:
    """Logs a manager's outages of its bus. One begins when the first activity fails, and ends when all work again."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._failing: dict[str, str] = {}
        self._missing: set[str] = set()
        self._begun = 0.0
        self._logged_at = 0.0

    @property
    def on(self) -> bool:
        """Whether an outage is under way."""
        return bool(self._failing)

    def met(self, activity: str, error: object) -> None:
        """`activity` has failed (again), and will be tried again."""
        now = self._clock.monotonic()
        is_first, message = not self._failing, str(error)
        if (code := descriptors.lacking()) is not None and (words := descriptors.explain(code)) not in message:
            message = f"{message}; {words}"  # a client library says no more than that it cannot connect
        self._failing[activity] = message
        if is_first:
            self._begun = self._logged_at = now
            if isinstance(error, BusConfigurationError | TooLargeError):
                log.warning("the bus refuses this manager, trying until it does not", activity=activity, error=message)
            else:
                log.warning("the bus is away, trying until it works", activity=activity, error=message)
            self._missing = {message} if isinstance(error, UnknownTopicError) else set()
        elif isinstance(error, UnknownTopicError) and message not in self._missing:
            self._missing.add(message)  # the first error seldom says that a topic is gone, but that it is silent
            log.warning("a topic is gone, trying until it is there", activity=activity, error=message)
        elif now - self._logged_at >= LOG_AGAIN_S:
            self._logged_at = now
            failing = sorted(self._failing)
            seconds = round(now - self._begun)
            log.warning("the bus is away for longer", after_s=seconds, activities=failing, error=message)
        else:
            log.debug("the bus is still away", activity=activity, error=message)

    def passed(self, activity: str) -> None:
        """`activity` works."""
        if self._failing.pop(activity, None) is not None and not self._failing:
            log.info("the bus works again", after_s=round(self._clock.monotonic() - self._begun, 1))

    def drop(self, activity: str) -> None:
        """`activity` has stopped."""
        self._failing.pop(activity, None)


class SilenceLog:
    """Logs once that others cannot see on the bus that this manager lives, and once that they can. It is one for all
    partitions of a manager."""

    def __init__(self) -> None:
        self._failing: set[str] = set()
        self._said: set[str] = set()

    def met(self, writer: str, error: object) -> None:
        """A sign of life of `writer` was lost."""
        self._failing.add(writer)
        message = str(error)
        if message not in self._said:
            self._said.add(message)
            log.warning("others cannot see that this manager lives", error=message)

    def passed(self, writer: str) -> None:
        """A sign of life of `writer` was acknowledged."""
        if writer in self._failing:
            self.drop(writer)
            if not self._failing:
                log.info("others see again that this manager lives")

    def drop(self, writer: str) -> None:
        """There are no more signs of `writer`."""
        self._failing.discard(writer)
        if not self._failing:
            self._said.clear()
