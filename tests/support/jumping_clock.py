"""A clock that a test moves on."""

from __future__ import annotations

from outfitter_service.runtime.clock import Clock


class JumpingClock(Clock):
    """The machine's time, and what the test adds to it."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s
