"""The quotas of one writer. Dead letters have theirs in `runtime.dead_letter_quota`, because the sweeper has them, too.

Rewritten records: a record is written again without a step, as the answer to a repeated registration or
because of its queue position.

A message of 80 bytes may ask for a record of 20 kB, or move many records by one place in the queue. So each host may
rewrite a limited number of bytes. What is beyond it waits until the host's window is over. Answers wait in turn, each
of them once. A manager that is killed forgets which answers wait. The workers register again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota

WINDOW_S = 10.0
"""Seconds for which a quota lasts."""
REWRITTEN_BYTES = 10_000_000
"""Bytes that one host rewrites within `WINDOW_S`: ten times what a worker may send within the quota of 100 kB/s that
deploy/security.md advises."""


class _Window(Struct):
    """A host's window. `over_at`: its end in monotonic seconds. `used`: the bytes that were rewritten in it."""

    over_at: float
    used: int = 0


class RewriteQuota:
    """The quotas of rewritten records of one writer's hosts."""

    def __init__(self, clock: Callable[[], float], *, most: int) -> None:
        """`clock`: monotonic seconds. `most`: bytes of one host within `WINDOW_S`."""
        self._clock = clock
        self._most = most
        self._windows: dict[str, _Window] = {}
        self._waiting: dict[str, dict[AllocationKey, None]] = {}
        self._held_up: set[str] = set()
        self._renewed = False

    @property
    def renewed(self) -> bool:
        """Whether the window of a host is over that had more to rewrite."""
        return self._renewed

    def is_spent(self, host: str) -> bool:
        """Whether nothing is left for a host. Then its rewriting is held up until its window is over."""
        window = self._windows.get(host)
        if window is None or window.used < self._most:
            return False
        self._held_up.add(host)
        return True

    def use(self, host: str, size: int) -> None:
        """So many bytes are rewritten. The last record of a window may exceed the quota, so each can be written."""
        window = self._windows.get(host)
        if window is None:
            window = self._windows[host] = _Window(self._clock() + WINDOW_S)
        window.used += size

    def give_back(self, used: Mapping[str, int]) -> None:
        """So many bytes of each host were not written after all, because their commit failed."""
        for host, size in used.items():
            if (window := self._windows.get(host)) is not None:
                window.used = max(0, window.used - size)

    def end_windows(self) -> None:
        """End the windows that are over."""
        now = self._clock()
        for host in [host for host, window in self._windows.items() if window.over_at <= now]:
            del self._windows[host]
            if host in self._held_up:
                self._held_up.discard(host)
                self._renewed = True

    def take_renewed(self) -> None:
        """A commit rewrites what was held up."""
        self._renewed = False

    # --- answers that wait ---

    def postpone(self, host: str, key: AllocationKey) -> None:
        """The answer for `key` waits."""
        self._waiting.setdefault(host, {})[key] = None

    def forget(self, host: str, key: AllocationKey) -> None:
        """The answer for `key` waits no longer."""
        self._waiting.get(host, {}).pop(key, None)

    def has_waiting(self, host: str) -> bool:
        """Whether answers of a host wait."""
        return bool(self._waiting.get(host))

    @property
    def has_ready(self) -> bool:
        """Whether answers wait of a host that has something left."""
        return any(keys and not self.is_spent(host) for host, keys in self._waiting.items())

    def take_waiting(self) -> Iterator[AllocationKey]:
        """The answers that wait, of hosts that have something left, one after the other and the longest waiting first.
        Each is taken when it is asked for."""
        for host in [host for host in self._waiting if not self.is_spent(host)]:
            keys = self._waiting[host]
            while keys and not self.is_spent(host):
                key = next(iter(keys))
                del keys[key]
                yield key
            if not keys:
                del self._waiting[host]


class Quotas(Struct, frozen=True):
    """One writer's quotas. `letters`: of dead letters. `naming`: of messages whose unknown fields are named.
    `rewrites`: of rewritten records."""

    letters: DeadLetterQuota
    naming: DeadLetterQuota
    rewrites: RewriteQuota

    @classmethod
    def of(cls, clock: Callable[[], float], *, rewritten_bytes: int) -> Quotas:
        """New quotas. `clock`: monotonic seconds. `rewritten_bytes`: those of one host within `WINDOW_S`."""
        return cls(DeadLetterQuota(clock), DeadLetterQuota(clock), RewriteQuota(clock, most=rewritten_bytes))

    @classmethod
    def unlimited(cls) -> Quotas:
        """Quotas that are never used up."""
        letters, naming = [DeadLetterQuota(lambda: 0.0, most=sys.maxsize) for _ in range(2)]
        return cls(letters, naming, RewriteQuota(lambda: 0.0, most=sys.maxsize))
