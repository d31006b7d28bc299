"""Devices that are held back: a worker may hold them under an id that is no longer reported.

After somebody replaces a driver or renames a resource, the same devices appear under new ids. Nothing connects these
with the held ids. So while a worker holds a device that no driver reports any more, new devices have unknown health
and are not granted. Known devices are granted as always. When the last such holder has ended, all devices are granted
again. The core assesses this when a driver reports, and when such a holder ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, structs

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import ResourceInventory
from outfitter_service.core.model import KnownDevice, ResourceSpec, SpecState
from outfitter_service.core.state.device_names import CanonicalName, one_name_each
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.resource_state import ResourceState, Suspect

Specs = Mapping[str, ResourceSpec]
Inventories = Mapping[str, ResourceState]


class _HeldDevice(Struct, frozen=True, gc=False):
    """A device that the record under `key` holds: `resource` and `id` of its grant, and its canonical `names`.
    `alone`: the record holds it exclusively."""

    key: AllocationKey
    resource: str
    id: str
    names: frozenset[CanonicalName]
    alone: bool


def recorded_names(spec: ResourceSpec, recorded: ResourceInventory | None) -> tuple[str, ...]:
    """The names of a resource's known devices in the host's record (`recorded`).

    An on-demand driver names only some of its devices, so the inventory of an earlier driver says nothing about them.
    """
    if recorded is None or (spec.on_demand and recorded.on_demand is UNSET):
        return ()
    if recorded.known is not UNSET:
        return tuple(recorded.known)
    names = dict.fromkeys(device.id for device in recorded.devices)
    for group in recorded.names or ():
        if not names.keys().isdisjoint(group):
            names.update(dict.fromkeys(group))
    return tuple(names)


def names_to_keep(spec: ResourceSpec, recorded: ResourceInventory | None) -> list[str] | UnsetType:
    """The known names that a host's record keeps of a resource until its driver reports."""
    names = list(recorded_names(spec, recorded))
    if names or (recorded is not None and (recorded.devices or recorded.known is not UNSET)):
        return names
    return UNSET


def with_known_names(
    host_state: HostState, spec: ResourceSpec, before: ResourceState, report: ResourceState
) -> ResourceState:
    """A driver's report, with the earlier names of its resource if some of its devices may be known under other names.

    An on-demand driver names more devices whenever the manager asks it for more. They count as new only if the driver
    is new. If drivers report every held device, additional devices are really new.
    """
    names = set(report.names_of_all)
    if before.reported:
        was_open = before.known is not None
        earlier_names = before.names_of_all if before.known is None else before.known
        if not was_open and names.issuperset(earlier_names) and host_state.shows_what_is_held:
            return report
    else:
        recorded = host_state.record.resources.get(spec.name) if host_state.record is not None else None
        earlier_names = recorded_names(spec, recorded)
        if not spec.shared and _was_missing(host_state, spec.name, earlier_names):
            earlier_names = ()
        was_open = not earlier_names
    if not was_open and (spec.on_demand or set(earlier_names) == names):
        return report
    return structs.replace(report, known=earlier_names)


def _was_missing(host_state: HostState, resource: str, earlier_names: Iterable[str]) -> bool:
    """Whether somebody shares a device of a resource that was missing before this restart: an earlier version recorded
    its new names as known, because it held back nothing that is shared."""
    names = set(earlier_names)
    return any(
        names.isdisjoint((info["id"], *(record.aliases or {}).get(info["id"], ())))
        for record in host_state.holders.live.values()
        if resource in record.shared
        for info in record.resources.get(resource, ())
    )


def reassessed(host_state: HostState, specs: Specs, inventories: Inventories) -> dict[str, ResourceState]:
    """Those of a host's inventories whose held-back devices change. `inventories`: the current ones, the latest report
    included."""
    known = [name for name, inventory in inventories.items() if inventory.known is not None and name in specs]
    if not known:
        return {}
    if host_state.holders.live:
        check = _HeldBackCheck(host_state, specs, inventories)
        assessed = {name: check.reassessed(name) for name in known}
    else:  # no worker holds a device: the check of all names of all inventories is not needed
        assessed = {name: inventories[name].with_all_known() for name in known}
    return {name: inventory for name, inventory in assessed.items() if inventory != inventories[name]}


