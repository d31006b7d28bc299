"""The machine's clocks, as the runtime reads them. Tests with another time pass another `Clock`.

Metrics measure durations without it.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """Tells the time. The event loop does the waiting, and its time must pass as `monotonic` does."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start (CLOCK_MONOTONIC). They stop while the machine is suspended."""
        return time.monotonic()

    def utc(self) -> datetime:
        """This machine's wall time, which may jump."""
        return datetime.now(UTC)

    def suspended(self) -> float:
        """Seconds for which the machine has been suspended, plus a constant (CLOCK_BOOTTIME less CLOCK_MONOTONIC)."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


SYSTEM = Clock()
