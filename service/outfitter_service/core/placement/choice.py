"""Chooses devices for a request where devices keep others from being lent: several resources have the same devices,
parts of them, or replicas; and where the request takes certain devices only.

A device serves only one of a worker's exclusive resources. A device that could serve an earlier waiter is left to that
waiter. A worker may see its own devices in its shared resources, too.

Which devices have something in common is a choice among groups. The smallest group that is large enough is tried first,
and of these the first in the driver's order. Where devices keep others from being lent, the groups of all resources are
tried together, within a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product

from outfitter_proto.clauses import Clauses
from outfitter_service.core.model import NO_ITEMS, Devices, KnownDevice, ResourceSpec
from outfitter_service.core.placement.claims import Claims
from outfitter_service.core.placement.search import DEVICES_PER_STEP, Budget, BudgetError, find
from outfitter_service.core.state import matching
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.free_list import Uses
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.pools import Pools


class DeviceChoice:
    """One request's choice. `rivals`: the resources of earlier waiters to which it has left devices so far."""

    def __init__(
        self,
        overlay: HostOverlay,
        specs: Mapping[str, ResourceSpec],
        claims: Claims | None,
        clauses: Mapping[str, Clauses] = NO_ITEMS,
        *,
        free: Callable[[str], Iterable[int]] | None = None,
    ) -> None:
        """`overlay`: the host. `specs`: the configured resources by name. `claims`: of earlier waiters. `clauses`: what
        the request says of the devices of some resources. `free`: the positions in a resource's free list that count as
        free, as if nobody held a device; None: those that are."""
        self._overlay = overlay
        self._specs = specs
        self._lists = overlay.devices.free_lists
        self._canonical = overlay.devices.canonical
        self._claimed = frozenset(claims.resources if claims else ()) & overlay.devices.overlapping
        self._claimed_alone = frozenset(name for name in self._claimed if not specs[name].shared)
        self._chosen = claims.chosen if claims else NO_ITEMS
        self._chosen_alone = {name: chosen for name, chosen in self._chosen.items() if not specs[name].shared}
        self._free = free or overlay.free_positions
        self._pools = overlay.pools if free is None else Pools()
        self._selections = {name: self._lists[name].selection(clauses[name]) for name in clauses if name in self._lists}
        self._narrowed: dict[str, Sequence[int]] = {}
        self._budget = Budget(overlay)
        self.rivals: set[str] = set()

    def left_to_share(self, resource: str, devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
        """Those of a shared resource's devices that no earlier waiter wants exclusively."""
        free_list = self._lists[resource]
        self._overlay.effort += len(devices)
        places = [free_list.positions[self._canonical(device.id)][0] for device in devices]
        return tuple(
            [
                device
                for device, position in zip(devices, places, strict=True)
                if not self._is_claimed(free_list.shared_uses_of(position), self._claimed_alone, self._chosen_alone)
            ]
        )

    def choose(self, amounts: Mapping[str, int]) -> Devices | None:
        """Free devices for exclusive resources, or None if there are too few. They are in the drivers' order of
        preference, as far as that leaves enough for each resource.

        Raises:
            BudgetError: the search for a way took too long.
        """
        grouped = {
            name: selection.groups
            for name, selection in self._selections.items()
            if selection.groups is not None and amounts.get(name, 0) > 1
        }
        if not grouped:
            return self._fit(amounts)
        fitting = [self._fitting_groups(name, groups, amounts[name]) for name, groups in grouped.items()]
        others = {name: [*self._unclaimed_positions(name)] for name in amounts if name not in grouped}
        for groups in product(*fitting):
            self._budget.spend(1)
            self._narrowed = {**others, **dict(zip(grouped, groups, strict=True))}
            devices = self._fit(amounts)
            if devices is not None:
                return devices
        if not all(self._selections[name].is_whole for name in grouped):
            raise BudgetError
        return None

    def _fitting_groups(self, resource: str, groups: Iterable[frozenset[int]], amount: int) -> list[list[int]]:
        """What is free of each group that is large enough: the smallest first, each in the driver's order."""
        least = self._specs[resource].devices_for(amount)
        self._overlay.effort += self._selections[resource].members // DEVICES_PER_STEP
        free = frozenset(self._unclaimed_positions(resource))
        if least < 2:  # one device lends all of it
            groups = [*groups, *[frozenset([position]) for position in free]]
        fitting = {rest for group in groups if len(rest := group & free) >= least}
        return sorted([sorted(rest) for rest in fitting], key=lambda rest: (len(rest), rest))

    def _fit(self, amounts: Mapping[str, int]) -> Devices | None:
        """The choice within the groups that are tried."""
        if not self._overlay.devices.layered.isdisjoint(amounts):
            return self._find(amounts)
        chosen: Devices = {}
        used: set[CanonicalName] = set()
        for resource, amount in amounts.items():
            devices = self._first(self._unclaimed(resource), amount, used)
            if len(devices) < amount:
                return self._match(amounts)
            chosen[resource] = devices
        return chosen

    def _find(self, amounts: Mapping[str, int]) -> Devices | None:
        repeats = same_device(self._specs)
        found = find(amounts, self._positions, self._overlay.devices, self._pools, repeats, self._budget)
        if found is None:
            return None
        return {
            resource: tuple([self._lists[resource].devices[position] for position in positions])
            for resource, positions in found.items()
        }

    def _match(self, amounts: Mapping[str, int]) -> Devices | None:
        if self._overlay.devices.overlapping.isdisjoint(amounts):
            return None
        candidates = {resource: [*self._unclaimed(resource)] for resource in amounts}
        if self._narrowed:
            self._budget.spend(sum(map(len, candidates.values())) // DEVICES_PER_STEP)
        resources_of: dict[CanonicalName, matching.ResourceSet] = {}
        for resource, devices in candidates.items():
            for name in {self._canonical(device.id): None for device in devices}:
                resources_of[name] = (*resources_of.get(name, ()), resource)
        matches = matching.match(amounts, matching.counts(resources_of.values()))
        if isinstance(matches, matching.Shortage):
            return None
        chosen: Devices = {}
        used: set[CanonicalName] = set()
        for resource, remaining in matches.items():
            own: list[KnownDevice] = []
            for device in candidates[resource]:
                name = self._canonical(device.id)
                if remaining.get(resources_of[name]) and name not in used:
                    remaining[resources_of[name]] -= 1
                    used.add(name)
                    own.append(device)
            chosen[resource] = tuple(own)
        return chosen

    def _first(self, devices: Iterable[KnownDevice], amount: int, used: set[CanonicalName]) -> tuple[KnownDevice, ...]:
        """The first devices that are not `used` yet. Adds them to `used`."""
        first: list[KnownDevice] = []
        for device in devices:
            if len(first) >= amount:
                break
            name = self._canonical(device.id)
            if name not in used:
                used.add(name)
                first.append(device)
        return tuple(first)

    def _unclaimed(self, resource: str) -> Iterator[KnownDevice]:
        """The free devices of an exclusive resource that the request takes and no earlier waiter wants, in the groups
        that are tried."""
        for position in self._positions(resource):
            yield self._lists[resource].devices[position]

    def _positions(self, resource: str) -> Iterable[int]:
        """The positions of these devices."""
        narrowed = self._narrowed.get(resource)
        return self._unclaimed_positions(resource) if narrowed is None else narrowed

    def _unclaimed_positions(self, resource: str) -> Iterator[int]:
        """The same, whatever the groups."""
        selection = self._selections.get(resource)
        for position in self._free(resource):
            if selection is not None and position not in selection.positions:
                continue
            if not self._is_claimed(self._lists[resource].uses_of(position), self._claimed, self._chosen):
                yield position
            else:
                self._overlay.effort += 1

    def _is_claimed(self, uses: Uses, claimed: Collection[str], chosen: Mapping[str, Collection[int]]) -> bool:
        """Whether a grant that uses so much may keep an earlier waiter from a device."""
        if not claimed and not chosen:
            return False
        users = self._overlay.devices.users
        lists = [(pool, use, free_list) for pool, use in uses for free_list in users.get(pool, ())]
        rivals = [
            free_list.resource
            for pool, use, free_list in lists
            if (free_list.resource in claimed and free_list.may_need(pool, use))
            or (free_list.resource in chosen and free_list.may_need(pool, use, chosen[free_list.resource]))
        ]
        self.rivals.update(rivals)
        return bool(rivals)


def same_device(specs: Mapping[str, ResourceSpec]) -> frozenset[str]:
    """The resources of which one worker may get several replicas of a device."""
    return frozenset([name for name, spec in specs.items() if spec.replicas_same_device])
