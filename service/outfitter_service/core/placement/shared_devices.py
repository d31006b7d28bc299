"""Placing a request where several resources show the same devices: which of them it may have, and as which resource.

A device is for one of a worker's exclusive resources only, and what could serve an earlier waiter is left to that one.
A worker's own devices are shown to it by its shared resources, too: that is in nobody's way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from outfitter_service.core.model import Devices, KnownDevice, ResourceSpec
from outfitter_service.core.state import matching
from outfitter_service.core.state.overlay import HostOverlay


class Scene:
    """One request's choice. `rivals` are the resources of earlier waiters whose devices it has been denied so far."""

    def __init__(self, overlay: HostOverlay, specs: Mapping[str, ResourceSpec], claimed: Collection[str]) -> None:
        self._overlay = overlay
        self._shown = overlay.host_state.shown
        self._canonical = overlay.host_state.canonical
        self._claimed = frozenset(claimed) & overlay.host_state.overlapping
        self._claimed_alone = frozenset(name for name in self._claimed if not specs[name].shared)
        self.rivals: set[str] = set()

    def left_to_share(self, devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
        """Those that no earlier waiter wants to have alone."""
        return tuple([device for device in devices if not self._is_claimed(device, self._claimed_alone)])

    def choose(self, wanted: Mapping[str, int]) -> Devices | None:
        """Free devices for exclusive resources, as their drivers prefer them as far as that leaves enough for each;
        None: there are too few."""
        chosen: Devices = {}
        taken: set[str] = set()
        for resource, amount in wanted.items():
            mine = self._first(self._left(resource), amount, taken)
            if len(mine) < amount:
                return self._match(wanted)
            chosen[resource] = mine
        return chosen

    def _match(self, wanted: Mapping[str, int]) -> Devices | None:
        left = {resource: [*self._left(resource)] for resource in wanted}
        viewers: dict[str, matching.Viewers] = {}
        for resource, devices in left.items():
            for name in {self._canonical(device.id): None for device in devices}:
                viewers[name] = (*viewers.get(name, ()), resource)
        matched = matching.match(wanted, matching.counts(viewers.values()))
        if isinstance(matched, matching.Shortage):
            return None
        chosen: Devices = {}
        taken: set[str] = set()
        for resource, given in matched.items():
            mine: list[KnownDevice] = []
            for device in left[resource]:
                name = self._canonical(device.id)
                if given.get(viewers[name]) and name not in taken:
                    given[viewers[name]] -= 1
                    taken.add(name)
                    mine.append(device)
            chosen[resource] = tuple(mine)
        return chosen

    def _first(self, devices: Iterable[KnownDevice], amount: int, taken: set[str]) -> tuple[KnownDevice, ...]:
        """The first devices that are not `taken`, which they are from here on."""
        mine: list[KnownDevice] = []
        for device in devices:
            if len(mine) >= amount:
                break
            name = self._canonical(device.id)
            if name not in taken:
                taken.add(name)
                mine.append(device)
        return tuple(mine)

    def _left(self, resource: str) -> Iterator[KnownDevice]:
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
