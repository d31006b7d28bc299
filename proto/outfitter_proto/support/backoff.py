"""Delays between tries, which grow."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds: `first`, then twice as long each time, up to `longest`."""

    def __init__(self, first: float, longest: float, *, jitter: float = 0.0) -> None:
        """`jitter`: the share by which a delay may be shorter or longer, so that many processes do not try at once."""
        self.delay = first
        """The next delay, without its jitter."""
        self._first = first
        self._longest = longest
        self._jitter = jitter

    def next_delay(self, *, lasted: float = 0.0) -> float:
        """The delay in seconds before the next try. `lasted`: seconds for which the last try worked; if that is more
        than the longest delay, the delays begin again."""
        if lasted > self._longest:
            self.reset()
        delay, self.delay = self.delay, min(2 * self.delay, self._longest)
        if not self._jitter:
            return delay
        return delay * random.uniform(1 - self._jitter, 1 + self._jitter)  # noqa: S311 - jitter, not a secret

    def reset(self) -> None:
        """Begin again with the first delay."""
        self.delay = self._first
