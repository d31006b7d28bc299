"""What live records use of the pools of a host: the counter that keeps devices from being lent twice.

Each device has a pool of its own, under its canonical name, with `WHOLE` in it. Two rules hold in each pool:

1. The uses add up to at most the pool's total.
2. Uses with a word all have the same word. A use without one agrees with any, and two joined words with no other.

A record never competes with itself. It uses each pool once, by the `joined` use of all that it has there. Databases
know these uses as the modes of multi-granularity locking:

| mode | who has it | amount | word |
|---|---|---|---|
| X, `ALONE` | has the device alone | all | |
| S, `SEAT` | shares the device | 1 | `shared` |
| IX, `PART` | has a part of it alone | 1 | `parts` |
| IS, `SHARED_PART` | shares a part of it | 1 | |
| SIX | has a part of it alone, and shares it | 1 | `parts+shared` |
| (none), `replica` | has one of n replicas of it | all / n | `replicas` |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from outfitter_proto.records import PoolUse
from outfitter_service.core.state.device_names import CanonicalName

WHOLE = 720_720
"""The total of a device's own pool. Every number up to 16 divides it."""
SHARED, PARTS, REPLICAS = "shared", "parts", "replicas"

ALONE = PoolUse(WHOLE, WHOLE)
SEAT = PoolUse(1, WHOLE, SHARED)
PART = PoolUse(1, WHOLE, PARTS)
SHARED_PART = PoolUse(1, WHOLE)

Usage = dict[CanonicalName, PoolUse]
"""What one record uses, by pool."""

MOST_REPLICAS = 256
"""Most replicas of a device. With more than 848 of them, `WHOLE` would have room for one too many."""


def replica(count: int) -> PoolUse:
    """One of `count` replicas of a device. The only replica is the whole."""
    return ALONE if count == 1 else PoolUse(WHOLE // count, WHOLE, REPLICAS)


def several(use: PoolUse, count: int) -> PoolUse:
    """That use, so many times by one record."""
    return use if count == 1 else PoolUse(use.amount * count, use.total, use.word)


def is_replica(use: PoolUse) -> bool:
    """Whether a record with that use of a device has replicas of it."""
    return REPLICAS in use.word


def joined(one: PoolUse, other: PoolUse) -> PoolUse:
    """One record's use of a pool, for two reasons: the least use that is at least both."""
    if one in (other, ALONE):
        return one
    if other == ALONE:
        return other
    words = {*one.word.split("+"), *other.word.split("+")} - {""}
    return PoolUse(max(one.amount, other.amount), one.total, "+".join(sorted(words)))


def join(uses: Usage, pool: CanonicalName, use: PoolUse) -> None:
    """Add a record's use of a pool, for one more reason."""
    uses[pool] = joined(uses[pool], use) if pool in uses else use


def may_exclude(one: PoolUse, other: PoolUse) -> bool:
    """Whether two records' uses of a pool may be in each other's way: together, or with those of others. Any number of
    seats have room."""
    if is_replica(one) or is_replica(other) or one.amount + other.amount > one.total:
        return True
    return bool(one.word and other.word) and not _agree(one.word, other.word)


def _agree(one: str, other: str) -> bool:
    return one == other and "+" not in one


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

    def words_of(self, pool: CanonicalName) -> frozenset[str]:
        """The words of a pool's uses."""
        if self._base is None:
            return frozenset(self.words.get(pool, ()))
        if pool not in self.words:
            return self._base.words_of(pool)
        return frozenset([word for word in {*self._base.words_of(pool), *self.words[pool]} if self.count(pool, word)])

    def is_shared(self, pool: CanonicalName) -> bool:
        """Whether all of a pool's users share the device. There may be none."""
        return self.amount(pool) == self.count(pool, SHARED)

    def fits(self, pool: CanonicalName, use: PoolUse) -> bool:
        """Whether both rules allow one more use."""
        used = self.amount(pool)
        if used + use.amount > use.total:
            return False
        return not used or not use.word or all(_agree(use.word, word) for word in self.words_of(pool))

    def change(self, pool: CanonicalName, use: PoolUse, sign: int) -> bool:
        """A record uses so much more of a pool from now on (`sign` 1), or no longer (-1). Returns whether others may
        have another answer from `fits` since then."""
        # a seat without a word may stand beside replicas, and then keeps the last one from others
        is_seat = use.amount == 1 and use.word != ""
        before = (not self.amount(pool), self.words_of(pool)) if is_seat else None
        _add(self.used, pool, sign * use.amount)
        if use.word:
            words = self.words.setdefault(pool, {})
            _add(words, use.word, sign)
            if not words:
                del self.words[pool]
        # no pool has so many seats that one of them is the last
        return before is None or before != (not self.amount(pool), self.words_of(pool))


_Name = TypeVar("_Name", bound=str)


def _add(counts: dict[_Name, int], name: _Name, count: int) -> None:
    total = counts.get(name, 0) + count
    if total:
        counts[name] = total
    else:
        counts.pop(name, None)


def usage(alone: Iterable[CanonicalName], shared: Iterable[CanonicalName]) -> Usage:
    """What a record uses that has some devices `alone` and some `shared`, and no parts and no replicas."""
    uses: Usage = dict.fromkeys(alone, ALONE)
    for name in shared:
        uses.setdefault(name, SEAT)
    return uses
