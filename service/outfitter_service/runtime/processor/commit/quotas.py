"""The quotas of one writer. Dead letters have theirs in `runtime.dead_letter_quota`, because the sweeper has them, too.

Rewritten records: a record is written again in the state that it has. It is the answer to a repeated registration, has
another queue position, or says more: that a newer incarnation registered, why a worker waits, what delays a release.
A final record counts as well if it repeats long labels or operators.

A message of 80 bytes may ask for a record of 20 kB, or move many records by one place in the queue. So a writer may
rewrite a limited number of bytes, and each host half of them, because a worker may name as many hosts as it likes. What
is beyond that waits until the window is over. Answers wait in turn, each of them once: one of each host, and again. A
manager that is killed forgets which answers wait. The workers register again. What more there is to say is found by
another look at the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota

WINDOW_S = 10.0
"""Seconds for which a quota lasts."""
REWRITTEN_BYTES = 1_000_000
"""Bytes that one writer rewrites within `WINDOW_S`. The half that one host may have is ten times what its workers may
send within the quota of 5 kB/s that deploy/security.md advises."""
_ALL_HOSTS = ""
"""The name of the writer's own window. No host has it."""


class _Window(Struct):
    """A window of one host, or of all. `over_at`: its end in monotonic seconds. `used`: the bytes rewritten in it."""

    over_at: float
    used: int = 0


class RewriteQuota:
    """The quotas of rewritten records of one writer and of its hosts."""

    def __init__(self, clock: Callable[[], float], *, most: int) -> None:
        """`clock`: monotonic seconds. `most`: bytes of all hosts within `WINDOW_S`. Each may have half of them."""
        self._clock = clock
        self._most = most
        self._windows: dict[str, _Window] = {}
        self._waiting: dict[str, dict[AllocationKey, None]] = {}
        self._held_up: set[str] = set()
        self._silent: dict[str, None] = {}
        self._renewed = False

    @property
    def renewed(self) -> bool:
        """Whether a window is over that held up a host."""
        return self._renewed

    @property
    def is_unused(self) -> bool:
        """Whether nothing was rewritten in any window."""
        return not self._windows

    def is_spent(self, host: str) -> bool:
        """Whether nothing is left for a host. Then its rewriting is held up until the window is over."""
        return self._is_used_up(_ALL_HOSTS, self._most) or self._is_used_up(host, self._most // 2)

    def may_tell(self, host: str) -> bool:
        """Whether a host's records may be written again only to say more. If not, `end_windows` names the host."""
        if not self.is_spent(host):
            return True
        self._silent[host] = None
        return False

    def _is_used_up(self, name: str, most: int) -> bool:
        window = self._windows.get(name)
        if window is None or window.used < most:
            return False
        self._held_up.add(name)
        return True

    def use(self, host: str, size: int) -> None:
        """So many bytes are rewritten. The last record of a window may exceed the quota, so each can be written."""
        for name in (host, _ALL_HOSTS):
            window = self._windows.get(name)
            if window is None:
                window = self._windows[name] = _Window(self._clock() + WINDOW_S)
            window.used += size

    def refund(self, used: Mapping[str, int]) -> None:
        """So many bytes of each host were not written after all, because their commit failed."""
        for host, size in used.items():
            for name in (host, _ALL_HOSTS):
                if (window := self._windows.get(name)) is not None:
                    window.used = max(0, window.used - size)

    def end_windows(self) -> list[str]:
        """End the windows that are over. Returns the hosts whose records may now say more, and could not before."""
        now = self._clock()
        for name in [name for name, window in self._windows.items() if window.over_at <= now]:
            del self._windows[name]
            if name in self._held_up:
                self._held_up.discard(name)
                self._renewed = True
        hosts = [host for host in self._silent if not self.is_spent(host)]
        for host in hosts:
            del self._silent[host]
        return hosts

    def take_renewed(self) -> None:
        """A commit rewrites what was held up."""
        self._renewed = False

    # --- answers that wait ---

    def postpone(self, host: str, key: AllocationKey) -> None:
        """The answer for `key` waits."""
        self._waiting.setdefault(host, {})[key] = None

    def has_waiting(self, host: str) -> bool:
        """Whether answers of a host wait."""
        return host in self._waiting

    def take_waiting(self) -> Iterator[AllocationKey]:
        """The answers that wait, of hosts that have something left: one of each host, and again, and of each host the
        longest waiting first. Each is taken when it is asked for."""
        while hosts := list(self._ready()):
            for host in hosts:
                if self.is_spent(host):
                    continue
                keys = self._waiting.pop(host)
                key = next(iter(keys))
                del keys[key]
                if keys:
                    self._waiting[host] = keys  # behind the other hosts
                yield key

    def _ready(self) -> Iterator[str]:
        """The hosts whose answers wait and that have something left."""
        if not self._is_used_up(_ALL_HOSTS, self._most):  # else it looks at no host, as there may be many
            yield from (host for host in self._waiting if not self.is_spent(host))


class Quotas(Struct, frozen=True):
    """One writer's quotas."""

    letters: DeadLetterQuota
    """Of dead letters."""
    naming: DeadLetterQuota
    """Of messages whose unknown fields are named."""
    rewrites: RewriteQuota
    """Of rewritten records."""

    @classmethod
    def of(cls, clock: Callable[[], float], *, rewritten_bytes: int) -> Quotas:
        """New quotas. `clock`: monotonic seconds. `rewritten_bytes`: those of all hosts within `WINDOW_S`."""
        return cls(DeadLetterQuota(clock), DeadLetterQuota(clock), RewriteQuota(clock, most=rewritten_bytes))

    @classmethod
    def unlimited(cls) -> Quotas:
        """Quotas that are never used up."""
        letters, naming = [DeadLetterQuota(lambda: 0.0, most=sys.maxsize) for _ in range(2)]
        return cls(letters, naming, RewriteQuota(lambda: 0.0, most=sys.maxsize))
