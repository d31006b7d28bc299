"""Promise 1: at every prefix of the committed ledger, live allocations use no more of a device than there is.

A device has several names (its id and its aliases), and several resources may have the same device. A device held under
one name is held under all. A grant's record has its names. The host's record also has the names that only another
resource's driver connects, and what is part of what.

A device is a pool of 720,720. Who has it alone uses all of it, who shares it a seat. Who has a part of it uses a seat,
too. A record says in `uses` what it uses otherwise. The uses add up to at most the total, and their words agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

from outfitter_verify.ledger.writers import Written
from outfitter_verify.wire import Allocation, HostInventory, PoolUse

_WHOLE = 720_720
_ALONE, _SEAT = PoolUse(_WHOLE, _WHOLE, ""), PoolUse(1, _WHOLE, "shared")
_PART, _SHARED_PART = PoolUse(1, _WHOLE, "parts"), PoolUse(1, _WHOLE, "")


class Links:
    """What one host's record connects: names of one device, and parts with their wholes."""

    def __init__(self, inventories: Iterable[HostInventory] = ()) -> None:
        inventories = list(inventories)
        self._groups = [names for each in inventories for names in each.connected]
        self._parts = [pair for each in inventories for pair in each.parts]

    def all_names(self, names: frozenset[str]) -> frozenset[str]:
        """These names, and all others of the same devices."""
        while more := [group for group in self._groups if not group.isdisjoint(names) and not group <= names]:
            names = names.union(*more)
        return names

    def wholes(self, names: frozenset[str]) -> frozenset[str]:
        """All names of what the device with these names is a part of, directly or not."""
        return self._related(names, self._parts)

    def parts(self, names: frozenset[str]) -> frozenset[str]:
        """All names of its parts, and of theirs."""
        return self._related(names, [(whole, part) for part, whole in self._parts])

    def _related(self, names: frozenset[str], pairs: list[tuple[str, str]]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        todo = names
        while more := self.all_names(frozenset([other for one, other in pairs if one in todo])) - found - names:
            found, todo = found | more, more
        return found


class Holdings:
    """What is used of devices, by host and name, at one prefix of the ledger."""

    def __init__(self) -> None:
        self._uses: defaultdict[tuple[str, str], dict[str, PoolUse]] = defaultdict(dict)
        """By allocation key."""
        self._held: dict[str, tuple[str, frozenset[str]]] = {}
        self._links: defaultdict[str, Links] = defaultdict(Links)

    def connect(self, host: str, inventories: Iterable[HostInventory]) -> None:
        """Take what the record of `host` connects."""
        self._links[host] = Links(inventories)

    def held(self, host: str) -> set[str]:
        """The names of all devices of a host of which somebody has anything, and of parts of what somebody has."""
        found = {name for where, name in self._uses if where == host}
        kept = [name for name in found if not all(map(_PART.agrees, self._uses[host, name].values()))]
        kept += [name for name in found if _ALONE in self._uses[host, name].values()]
        return found | self._links[host].parts(frozenset(kept))

    def has_replica(self, host: str, names: Collection[str], replicas: int) -> bool:
        """Whether others have some replicas of the device with these names, and one is left."""
        uses = [use for name in names for use in self._uses.get((host, name), {}).values()]
        used = [sum([use.amount for use in self._uses.get((host, name), {}).values()]) for name in names]
        return bool(uses) and all(use.word == "replicas" for use in uses) and max(used) + _WHOLE // replicas <= _WHOLE

    def all(self) -> Iterator[tuple[str, str, str, bool]]:
        """Each name of a device with its host, its holder's key, and whether the holder has it alone."""
        for (host, name), users in self._uses.items():
            for key, use in users.items():
                if use.word not in {_PART.word, _SHARED_PART.word} or use == _ALONE:
                    yield host, name, key, use.word != _SEAT.word

    def drop(self, key: str) -> None:
        """Remove what the record under `key` uses."""
        host, names = self._held.pop(key, ("", frozenset()))
        for name in names:
            users = self._uses[host, name]
            del users[key]
            if not users:
                del self._uses[host, name]

    def put(self, record: Allocation) -> Iterator[tuple[str, str]]:
        """Put `record` under its key. Yields each conflict: a device's name and its other holder."""
        self.drop(record.key)
        if not record.holds:
            return
        uses = self._uses_of(record)
        self._held[record.key] = (record.host, frozenset(uses))
        yielded: set[str] = set()
        for name, use in sorted(uses.items()):
            users = self._uses[record.host, name]
            in_the_way = [key for key, other in users.items() if _exclude(use, other)]
            if not in_the_way and sum([other.amount for other in users.values()]) + use.amount > use.total:
                in_the_way = list(users)  # together, as holders of replicas are
            for key in in_the_way:
                if key not in yielded:
                    yielded.add(key)
                    yield name, key
            users[record.key] = use

    def _uses_of(self, record: Allocation) -> dict[str, PoolUse]:
        """What a record uses, by all names of each device. It does not compete with itself."""
        links = self._links[record.host]
        uses: dict[str, PoolUse] = {}
        replicas = {pool: use for pool, use in record.uses.items() if "replicas" in use.word}
        for pool, use in replicas.items():
            uses |= dict.fromkeys(links.all_names(frozenset({pool})), use)
        alone = links.all_names(record.alone) - uses.keys()
        shared = links.all_names(record.together) - uses.keys() - alone
        uses |= {**dict.fromkeys(alone, _ALONE), **dict.fromkeys(shared, _SEAT)}
        above = {
            **dict.fromkeys(links.wholes(shared), _SHARED_PART),
            **dict.fromkeys(links.wholes(alone | frozenset(replicas)), _PART),
        }
        for pool, use in record.uses.items():
            if pool not in replicas:
                above |= dict.fromkeys(links.all_names(frozenset({pool})), use)
        for name, use in above.items():
            uses[name] = _joined(uses[name], use) if name in uses else use
        return uses


def _exclude(one: PoolUse, other: PoolUse) -> bool:
    """Whether two uses of a device are in each other's way, whoever else uses it."""
    return not one.agrees(other) or one.amount + other.amount > one.total


def _joined(one: PoolUse, other: PoolUse) -> PoolUse:
    """One record's use of a device for two reasons."""
    if _ALONE in (one, other):
        return _ALONE
    words = {*one.word.split("+"), *other.word.split("+")} - {""}
    return PoolUse(max(one.amount, other.amount), one.total, "+".join(sorted(words)))


def grants(written: Written) -> int:
    """The number of devices in this record that the one before it did not hold."""
    before = written.before.record if written.before is not None else None
    if not written.record.holds:
        return 0
    had = before.alone | before.together if before is not None and before.holds else frozenset()
    return len((written.record.alone | written.record.together) - had)
