"""A clock that stands still while a bus holds this process back, and time limits by that clock.

A broker whose quota is exceeded answers with `throttle_time_ms`, and reads no request from that connection for so long
(KIP-219). A request that is sent meanwhile is answered late. That is no sign of a broken broker, nor that nobody is
there. So it must count in no time limit, however long it takes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import anyio

SAID_AFTER_S = 5.0
"""Seconds of one spell of throttling after which a process says so."""
QUIET_S = 60.0
"""Seconds without throttling that end a spell."""

log = logging.getLogger(__name__)


class Patience:
    """The clock of a connection, of a client with several connections, or of a bus with several clients."""

    def __init__(self, whole: Patience | None = None) -> None:
        """`whole`: the clock of what this is a part of. It stands still as well."""
        self._whole = whole
        self._parts: dict[Patience, float] = {}  # until when each part is held back, itself included
        self._since = self._until = 0.0  # when it stood still last, or stands
        self._stood = 0.0  # seconds for which it stood still before that
        self._limits: list[tuple[anyio.CancelScope, float]] = []
        self._waiting: set[anyio.CancelScope] = set()

    def now(self) -> float:
        """Seconds since some moment, without those for which the bus held us back."""
        real = anyio.current_time()
        return real - self._stood - (min(real, self._until) - self._since)

    def throttle(self, seconds: float) -> None:
        """Stand still for so long, because nothing can be answered meanwhile."""
        self._hold(self, max(self._until, anyio.current_time() + seconds))

    def release(self) -> None:
        """Go on at once: the connection that was held back is gone."""
        if self._until:
            self._hold(self, 0.0)
            for scope in self._waiting:
                scope.cancel()

    @property
    def is_held_back(self) -> bool:
        """Whether it stands still now."""
        return self._until > anyio.current_time()

    async def held_back(self) -> None:
        """Wait until nothing holds this connection back."""
        while (left := self._until - anyio.current_time()) > 0:
            with anyio.CancelScope() as scope:
                self._waiting.add(scope)
                try:
                    await anyio.sleep(left)
                finally:
                    self._waiting.discard(scope)

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raise TimeoutError after so many seconds of this clock."""
        end = self.now() + seconds
        with anyio.CancelScope(deadline=self._moment(end)) as scope:
            self._limits.append(entry := (scope, end))
            try:
                yield
            finally:
                self._limits.remove(entry)
        if scope.cancelled_caught:  # `anyio.fail_after` would not raise if the deadline was moved after it had passed
            raise TimeoutError

    @property
    def sentence(self) -> str | None:
        """That a quota holds this process back, since when, and for how long; None: nothing does."""
        return None

    def _moment(self, end: float) -> float:
        """When this clock will show `end`, as far as is known."""
        return max(anyio.current_time(), self._until) + end - self.now()

    def _hold(self, part: Patience, until: float) -> None:
        real = anyio.current_time()
        self._parts[part] = until
        self._parts = {each: until for each, until in self._parts.items() if until > real}
        if self._until <= real:  # it runs
            self._stood += self._until - self._since
            self._since = real
        self._until = max(self._parts.values(), default=real)
        for scope, end in self._limits:
            scope.deadline = self._moment(end)
        if self._whole is not None:
            self._whole._hold(self, self._until)


class BusPatience(Patience):
    """The clock of a whole bus. It logs each spell of throttling once, if that is long enough to be noticed."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._spell_ends = -math.inf
        self._spell_began = 0.0
        self._stood_before = 0.0
        self._said = False

    @property
    def sentence(self) -> str | None:
        """See `Patience.sentence`. In words for people."""
        real = anyio.current_time()
        if not self._said or real > self._spell_ends:
            return None
        lasted = real - self._spell_began
        held_back = self._stood + min(real, self._until) - self._since - self._stood_before
        since = datetime.fromtimestamp(datetime.now(UTC).timestamp() - lasted, UTC)
        return (
            f"the broker holds this client back, because a quota is exceeded: {held_back:.0f} s of the last "
            f"{lasted:.0f} s, since {since:%Y-%m-%dT%H:%M:%SZ}"
        )

    def _hold(self, part: Patience, until: float) -> None:
        real = anyio.current_time()
        super()._hold(part, until)
        if self._until <= real:
            return
        if real > self._spell_ends:
            self._spell_began, self._stood_before, self._said = real, self._stood, False
        self._spell_ends = self._until + QUIET_S
        if not self._said and self._stood + self._until - self._since - self._stood_before >= SAID_AFTER_S:
            self._said = True
            log.warning(
                "%s: the broker holds this client back, because a quota is exceeded; it goes on in %.0f s",
                self._url, self._until - real,
            )  # fmt: skip
