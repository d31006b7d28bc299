"""Logs that topics take less than a commit needs: each kind of line once a minute at most, and once that it is over.

While a topic's limit is too low, the manager tries again and again, and each attempt would be a line.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from outfitter_proto.bus import TooLargeError

LOG_AGAIN_S = 60.0
"""Seconds between two lines of one kind."""
SPARE_BYTES = 64
"""How many bytes more the next attempt may need: its numbers and times may have more digits."""


def explain(trouble: TooLargeError) -> str:
    """What people must do, so that the smallest commit can be written."""
    if trouble.topic is None or trouble.size is None:
        return f"the topics take less than the smallest commit: {trouble}"
    return (
        f"topic {trouble.topic} takes less than the smallest commit: set its max.message.bytes to "
        f"{trouble.size + SPARE_BYTES} at least, see `outfitter topics check`"
    )


class SizeRefusals:
    """The lines of one processor."""

    def __init__(self, log: structlog.stdlib.BoundLogger, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._log = log
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._waits = False

    def split(self, trouble: TooLargeError, *, events: int) -> None:
        """A commit of so many events was refused; the next ones are smaller."""
        self._line("warning", "a commit is too large, splitting it", error=str(trouble), events=events)

    def set_aside(self, trouble: TooLargeError, **subject: str) -> None:
        """An event was refused even alone; it is tried again later. `subject`: the event, as log fields."""
        self._line("error", "an event's effects are too large to commit", problem=explain(trouble), **subject)

    def waiting(self, trouble: TooLargeError) -> None:
        """Nothing more can be written until a topic takes more."""
        self._waits = True
        self._line("error", "waiting until a topic takes larger commits", problem=explain(trouble))

    def over(self) -> None:
        """What waited is written."""
        if self._waits:
            self._waits = False
            self._logged_at.clear()
            self._log.info("the topics take the commit by now")

    def _line(self, level: str, event: str, **fields: object) -> None:
        now = self._clock()
        is_due = now - self._logged_at.get(event, -LOG_AGAIN_S) >= LOG_AGAIN_S
        if is_due:
            self._logged_at[event] = now
        getattr(self._log, level if is_due else "debug")(event, **fields)
