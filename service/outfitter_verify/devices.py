"""Promise 1: an exclusive device is in at most one live allocation, at every prefix of the committed ledger.

A device has several names (its id and its aliases), and several resources may show the same one: what is held under
one name is held under all. Sharing is allowed among those who share; nobody may share what somebody has alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from outfitter_verify.wire import Allocation
from outfitter_verify.writers import Written


class Holdings:
    """Who holds what, host by host, at one prefix of the ledger."""

    def __init__(self) -> None:
        self._holders: defaultdict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
        self._held: dict[str, tuple[str, frozenset[str]]] = {}

    def drop(self, key: str) -> None:
        """`key` holds nothing any more."""
        host, names = self._held.pop(key, ("", frozenset()))
        for name in names:
            holders = self._holders[host, name]
            del holders[key]
            if not holders:
                del self._holders[host, name]

    def put(self, record: Allocation) -> Iterator[tuple[str, str]]:
        """`record` is under its key now. Yields what must not be: a device's name, and who else has it."""
        self.drop(record.key)
        if not record.holds:
            return
        names = record.alone | record.together
        self._held[record.key] = (record.host, names)
        told: set[str] = set()
        for name in sorted(names):
            alone = name in record.alone
            holders = self._holders[record.host, name]
            for other, has_it_alone in holders.items():
                if (alone or has_it_alone) and other not in told:
                    told.add(other)
                    yield name, other
            holders[record.key] = alone


def grants(written: Written) -> int:
    """How many devices this record takes that the one before it did not hold."""
    before = written.before.record if written.before is not None else None
    if not written.record.holds:
        return 0
    had = before.alone | before.together if before is not None and before.holds else frozenset()
    return len((written.record.alone | written.record.together) - had)
