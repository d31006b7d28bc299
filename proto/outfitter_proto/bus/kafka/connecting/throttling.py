"""Time limits that do not count the time for which a broker throttles us.

A broker whose quota is exceeded answers with `throttle_time_ms`, and reads no request from that connection for so long
(KIP-219). A request that is sent meanwhile is answered late, and that is no sign of a broken broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

MOST_THROTTLED_S = 30.0
"""Most seconds for which we obey one `throttle_time_ms`. Then a new connection replaces the throttled one."""


class Patience:
    """The time limits of one connection, or of one client with several connections."""

    def __init__(self) -> None:
        self._until = 0.0
        self._obeyed = True
        self._open: list[tuple[anyio.CancelScope, float]] = []

    def throttle(self, seconds: float) -> None:
        """Note that nothing can be answered for so long. Each open limit begins anew after that time."""
        self._obeyed = seconds <= MOST_THROTTLED_S
        self._until = max(self._until, anyio.current_time() + min(seconds, MOST_THROTTLED_S))
        for scope, limit in self._open:
            scope.deadline = max(scope.deadline, self._until + limit)

    async def held_back(self) -> bool:
        """Wait until the throttling ends. Returns whether it has ended for the broker, too."""
        while (left := self._until - anyio.current_time()) > 0:  # noqa: ASYNC110  (the clock sets no event)
            await anyio.sleep(left)
        return self._obeyed

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError after `seconds` that were not throttled."""
        held_back = max(0.0, self._until - anyio.current_time())
        with anyio.fail_after(held_back + seconds) as scope:
            entry = scope, seconds
            self._open.append(entry)
            try:
                yield
            finally:
                self._open.remove(entry)
