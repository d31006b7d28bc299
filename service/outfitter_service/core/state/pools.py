"""What live records use of the pools of a host.

Each device has a pool of its own, under its canonical name, with `WHOLE` in it. Who has the device alone uses all of
it. Who shares it uses a seat, with a word.

- **Rule 1**: the uses of a pool add up to at most its total.
- **Rule 2**: the uses of a pool have one word; a use without a word agrees with any. (Databases know these two rules as
  the modes of multi-granularity locking: X is the whole without a word, S a seat with the word `shared`.)

A record never competes with itself. It uses each pool once, and what it has alone covers what it shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from outfitter_service.core.state.device_names import CanonicalName

WHOLE = 720_720
"""The total of a device's own pool. Every number up to 16 divides it."""
SHARED = "shared"
"""The word of those who share a device."""


class PoolUse(NamedTuple):
    """What one record uses of one pool."""

    amount: int
    word: str = ""


ALONE = PoolUse(WHOLE)
SEAT = PoolUse(1, SHARED)

Usage = dict[CanonicalName, PoolUse]
"""What one record uses, by pool."""


class Pools:
    """What is used of a host's pools. A pool of which nothing is used has no entry."""

    __slots__ = ("_base", "used", "words")

    def __init__(self, base: Pools | None = None) -> None:
        """`base`: these pools have only what differs from it."""
        self._base = base
        self.used: dict[CanonicalName, int] = {}
        """The amounts."""
        self.words: dict[CanonicalName, dict[str, int]] = {}
        """How many uses have each word."""

    def amount(self, pool: CanonicalName) -> int:
        """How much of a pool is used."""
        own = self.used.get(pool, 0)
        return own if self._base is None else own + self._base.amount(pool)

    def count(self, pool: CanonicalName, word: str) -> int:
        """How many uses of a pool have a word."""
        own = self.words.get(pool)
        count = own.get(word, 0) if own is not None else 0
        return count if self._base is None else count + self._base.count(pool, word)

    def is_shared(self, pool: CanonicalName) -> bool:
        """Whether all of a pool's users share the device. There may be none."""
        return self.amount(pool) == self.count(pool, SHARED)

    def change(self, pool: CanonicalName, use: PoolUse, sign: int) -> None:
        """A record uses so much more of a pool from now on (`sign` 1), or no longer (-1)."""
        _add(self.used, pool, sign * use.amount)
        if use.word:
            words = self.words.setdefault(pool, {})
            _add(words, use.word, sign)
            if not words:
                del self.words[pool]


_Name = TypeVar("_Name", bound=str)


def _add(counts: dict[_Name, int], name: _Name, count: int) -> None:
    total = counts.get(name, 0) + count
    if total:
        counts[name] = total
    else:
        counts.pop(name, None)


def usage(alone: Iterable[CanonicalName], shared: Iterable[CanonicalName]) -> Usage:
    """What a record uses that has some devices `alone` and some `shared`."""
    uses: Usage = dict.fromkeys(alone, ALONE)
    for name in shared:
        uses.setdefault(name, SEAT)
    return uses
