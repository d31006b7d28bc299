"""A host as it will be after the decision so far: its state, and what the decision takes and gives back.

An overlay changes nothing but itself, and ends with its decision.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from outfitter_proto.records import Allocation, Health
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.host_state import (
    NOT_REPORTED,
    FreeList,
    HostState,
    Inventory,
    Tally,
    exclusive_ids,
    shared_ids,
)

NO_COUNTS = Tally()
"""What an overlay has counted before its first count; never written to."""


class HostOverlay:
    """One host's state with a decision's own effects. `DecisionBuilder.overlay` keeps it up to date: ask there after
    each step."""

    __slots__ = ("_free", "_held", "_locks", "_sharers", "_told", "host_state", "without")

    def __init__(self, host_state: HostState) -> None:
        self.host_state = host_state
        self._told: dict[str, Inventory] = {}
        self._locks = NO_COUNTS
        self._sharers = NO_COUNTS
        self.without = host_state.without
        self._free: dict[str, list[int]] = {}
        self._held: dict[str, int] = {}

    def count(self, record: Allocation, count: int) -> None:
        """The record's devices are held from here on (1), or no longer (-1)."""
        if self._locks is NO_COUNTS:
            self._locks, self._sharers = Tally(), Tally()
        self._held.clear()
        alone = exclusive_ids(record)
        if not alone:
            self.without += count
        self._count(self._locks, self.host_state.names(record, alone), count)
        if record.shared:
            self._count(self._sharers, self.host_state.names(record, shared_ids(record)), count)

    def _count(self, tally: Tally, names: list[str], count: int) -> None:
        shown = self.host_state.shown
        back: dict[str, list[int]] = {}
        for name in names:
            before = self._unused(name)
            tally.add(name, count)
            if before == (now := self._unused(name)):
                continue
            for free_list in shown.get(name, ()):
                positions = [
                    -place for place in free_list.places[name] if free_list.devices[place].health == Health.HEALTHY
                ]
                if now:
                    back.setdefault(free_list.resource, []).extend(positions)
                    continue
                free = self._free_of(free_list)
                for position in positions:
                    del free[bisect_left(free, position)]
        for resource, positions in back.items():
            free = self._free_of(self.host_state.shelves[resource])
            free += positions
            free.sort()

    def _free_of(self, free_list: FreeList) -> list[int]:
        """What is free of a resource, as its free list has it: a copy, which is kept up to date here."""
        free = self._free.get(free_list.resource)
        if free is None:
            free = self._free[free_list.resource] = free_list.free.copy()
        return free

    def inventory(self, resource: str) -> Inventory:
        told = self._told.get(resource) if self._told else None
        return told or self.host_state.inventories.get(resource, NOT_REPORTED)

    def set_inventory(self, resource: str, inventory: Inventory) -> None:
        """The same devices, but something else is known of their driver."""
        self._told[resource] = inventory

    def locked(self, device: KnownDevice) -> bool:
        """Somebody has the device alone."""
        name = self.host_state.canonical(device.id)
        return self.host_state.locks.get(name, 0) + self._locks.get(name, 0) > 0

    def _unused(self, name: str) -> bool:
        host_state = self.host_state
        return (
            host_state.locks.get(name, 0) + self._locks.get(name, 0) == 0
            and host_state.sharers.get(name, 0) + self._sharers.get(name, 0) == 0
        )

    def free_count(self, resource: str) -> int:
        """How many healthy devices nobody has."""
        return len(self._positions(resource))

    def free(self, resource: str, enough: int) -> tuple[KnownDevice, ...]:
        """Healthy devices that nobody has, at most `enough`, in the driver's order of preference."""
        return tuple(islice(self.candidates(resource), enough))

    def candidates(self, resource: str) -> Iterator[KnownDevice]:
        """All healthy devices that nobody has, in the driver's order of preference."""
        free_list = self.host_state.shelves.get(resource)
        if free_list is not None:
            for position in reversed(self._positions(resource)):
                yield free_list.devices[-position]

    def _positions(self, resource: str) -> list[int]:
        """What is free of a resource, as its free list has it, with the decision's effects."""
        free = self._free.get(resource)
        if free is not None:
            return free
        free_list = self.host_state.shelves.get(resource)
        return free_list.free if free_list is not None else []

    def held_count(self, resource: str) -> int:
        """How many devices of a resource are held, those included that its inventory does not (yet) name."""
        held = self._held.get(resource)
        if held is not None:
            return held
        canonical = self.host_state.canonical
        names = {canonical(device.id) for device in self.inventory(resource).devices if self.locked(device)}
        for record in self.host_state.live.values():
            names.update(
                name
                for told in record.resources.get(resource, ())
                if self.host_state.locks.get(name := canonical(told["id"]), 0) + self._locks.get(name, 0) > 0
            )
        self._held[resource] = len(names)
        return len(names)
