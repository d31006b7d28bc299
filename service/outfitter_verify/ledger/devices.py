"""Promise 1: an exclusive device is in at most one live allocation, at every prefix of the committed ledger.

A device has several names (its id and its aliases), and several resources may have the same device. A device held under
one name is held under all. A grant's record has its names. The host's record also has the names that only another
resource's driver connects. Shared grants of a device may coexist, but not with an exclusive one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from outfitter_verify.ledger.writers import Written
from outfitter_verify.wire import Allocation


class Holdings:
    """The holders of devices, by host, at one prefix of the ledger."""

    def __init__(self) -> None:
        self._holders: defaultdict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
        self._held: dict[str, tuple[str, frozenset[str]]] = {}
        self._groups: dict[str, list[frozenset[str]]] = {}

    def connect(self, host: str, groups: list[frozenset[str]]) -> None:
        """Set the groups of names that each mean one device of `host`."""
        self._groups[host] = groups

    def _all_names(self, host: str, names: frozenset[str]) -> frozenset[str]:
        groups = self._groups.get(host, ())
        while more := [group for group in groups if not group.isdisjoint(names) and not group <= names]:
            names = names.union(*more)
        return names

    def held(self, host: str) -> set[str]:
        """The names of all held devices of a host."""
        return {name for where, name in self._holders if where == host}

    def all(self) -> Iterator[tuple[str, str, str, bool]]:
        """Each name of a device with its host, its holder's key, and whether the holder has it alone."""
        for (host, name), holders in self._holders.items():
            for key, alone in holders.items():
                yield host, name, key, alone

    def drop(self, key: str) -> None:
        """Remove the holdings of `key`."""
        host, names = self._held.pop(key, ("", frozenset()))
        for name in names:
            holders = self._holders[host, name]
            del holders[key]
            if not holders:
                del self._holders[host, name]

    def put(self, record: Allocation) -> Iterator[tuple[str, str]]:
        """Put `record` under its key. Yields each conflict: a device's name and its other holder."""
        self.drop(record.key)
        if not record.holds:
            return
        own = self._all_names(record.host, record.alone)
        names = own | self._all_names(record.host, record.together)
        self._held[record.key] = (record.host, names)
        yielded: set[str] = set()
        for name in sorted(names):
            alone = name in own
            holders = self._holders[record.host, name]
            for other, has_it_alone in holders.items():
                if (alone or has_it_alone) and other not in yielded:
                    yielded.add(other)
                    yield name, other
            holders[record.key] = alone


def grants(written: Written) -> int:
    """The number of devices in this record that the one before it did not hold."""
    before = written.before.record if written.before is not None else None
    if not written.record.holds:
        return 0
    had = before.alone | before.together if before is not None and before.holds else frozenset()
    return len((written.record.alone | written.record.together) - had)
