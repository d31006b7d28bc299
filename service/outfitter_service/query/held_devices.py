"""Who holds a device, under whichever of its names: the one place that every view asks.

A holder's record has the id under which it got a device, and the aliases that drivers gave it. A host's record may call
the device otherwise: another resource shows it under another name, or the driver has renamed it since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from msgspec import UNSET

from outfitter_proto.records import HOLDING_STATES, Allocation, PoolUse
from outfitter_service.core.state import pools

Names = tuple[str, ...]
"""All names that a record has for one device, sorted."""


class Holding(NamedTuple):
    """A device as one record has it: under the resource and with the infos that were granted."""

    record: Allocation
    resource: str
    info: dict[str, str]

    @property
    def is_shared(self) -> bool:
        """Whether others may have the device, too."""
        return self.resource in self.record.shared


class HeldDevice:
    """One device by the names that records have for it. `alone`: who has it exclusively, by allocation key. `sharing`:
    who may share it. Both are in the order in which they came."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.alone: dict[str, Holding] = {}
        self.sharing: dict[str, Holding] = {}

    def put(self, key: str, holding: Holding) -> None:
        """Add a holder, or replace its record in its place."""
        into, other = (self.sharing, self.alone) if holding.is_shared else (self.alone, self.sharing)
        into[key] = holding
        other.pop(key, None)

    def remove(self, key: str) -> None:
        self.alone.pop(key, None)
        self.sharing.pop(key, None)

    def __bool__(self) -> bool:
        """Whether anybody holds it."""
        return bool(self.alone or self.sharing)


class HeldDevices:
    """The held devices of one host. A change costs as much as its record has devices, whoever else holds them."""

    def __init__(self) -> None:
        self._devices: dict[Names, HeldDevice] = {}
        self._by_name: dict[str, list[HeldDevice]] = {}
        self._of_record: dict[str, dict[Names, Holding]] = {}
        self._pools_of: dict[str, list[str]] = {}
        self._uses: dict[str, dict[str, tuple[Allocation, PoolUse]]] = {}
        """What records say that they use of pools, by the pool's name and the allocation key."""

    def __iter__(self) -> Iterator[HeldDevice]:
        return iter(self._devices.values())

    def put(self, key: str, record: Allocation | None) -> None:
        """Replace the record of an allocation key; None: it is deleted."""
        before, after = self._of_record.pop(key, {}), _holdings(record)
        for names in before.keys() - after.keys():
            self._remove(names, key)
        for names, holding in after.items():
            self._device(names).put(key, holding)
        if after:
            self._of_record[key] = after
        for uses in [self._uses[pool] for pool in self._pools_of.pop(key, ())]:
            uses.pop(key, None)
        if after and record is not None and record.uses:
            self._pools_of[key] = list(record.uses)
            for pool, use in record.uses.items():
                self._uses.setdefault(pool, {})[key] = record, use

    def users(self, names: Iterable[str]) -> dict[str, tuple[Allocation, PoolUse]]:
        """Who uses the pool of the device with these names, by allocation key, and how. Of those who share it, one: so
        this costs little where thousands do."""
        names = list(names)
        said = {key: user for name in names for key, user in self._uses.get(name, {}).items()}
        found = {key: user for key, user in said.items() if not pools.is_replica(user[1])}
        for device in self.with_any(names):
            for key, holding in device.alone.items():
                has_replica = key in said and pools.is_replica(said[key][1])
                found[key] = said[key] if has_replica else (holding.record, pools.ALONE)
            for key, holding in islice(device.sharing.items(), 1):
                found.setdefault(key, (holding.record, pools.SEAT))
        return found

    def with_any(self, names: Iterable[str]) -> list[HeldDevice]:
        """The held devices that have one of these names. They are one device, which records name differently."""
        found: dict[Names, HeldDevice] = {}
        for name in names:
            found.update((device.names, device) for device in self._by_name.get(name, ()))
        return list(found.values())

    def _device(self, names: Names) -> HeldDevice:
        device = self._devices.get(names)
        if device is None:
            device = self._devices[names] = HeldDevice(names)
            for name in names:
                self._by_name.setdefault(name, []).append(device)
        return device

    def _remove(self, names: Names, key: str) -> None:
        device = self._devices[names]
        device.remove(key)
        if device:
            return
        del self._devices[names]
        for name in names:
            self._by_name[name].remove(device)
            if not self._by_name[name]:
                del self._by_name[name]


def _holdings(record: Allocation | None) -> dict[Names, Holding]:
    """The devices that count as held by a record. What it has exclusively, it shares with nobody."""
    if record is None or record.state not in HOLDING_STATES:
        return {}
    found: dict[Names, Holding] = {}
    for resource, infos in record.resources.items():
        for info in infos:
            if "id" in info:
                names, holding = names_in(record, info["id"]), Holding(record, resource, info)
                if names not in found or found[names].is_shared:
                    found[names] = holding
    return found


def names_in(record: Allocation, device_id: str) -> Names:
    """All names that a record has for one of its devices."""
    if record.aliases is UNSET or not record.aliases.get(device_id):
        return (device_id,)
    return tuple(sorted({device_id, *record.aliases[device_id]}))
