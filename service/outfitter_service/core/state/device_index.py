"""The devices of one host: what they are called, which resources show them, and which of them are in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation, ResourceInventory
from outfitter_service.core.model import KnownDevice, SpecState
from outfitter_service.core.state.device_names import NO_CLASSES, CanonicalName, Classes, one_name_each
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.matching import ResourceSet, counts
from outfitter_service.core.state.pools import WHOLE, Pools, Usage, usage
from outfitter_service.core.state.resource_state import NOT_REPORTED, ResourceState

_NOT_IN_EFFECT = frozenset(SpecState) - {SpecState.OK}


def exclusive_ids(record: Allocation) -> list[str]:
    """The ids of the devices that a record holds exclusively."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each grant
    return ids


def shared_ids(record: Allocation) -> list[str]:
    """The ids of the devices that a record shares with others."""
    return [info["id"] for resource in record.shared for info in record.resources.get(resource, ())]


class DeviceIndex:
    """The devices of one host. It is a function of its drivers' last reports, of the names in the host's record, and of
    the live records."""

    def __init__(self) -> None:
        self.inventories: dict[str, ResourceState] = {}
        """The resources that have a state, by name."""
        self.suspects: frozenset[AllocationKey] = frozenset()
        """The keys of records because of which an inventory holds back devices."""
        self.has_refused = False
        """The names of some resource have no room in the host's record."""
        self.has_old_names = False
        """The host's record has names of resources that are not in effect any more; it has them while somebody holds a
        device."""
        self.classes: Classes = NO_CLASSES
        """Which names mean one device."""
        self.synonyms: dict[str, CanonicalName] = {}
        """The names that `canonical` replaces. A change makes a new object."""
        self.pools = Pools()
        """What the live records use."""
        self.free_lists: dict[str, FreeList] = {}
        """The devices that are free, by resource."""
        self.shown: dict[CanonicalName, tuple[FreeList, ...]] = {}
        """The free lists that have each device."""
        self.distinct = True
        """No device is in two free lists."""
        self.overlapping: frozenset[str] = frozenset()
        """The resources for which that is not so."""
        self._recorded: Mapping[str, ResourceInventory] | None = None
        self._counts: dict[bool, dict[ResourceSet, int]] = {}

    # --- names ---

    def inventory(self, resource: str) -> ResourceState:
        return self.inventories.get(resource, NOT_REPORTED)

    def canonical(self, name: str) -> CanonicalName:
        """The one name that stands for all names of a device in the host's inventories."""
        return self.synonyms.get(name, name)  # type: ignore[arg-type]  # without another name it stands for itself

    def names(self, record: Allocation, ids: list[str]) -> list[CanonicalName]:
        """The canonical names of a record's devices; several for a device whose names no inventory connects (yet)."""
        same = self.synonyms
        aliases = record.aliases
        if aliases is UNSET:
            if not same:
                return ids  # type: ignore[return-value]  # no device of the host has another name
            return [same.get(device_id, device_id) for device_id in ids]  # type: ignore[arg-type]  # as in `canonical`
        return [
            name
            for device_id in ids
            for name in {same.get(other, other) for other in (device_id, *aliases.get(device_id, ()))}
        ]

    def connected(self, resource: str) -> Sequence[Sequence[str]]:
        """The names of each device in one resource: as its driver reports them or, until the first report, as the
        host's record has them."""
        inventory = self.inventory(resource)
        if inventory.reported or self._recorded is None:
            return inventory.names
        recorded = self._recorded.get(resource)
        if recorded is None or recorded.names is UNSET:
            return inventory.linked
        return [*inventory.linked, *recorded.names]

    @property
    def shows_what_is_held(self) -> bool:
        """Whether drivers report every held device."""
        return self.pools.used.keys() <= self.shown.keys()

    def usage(self, record: Allocation) -> Usage:
        """What a record uses, by all that is known of its devices' names."""
        shared = self.names(record, shared_ids(record)) if record.shared else ()
        return usage(self.names(record, exclusive_ids(record)), shared)

    def device_counts(self, *, lendable: bool) -> Mapping[ResourceSet, int]:
        """How many devices each set of resources has in common. `lendable`: count only those that nothing blocks."""
        by_resources = self._counts.get(lendable)
        if by_resources is None:
            by_resources = self._counts[lendable] = counts(
                tuple([free_list.resource for free_list in free_lists if not lendable or free_list.serves(name)])
                for name, free_lists in self.shown.items()
            )
        return by_resources

    # --- changes ---

    def set_inventory(self, resource: str, inventory: ResourceState, holders: Iterable[Allocation]) -> None:
        """Replace the inventory of a resource. `holders`: the live records."""
        before, connected = self.inventory(resource), self.connected(resource)
        if inventory == NOT_REPORTED:
            self.inventories.pop(resource, None)
        else:
            self.inventories[resource] = inventory
        self.has_refused = any(state.refused is not None for state in self.inventories.values())
        self.suspects = frozenset(
            [state.suspect.key for state in self.inventories.values() if state.suspect is not None]
        )
        if (
            inventory.devices is before.devices
            and inventory.linked == before.linked
            and (inventory.reported == before.reported)
        ):
            return
        if connected or self.connected(resource):
            self._rename(holders)
            return
        if inventory.devices:
            self.free_lists[resource] = self._free_list(resource, inventory.devices)
        else:
            self.free_lists.pop(resource, None)
        self._show()

    def set_recorded(self, resources: Mapping[str, ResourceInventory] | None, holders: Iterable[Allocation]) -> None:
        """Replace what the host's record has of its resources. `holders`: the live records."""
        names = self._recorded_names()
        self._recorded = resources
        self.has_old_names = any(
            inventory.state in _NOT_IN_EFFECT and inventory.names is not UNSET
            for inventory in (resources or {}).values()
        )
        if self._recorded_names() != names:
            self._rename(holders)

    def change(self, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a record that holds devices by another one. None: there is none that does."""
        if before is not None:
            self._hold(before, -1)
        if after is not None:
            self._hold(after, 1)

    def take(self, record: Allocation, names: list[CanonicalName]) -> None:
        """A record holds exclusively the devices that its resource's free list has offered, from now on. `names`: their
        canonical names. A name stands there once for each position that has it."""
        used, shown = self.pools.used, self.shown
        if self.distinct:
            # a free device is in no other index, and a search there would take longer with more devices
            for name in names:
                used[name] = WHOLE
            for resource in record.resources:
                self.free_lists[resource].pop(len(names))
            return
        for name in names:
            used[name] = used.get(name, 0) + WHOLE
            for free_list in shown.get(name, ()):
                free_list.remove(name)

    def _hold(self, record: Allocation, sign: int) -> None:
        """From now on a record holds its devices (`sign` 1), or no longer (-1)."""
        pools, shown = self.pools, self.shown
        for name, use in self.usage(record).items():
            pools.change(name, use, sign)
            for free_list in shown.get(name, ()):
                free_list.refit(name, pools, free_list.free)

    def _free_list(self, resource: str, devices: tuple[KnownDevice, ...]) -> FreeList:
        names = [self.canonical(device.id) for device in devices]
        return FreeList(resource, devices, names=names, classes=self.classes, pools=self.pools)

    def _recorded_names(self) -> list[list[list[str]]]:
        """The names in the host's record, of resources whose drivers have not reported yet."""
        return [
            recorded.names
            for resource, recorded in (self._recorded or {}).items()
            if recorded.names is not UNSET and not self.inventory(resource).reported
        ]

    def _rename(self, holders: Iterable[Allocation]) -> None:
        """The aliases in some resource have changed. Compute again which names mean one device."""
        groups = [
            names for resource in {**self.inventories, **(self._recorded or {})} for names in self.connected(resource)
        ]
        self.synonyms, self.classes = one_name_each(groups)
        self.pools = Pools()
        for record in holders:
            for name, use in self.usage(record).items():
                self.pools.change(name, use, 1)
        self.free_lists = {
            resource: self._free_list(resource, inventory.devices)
            for resource, inventory in self.inventories.items()
            if inventory.devices
        }
        self._show()

    def _show(self) -> None:
        """Compute again which free lists have each device. Nearly every device is in only one."""
        self.shown = {}
        for free_list in self.free_lists.values():
            alone = (free_list,)
            for name in free_list.positions:
                others = self.shown.get(name)
                self.shown[name] = (*others, free_list) if others else alone
        self.distinct = len(self.shown) == sum(len(free_list.devices) for free_list in self.free_lists.values())
        self.overlapping = frozenset()
        self._counts = {}
        if not self.distinct:
            several = {
                free_list.resource
                for free_lists in self.shown.values()
                if len(free_lists) > 1
                for free_list in free_lists
            }
            self.overlapping = frozenset(
                several | {name for name, free_list in self.free_lists.items() if free_list.repeats}
            )