class _HeldBackCheck:
    """Finds the devices of a host that must be held back, by its holders and inventories at one moment."""

    def __init__(self, host_state: HostState, specs: Specs, inventories: Inventories) -> None:
        self._host_state = host_state
        self._specs = specs
        self._inventories = inventories
        self._same = _same(host_state, inventories)
        self._held = list(self._holders())
        # whoever shares a device may have got it as a new one
        self._not_new = {name for held in self._held if held.alone for name in held.names}
        for inventory in inventories.values():
            names = inventory.names_of_all if inventory.known is None else inventory.known
            self._not_new.update(self._canonical(name) for name in names)
        reported = {self._name(device) for inventory in inventories.values() for device in inventory.as_reported}
        self._missing = [held for held in self._held if self._is_missing(held, reported)]

    def _holders(self) -> Iterator[_HeldDevice]:
        for key, record in sorted(self._host_state.holders.live.items()):
            aliases = record.aliases or {}
            for resource, infos in record.resources.items():
                alone = resource not in record.shared
                for info in infos:
                    names = [self._canonical(name) for name in (info["id"], *aliases.get(info["id"], ()))]
                    yield _HeldDevice(key, resource, info["id"], frozenset(names), alone)

    def _name(self, device: KnownDevice) -> CanonicalName:
        return self._canonical(device.id)

    def _canonical(self, name: str) -> CanonicalName:
        return CanonicalName(self._same.get(name, name))

    def _is_missing(self, held: _HeldDevice, reported: set[CanonicalName]) -> bool:
        """Whether no driver reports the device, and no on-demand driver may name it when it is asked again."""
        if not held.names.isdisjoint(reported):
            return False
        spec = self._specs.get(held.resource)
        if spec is None or spec.state != SpecState.OK or not spec.on_demand:
            return True
        inventory = self._inventories.get(held.resource)
        if inventory is not None and inventory.reported:
            return inventory.known is not None
        host = self._host_state.record
        recorded = host.resources.get(held.resource) if host is not None else None
        return recorded is None or recorded.on_demand is UNSET or recorded.known == []

    def reassessed(self, resource: str) -> ResourceState:
        """The resource's inventory with the devices that must be held back now."""
        spec, inventory = self._specs[resource], self._inventories[resource]
        known_names = {self._canonical(name) for name in inventory.known or ()}
        suspects = list(self._suspects(spec, inventory, known_names))
        if not suspects:
            return inventory.with_all_known()
        new_ids = {device.id for device in inventory.as_reported if self._name(device) not in self._not_new}
        if inventory.known:
            others = [
                name
                for device in inventory.as_reported
                if device.id not in new_ids
                for name in (device.id, *device.aliases)
            ]
            inventory = structs.replace(inventory, known=tuple(dict.fromkeys([*inventory.known, *others])))
        # sharers may share new devices as well; those stay new, because the resource may become exclusive
        suspect = next((held for held in suspects if held.alone or not spec.shared), None)
        if suspect is None:
            suspect, new_ids = suspects[0], set()
        return inventory.with_held_back(frozenset(new_ids), Suspect(suspect.key, suspect.resource, suspect.id))

    def _suspects(
        self, spec: ResourceSpec, inventory: ResourceState, known_names: set[CanonicalName]
    ) -> Iterator[_HeldDevice]:
        """The held devices that may be a new device of this resource: those that its driver knew before. If the driver
        knew none, or the holder's resource is not configured any more: all held devices that no driver reports."""
        reported = {self._name(device) for device in inventory.as_reported}
        for held in self._held:
            was_known = held.resource == spec.name or not held.names.isdisjoint(known_names)
            if was_known and held.names.isdisjoint(reported):
                yield held
        for held in self._missing:
            if not inventory.known or not self._is_served(held.resource):
                yield held

    def _is_served(self, resource: str) -> bool:
        spec = self._specs.get(resource)
        return spec is not None and spec.state == SpecState.OK


def _same(host_state: HostState, inventories: Inventories) -> Mapping[str, CanonicalName]:
    """For these inventories: the canonical name of each device's other names, as `DeviceIndex.canonical` has them."""
    recorded = host_state.record.resources if host_state.record is not None else {}
    groups: list[Sequence[str]] = []
    for resource in {**inventories, **recorded}:
        inventory = inventories.get(resource)
        groups += (
            inventory.names
            if inventory is not None and inventory.reported
            else host_state.devices.connected(resource).names
        )
    return one_name_each(groups)[0]
