"""The devices of one host: what they are called, which resources show them, and which of them are in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime

from msgspec import UNSET, UnsetType

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation, PoolUse, ResourceInventory
from outfitter_service.core.model import Devices, SpecState
from outfitter_service.core.state import recovery
from outfitter_service.core.state.device_names import (
    NO_CLASSES,
    CanonicalName,
    Classes,
    Links,
    by_whole,
    one_name_each,
    pairs,
    wholes_of,
)
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.matching import ResourceSet, counts
from outfitter_service.core.state.pools import (
    ALONE,
    PART,
    SEAT,
    SHARED_PART,
    WHOLE,
    Pools,
    Usage,
    is_replica,
    join,
    several,
    usage,
)
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


def _unsaid(uses: Usage, said: Usage) -> dict[str, PoolUse] | UnsetType:
    """The uses that a record must say besides those that its devices say already."""
    return {str(pool): uses[pool] for pool in sorted(uses) if said.get(pool) != uses[pool]} or UNSET


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
        self.recovers_at: datetime | None = None
        """When the first device that was ill may be lent again; None: there is none, see `recovery`."""
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
        self.users: dict[CanonicalName, tuple[FreeList, ...]] = {}
        """The free lists with devices that use each pool: the device itself, and its parts."""
        self.above: Mapping[CanonicalName, tuple[CanonicalName, ...]] = {}
        """What each device is part of, directly or not. Only devices that are."""
        self.unrecorded: Mapping[CanonicalName, list[CanonicalName]] = {}
        """The parts that the host's record may lack, because a refused report connects them, by each device that they
        are part of. So who holds that device says in its own record that it has them as well."""
        self.layered: frozenset[str] = frozenset()
        """The resources with parts or replicas. They are `overlapping`, too."""
        self.distinct = True
        """No device is in two free lists."""
        self.overlapping: frozenset[str] = frozenset()
        """The resources whose devices may keep each other from being lent: of several lists, listed more than once, and
        parts, wholes and replicas."""
        self.feasible: dict[tuple[object, ...], tuple[bool | None, int]] = {}
        """Whether requests fit into the empty host, and in how many steps that was found: see
        `core.placement.search.is_feasible`."""
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

    def connected(self, resource: str) -> Links:
        """What a resource connects: as its driver reports it, before its first report as the host's record has it."""
        inventory = self.inventory(resource)
        recorded = self._recorded.get(resource) if self._recorded is not None else None
        if inventory.reported or recorded is None:
            return inventory.links
        linked = inventory.linked
        names = [tuple(group) for group in recorded.names or ()]
        return Links((*linked.names, *names), (*linked.parts, *pairs(recorded.parts or {})))

    def usage(self, record: Allocation) -> Usage:
        """What a record uses: what it says, and what drivers have connected with its devices since."""
        if record.uses is UNSET and not self.above:  # nearly always
            shared = self.names(record, shared_ids(record)) if record.shared else ()
            return usage(self.names(record, exclusive_ids(record)), shared)
        said = {self.canonical(pool): use for pool, use in (record.uses or {}).items()}
        uses: Usage = {}
        for resource, infos in record.resources.items():
            shares = resource in record.shared
            part = SHARED_PART if shares else PART
            for info in infos:
                names = self.names(record, [info["id"]])
                replicas = [said[name] for name in names if name in said and is_replica(said[name])]
                own = SEAT if shares else replicas[0] if replicas else ALONE
                for name in names:
                    join(uses, name, own)
                    for whole in self.above.get(name, ()):
                        join(uses, whole, part)
                    self._join_unrecorded(uses, name, shares=shares)
        for pool, use in said.items():
            if not is_replica(use):
                join(uses, pool, use)
        return uses

    def granted_uses(self, devices: Devices, shared: Collection[str]) -> dict[str, PoolUse] | UnsetType:
        """What the record of a grant of these devices must say that it uses. `shared`: its shared resources."""
        if self.layered.isdisjoint(devices) and not self.unrecorded:
            return UNSET
        uses: Usage = {}
        said: Usage = {}
        for resource, chosen in devices.items():
            free_list = self.free_lists[resource]
            for name, count in Counter([self.canonical(device.id) for device in chosen]).items():
                position = free_list.positions[name][0]
                shares = resource in shared
                (_, own), *wholes = free_list.shared_uses_of(position) if shares else free_list.uses_of(position)
                join(uses, name, several(own, count))
                join(said, name, SEAT if shares else ALONE)
                for whole, use in wholes:
                    join(uses, whole, use)
                self._join_unrecorded(uses, name, shares=shares)
        return _unsaid(uses, said)

    def _join_unrecorded(self, uses: Usage, name: CanonicalName, *, shares: bool) -> None:
        """Add the parts of a device that somebody has or `shares`, where the host's record may lack them."""
        for part in self.unrecorded.get(name, ()):
            join(uses, part, SEAT if shares else ALONE)

    def uses_now(self, record: Allocation) -> dict[str, PoolUse] | UnsetType:
        """What a record's `uses` must say."""
        if record.uses is UNSET and not self.above:
            return UNSET
        said = usage(self.names(record, exclusive_ids(record)), self.names(record, shared_ids(record)))
        uses = _unsaid(self.usage(record), said)
        if record.uses and uses == {self.canonical(pool): use for pool, use in record.uses.items()}:
            return record.uses  # under other names of the same devices
        return uses

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
        self.recovers_at = recovery.earliest(state.unwell for state in self.inventories.values())
        self.suspects = frozenset(
            [state.suspect.key for state in self.inventories.values() if state.suspect is not None]
        )
        if (
            inventory.devices is before.devices
            and inventory.linked == before.linked
            and inventory.reported == before.reported
            and inventory.refused == before.refused
        ):
            return
        if not connected.is_empty or not self.connected(resource).is_empty:
            self._rename(holders)
            return
        if inventory.devices:
            self.free_lists[resource] = self._free_list(resource, inventory)
        else:
            self.free_lists.pop(resource, None)
        self._show()

    def set_recorded(self, resources: Mapping[str, ResourceInventory] | None, holders: Iterable[Allocation]) -> None:
        """Replace what the host's record has of its resources. `holders`: the live records."""
        names = self._recorded_names()
        self._recorded = resources
        self.has_old_names = any(
            inventory.state in _NOT_IN_EFFECT and not (inventory.names is UNSET and inventory.parts is UNSET)
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
        used, users = self.pools.used, self.users
        if self.distinct:
            # a free device is in no other index, and a search there would take longer with more devices
            for name in names:
                used[name] = WHOLE
            for resource in record.resources:
                self.free_lists[resource].pop(len(names))
            return
        for name in names:
            used[name] = used.get(name, 0) + WHOLE
            for free_list in users.get(name, ()):
                free_list.refit(name, self.pools, free_list.free)

    def _hold(self, record: Allocation, sign: int) -> None:
        """From now on a record holds its devices (`sign` 1), or no longer (-1)."""
        pools, users = self.pools, self.users
        for name, use in self.usage(record).items():
            if pools.change(name, use, sign):
                for free_list in users.get(name, ()):
                    free_list.refit(name, pools, free_list.free)

    def _free_list(self, resource: str, inventory: ResourceState) -> FreeList:
        return FreeList(
            resource,
            inventory.devices,
            names=[self.canonical(device.id) for device in inventory.devices],
            classes=self.classes,
            pools=self.pools,
            above=self.above,
            replicas=inventory.replicas,
            before=self.free_lists.get(resource),
        )

    def _recorded_names(self) -> list[object]:
        """What the host's record connects, of resources whose drivers have not reported yet."""
        return [
            (recorded.names, recorded.parts)
            for resource, recorded in (self._recorded or {}).items()
            if not (recorded.names is UNSET and recorded.parts is UNSET) and not self.inventory(resource).reported
        ]

    def _rename(self, holders: Iterable[Allocation]) -> None:
        """What drivers connect has changed. Compute again which names mean one device, and what is part of what."""
        links = [self.connected(resource) for resource in {**self.inventories, **(self._recorded or {})}]
        self.synonyms, self.classes = one_name_each([names for each in links for names in each.names])
        self.above = wholes_of([pair for each in links for pair in each.parts], self.synonyms)
        self.unrecorded = self._unrecorded() if self.has_refused else {}
        self.pools = Pools()
        for record in holders:
            for name, use in self.usage(record).items():
                self.pools.change(name, use, 1)
        self.free_lists = {
            resource: self._free_list(resource, inventory)
            for resource, inventory in self.inventories.items()
            if inventory.devices
        }
        self._show()

    def _unrecorded(self) -> dict[CanonicalName, list[CanonicalName]]:
        refused = [state for state in self.inventories.values() if state.refused is not None]
        parts = dict.fromkeys(self.canonical(part) for state in refused for part, _ in state.parts)
        return by_whole((part, whole) for part in parts for whole in self.above.get(part, ()))

    def _show(self) -> None:
        """Compute again which free lists have each device. Nearly every device is in only one."""
        self.shown = {}
        for free_list in self.free_lists.values():
            alone = (free_list,)
            for name in free_list.positions:
                others = self.shown.get(name)
                self.shown[name] = (*others, free_list) if others else alone
        lists = self.free_lists.values()
        self.layered = frozenset([free_list.resource for free_list in lists if not free_list.is_plain])
        self.users = self._users() if self.layered else self.shown
        self.distinct = not self.layered and len(self.shown) == sum(len(free_list.devices) for free_list in lists)
        self.overlapping = frozenset()
        self._counts = {}
        self.feasible = {}
        if not self.distinct:
            several = {free_list.resource for lists in self.users.values() if len(lists) > 1 for free_list in lists}
            repeats = {free_list.resource for free_list in lists if free_list.repeats}
            self.overlapping = frozenset(several | repeats | self.layered)

    def _users(self) -> dict[CanonicalName, tuple[FreeList, ...]]:
        users: dict[CanonicalName, tuple[FreeList, ...]] = {}
        for free_list in self.free_lists.values():
            for pool in free_list.users:
                users[pool] = (*users.get(pool, ()), free_list)
        return users
