"""Chooses devices for a request where several resources have the same devices.

A device serves only one of a worker's exclusive resources. A device that could serve an earlier waiter is left to that
waiter. A worker may see its own devices in its shared resources, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from outfitter_service.core.model import Devices, KnownDevice, ResourceSpec
from outfitter_service.core.state import matching
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.overlay import HostOverlay


class DeviceChoice:
    """One request's choice. `rivals`: the resources of earlier waiters to which it has left devices so far."""

    def __init__(self, overlay: HostOverlay, specs: Mapping[str, ResourceSpec], claimed: Collection[str]) -> None:
        """`overlay`: the host. `specs`: the configured resources by name. `claimed`: the resources that earlier waiters
        want."""
        self._overlay = overlay
        self._shown = overlay.devices.shown
        self._canonical = overlay.devices.canonical
        self._claimed = frozenset(claimed) & overlay.devices.overlapping
        self._claimed_alone = frozenset(name for name in self._claimed if not specs[name].shared)
        self.rivals: set[str] = set()

    def left_to_share(self, devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
        """The devices that no earlier waiter wants exclusively."""
        return tuple([device for device in devices if not self._is_claimed(device, self._claimed_alone)])

    def choose(self, amounts: Mapping[str, int]) -> Devices | None:
        """Free devices for exclusive resources, or None if there are too few. They are in the drivers' order of
        preference, as far as that leaves enough for each resource."""
        chosen: Devices = {}
        used: set[CanonicalName] = set()
        for resource, amount in amounts.items():
            devices = self._first(self._unclaimed(resource), amount, used)
            if len(devices) < amount:
                return self._match(amounts)
            chosen[resource] = devices
        return chosen

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
        for device in self._overlay.candidates(resource):
            if not self._is_claimed(device, self._claimed):
                yield device

    def _is_claimed(self, device: KnownDevice, claimed: Collection[str]) -> bool:
        if not claimed:
            return False
        name = self._canonical(device.id)
        rivals = [s.resource for s in self._shown.get(name, ()) if s.resource in claimed and s.serves(name)]
        self.rivals.update(rivals)
        return bool(rivals)
