"""Devices that are held back: somebody may have them under a name that is not reported any more.

A driver that is replaced, or a resource that is renamed, shows the same devices under new ids, and nothing connects
these with what is held. So while somebody holds a device that is reported no longer, devices that were not known before
are not lent: they count as of unknown health. Those that were known are lent as always; all are when the last such
holder has ended. It is worked out when a driver reports, and when a holder ends because of whom devices are held back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, structs

from outfitter_proto.records import ResourceInventory
from outfitter_service.core.model import KnownDevice, ResourceSpec, SpecState
from outfitter_service.core.state.host_state import HostState, Inventory, Suspect, one_name_each

Specs = Mapping[str, ResourceSpec]
Inventories = Mapping[str, Inventory]


class _Held(Struct, frozen=True, gc=False):
    """A device that the record under `key` holds: the resource and the id it was granted by, its canonical names, and
    whether it has it to itself."""

    key: str
    resource: str
    id: str
    names: frozenset[str]
    alone: bool


def known_of(spec: ResourceSpec, told: ResourceInventory | None) -> tuple[str, ...]:
    """The names of the devices that a host's record says are known of a resource.

    A driver that is asked on demand names a part of its devices: what one with an inventory reported says nothing of
    them.
    """
    if told is None or (spec.on_demand and told.on_demand is UNSET):
        return ()
    if told.known is not UNSET:
        return tuple(told.known)
    names = dict.fromkeys(device.id for device in told.devices)
    for group in told.names or ():
        if not names.keys().isdisjoint(group):
            names.update(dict.fromkeys(group))
    return tuple(names)


def remembered(spec: ResourceSpec, told: ResourceInventory | None) -> list[str] | UnsetType:
    """What a host's record keeps of a resource's known devices while its driver has not reported."""
    known = list(known_of(spec, told))
    if known or (told is not None and (told.devices or told.known is not UNSET)):
        return known
    return UNSET


def compared(host_state: HostState, spec: ResourceSpec, before: Inventory, report: Inventory) -> Inventory:
    """A driver's report, with the names that were known of its resource if it may have devices that are new.

    A driver that is asked on demand names more devices whenever it is asked for more. They are not new, unless the
    driver is. Where nobody's device is missing, a driver that names more devices than before has new ones.
    """
    names = set(report.names_of_all)
    if before.reported:
        was_open = before.known is not None
        known = before.names_of_all if before.known is None else before.known
        if not was_open and names.issuperset(known) and host_state.shows_what_is_held:
            return report
    else:
        told = host_state.record.resources.get(spec.name) if host_state.record is not None else None
        known = known_of(spec, told)
        was_open = not known
    if not was_open and (spec.on_demand or set(known) == names):
        return report
    return structs.replace(report, known=known)


def settled(host_state: HostState, specs: Specs, inventories: Inventories) -> dict[str, Inventory]:
    """Those of a host's inventories, the latest report included, that hold back other devices from now on."""
    unsettled = [name for name, inventory in inventories.items() if inventory.known is not None and name in specs]
    if not unsettled:
        return {}
    look = _Look(host_state, specs, inventories)
    found = {name: look.settled(name) for name in unsettled}
    return {name: inventory for name, inventory in found.items() if inventory != inventories[name]}


class _Look:
    """A host's holders and inventories at one moment, and what follows for one resource after the other."""

    def __init__(self, host_state: HostState, specs: Specs, inventories: Inventories) -> None:
        self._host_state = host_state
        self._specs = specs
        self._inventories = inventories
        self._same = _same(host_state, inventories)
        self._held = list(self._holders())
        self._not_new = {name for held in self._held for name in held.names}
        for inventory in inventories.values():
            names = inventory.names_of_all if inventory.known is None else inventory.known
            self._not_new.update(self._same.get(name, name) for name in names)
        reported = {self._name(device) for inventory in inventories.values() for device in inventory.found}
        self._missing = [held for held in self._held if self._is_missing(held, reported)]

    def _holders(self) -> Iterator[_Held]:
        same = self._same
        for key, record in sorted(self._host_state.live.items()):
            aliases = record.aliases or {}
            for resource, infos in record.resources.items():
                alone = resource not in record.shared
                for info in infos:
                    names = [same.get(name, name) for name in (info["id"], *aliases.get(info["id"], ()))]
                    yield _Held(key, resource, info["id"], frozenset(names), alone)

    def _name(self, device: KnownDevice) -> str:
        return self._same.get(device.id, device.id)

    def _is_missing(self, held: _Held, reported: set[str]) -> bool:
        """No driver reports it, and none that is asked on demand may name it when it is asked the next time."""
        if not held.names.isdisjoint(reported):
            return False
        spec = self._specs.get(held.resource)
        if spec is None or spec.state != SpecState.OK or not spec.on_demand:
            return True
        inventory = self._inventories.get(held.resource)
        if inventory is not None and inventory.reported:
            return inventory.known is not None
        told = self._host_state.record.resources.get(held.resource) if self._host_state.record is not None else None
        return told is None or told.on_demand is UNSET or told.known == []

    def settled(self, resource: str) -> Inventory:
        """An inventory with those devices held back that are to be."""
        spec, inventory = self._specs[resource], self._inventories[resource]
        known = {self._same.get(name, name) for name in inventory.known or ()}
        suspect = self._suspect(spec, inventory, known)
        if suspect is None:
            return inventory.with_all_known()
        new = {device.id for device in inventory.found if self._name(device) not in self._not_new}
        if inventory.known:
            others = [name for one in inventory.found if one.id not in new for name in (one.id, *one.aliases)]
            inventory = structs.replace(inventory, known=tuple(dict.fromkeys([*inventory.known, *others])))
        return inventory.with_held_back(frozenset(new), Suspect(suspect.key, suspect.resource, suspect.id))

    def _suspect(self, spec: ResourceSpec, inventory: Inventory, known: set[str]) -> _Held | None:
        """Somebody who may hold a device that is new in this resource: one that its driver knew before or, where the
        driver knew none or that of the holder is not configured any more, any that no driver reports."""
        named = {self._name(device) for device in inventory.found}
        for held in self._held:
            was_named = held.resource == spec.name or not held.names.isdisjoint(known)
            if (held.alone or not spec.shared) and was_named and held.names.isdisjoint(named):
                return held
        for held in self._missing:
            if (held.alone or not spec.shared) and (not inventory.known or not self._is_served(held.resource)):
                return held
        return None

    def _is_served(self, resource: str) -> bool:
        spec = self._specs.get(resource)
        return spec is not None and spec.state == SpecState.OK


def _same(host_state: HostState, inventories: Inventories) -> Mapping[str, str]:
    """What `HostState.canonical` looks up, once the inventories are as given."""
    told = host_state.record.resources if host_state.record is not None else {}
    groups: list[Sequence[str]] = []
    for resource in {**inventories, **told}:
        inventory = inventories.get(resource)
        groups += inventory.names if inventory is not None and inventory.reported else host_state.connected(resource)
    return one_name_each(groups)[0]
