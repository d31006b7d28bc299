"""Chooses devices for a request where devices keep others from being lent: several resources have the same devices,
parts of them, or replicas.

A device serves only one of a worker's exclusive resources. A device that could serve an earlier waiter is left to that
waiter. A worker may see its own devices in its shared resources, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from outfitter_service.core.model import Devices, KnownDevice, ResourceSpec
from outfitter_service.core.placement.search import find
from outfitter_service.core.state import matching
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.free_list import Uses
from outfitter_service.core.state.overlay import HostOverlay


class DeviceChoice:
    """One request's choice. `rivals`: the resources of earlier waiters to which it has left devices so far."""

    def __init__(self, overlay: HostOverlay, specs: Mapping[str, ResourceSpec], claimed: Collection[str]) -> None:
        """`overlay`: the host. `specs`: the configured resources by name. `claimed`: the resources that earlier waiters
        want."""
        self._overlay = overlay
        self._specs = specs
        self._lists = overlay.devices.free_lists
        self._canonical = overlay.devices.canonical
        self._claimed = frozenset(claimed) & overlay.devices.overlapping
        self._claimed_alone = frozenset(name for name in self._claimed if not specs[name].shared)
        self.rivals: set[str] = set()

    def left_to_share(self, resource: str, devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
        """Those of a shared resource's devices that no earlier waiter wants exclusively."""
        free_list = self._lists[resource]
        places = [free_list.positions[self._canonical(device.id)][0] for device in devices]
        return tuple(
            [
                device
                for device, position in zip(devices, places, strict=True)
                if not self._is_claimed(free_list.shared_uses_of(position), self._claimed_alone)
            ]
        )

    def choose(self, amounts: Mapping[str, int]) -> Devices | None:
        """Free devices for exclusive resources, or None if there are too few. They are in the drivers' order of
        preference, as far as that leaves enough for each resource.

        Raises:
            BudgetError: the search for a way took too long.
        """
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
        found = find(amounts, self._unclaimed_positions, self._overlay.devices, self._overlay.pools, repeats)
        if found is None:
            return None
        return {
            resource: tuple([self._lists[resource].devices[position] for position in positions])
            for resource, positions in found.items()
        }

    def _match(self, amounts: Mapping[str, int]) -> Devices | None:
        candidates = {resource: [*self._unclaimed(resource)] for resource in amounts}
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
        """The free devices of an exclusive resource that no earlier waiter wants."""
        for position in self._unclaimed_positions(resource):
            yield self._lists[resource].devices[position]

    def _unclaimed_positions(self, resource: str) -> Iterator[int]:
        """The positions of these devices."""
        for position in self._overlay.free_positions(resource):
            if not self._is_claimed(self._lists[resource].uses_of(position), self._claimed):
                yield position

    def _is_claimed(self, uses: Uses, claimed: Collection[str]) -> bool:
        """Whether a grant that uses so much may keep an earlier waiter from a device."""
        if not claimed:
            return False
        users = self._overlay.devices.users
        rivals = [
            free_list.resource
            for pool, use in uses
            for free_list in users.get(pool, ())
            if free_list.resource in claimed and free_list.may_need(pool, use)
        ]
        self.rivals.update(rivals)
        return bool(rivals)


def same_device(specs: Mapping[str, ResourceSpec]) -> frozenset[str]:
    """The resources of which one worker may get several replicas of a device."""
    return frozenset([name for name, spec in specs.items() if spec.replicas_same_device])
