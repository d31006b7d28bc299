"""The machine's clocks, as the runtime reads them: whoever runs it under another time hands it another `Clock`.

Durations that are only measured for metrics are not read here.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """What time it is. Waiting is the event loop's business: its time must pass as `monotonic` does."""

    def monotonic(self) -> float:
        """Seconds that only grow, from an arbitrary start (CLOCK_MONOTONIC): they stand still while the machine
        is suspended."""
        return time.monotonic()

    def utc(self) -> datetime:
        """The wall's time, as far as this machine knows it; it may jump."""
        return datetime.now(UTC)

    def suspended(self) -> float:
        """Seconds for which the machine has been suspended, plus a constant (CLOCK_BOOTTIME less CLOCK_MONOTONIC)."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


SYSTEM = Clock()
