"""A host's state, with the effects of one decision so far on top.

An overlay changes nothing but itself, and ends with its decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice

from outfitter_proto.records import Allocation
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.device_index import exclusive_ids
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.lending import Use
from outfitter_service.core.state.pools import Pools
from outfitter_service.core.state.resource_state import NOT_REPORTED, ResourceState
from outfitter_service.core.state.sizes import shared_devices


class HostOverlay:
    """One host's state with a decision's effects. Get it from `DecisionBuilder.overlay` after each step."""

    __slots__ = (
        "_free", "_held", "_inventories", "devices", "effort", "host_state", "items", "pools",
        "without_exclusive",
    )  # fmt: skip

    def __init__(self, host_state: HostState) -> None:
        self.host_state = host_state
        self.devices = host_state.devices
        """As they were before the decision."""
        self._inventories: dict[str, ResourceState] = {}
        self.pools = host_state.devices.pools
        """What records use, with the decision's effects."""
        self.without_exclusive = host_state.holders.without_exclusive
        self.items = host_state.items
        self.effort = 0
        """About how many devices were compared or tried so far, besides those that are free and preferred."""
        self._free: dict[str, list[int]] = {}
        self._held: dict[str, int] = {}

    def count(self, record: Allocation, sign: int) -> None:
        """From now on the record holds its devices (`sign` 1), or no longer (-1)."""
        if self.pools is self.devices.pools:
            self.pools = Pools(self.devices.pools)
        self._held.clear()
        if not exclusive_ids(record):
            self.without_exclusive += sign
        if record.shared:
            self.items += sign * shared_devices(record)
        for name, use in self.devices.usage(record).items():
            if self.pools.change(name, use, sign):
                for free_list in self.devices.users.get(name, ()):
                    free_list.refit(name, self.pools, self._free_of(free_list))

    def _free_of(self, free_list: FreeList) -> list[int]:
        """The overlay's own copy of a resource's free positions."""
        free = self._free.get(free_list.resource)
        if free is None:
            free = self._free[free_list.resource] = free_list.free.copy()
        return free

    def inventory(self, resource: str) -> ResourceState:
        """The resource's inventory, with the decision's effects."""
        own = self._inventories.get(resource) if self._inventories else None
        return own or self.devices.inventories.get(resource, NOT_REPORTED)

    def set_inventory(self, resource: str, inventory: ResourceState) -> None:
        """Put an inventory with the same devices but another state of the driver."""
        self._inventories[resource] = inventory

    def use(self, name: CanonicalName) -> Use | None:
        """How the device with that canonical name is held."""
        if not self.pools.amount(name):
            return None
        return Use.SHARED if self.pools.is_shared(name) else Use.ALONE

    def locked(self, device: KnownDevice) -> bool:
        """Whether some worker holds the device exclusively."""
        return self.use(self.devices.canonical(device.id)) is Use.ALONE

    def free_count(self, resource: str) -> int:
        """How many healthy devices nobody holds."""
        return len(self._positions(resource))

    def free_replicas(self, resource: str, among: Collection[int] | None = None) -> int:
        """How many replicas of these devices nobody holds. `among`: only those at these positions; None: all."""
        free_list = self.devices.free_lists.get(resource)
        if free_list is None:
            return 0
        free = [position for position in self.free_positions(resource) if among is None or position in among]
        owns = [free_list.uses_of(position)[0] for position in free]
        return sum([(use.total - self.pools.amount(pool)) // use.amount for pool, use in owns])

    def free(self, resource: str, enough: int) -> tuple[KnownDevice, ...]:
        """Healthy devices that nobody holds, at most `enough`, in the driver's order of preference."""
        return tuple(islice(self.candidates(resource), enough))

    def candidates(self, resource: str) -> Iterator[KnownDevice]:
        """All healthy devices that nobody holds, in the driver's order of preference."""
        free_list = self.devices.free_lists.get(resource)
        if free_list is not None:
            for position in reversed(self._positions(resource)):
                yield free_list.devices[-position]

    def free_positions(self, resource: str) -> Iterator[int]:
        """The positions of these devices, in the same order."""
        for position in reversed(self._positions(resource)):
            yield -position

    def sharable(self, resource: str, among: Collection[int] | None = None) -> tuple[KnownDevice, ...]:
        """The healthy devices of a shared resource that it lends now. `among`: as in `free_replicas`."""
        free_list = self.devices.free_lists.get(resource)
        if free_list is None:
            return ()
        return tuple(
            [
                device
                for position, device in enumerate(free_list.devices)
                if free_list.blocks[position] is None
                and (among is None or position in among)
                and all(self.pools.fits(pool, use) for pool, use in free_list.shared_uses_of(position))
            ]
        )

    def _positions(self, resource: str) -> list[int]:
        """The free positions of a resource, with the decision's effects."""
        free = self._free.get(resource)
        if free is not None:
            return free
        free_list = self.devices.free_lists.get(resource)
        return free_list.free if free_list is not None else []

    def held_count(self, resource: str) -> int:
        """How many devices of a resource are held, including those that its inventory does not name (yet)."""
        held = self._held.get(resource)
        if held is not None:
            return held
        canonical = self.devices.canonical
        names = {canonical(device.id) for device in self.inventory(resource).devices if self.locked(device)}
        for record in self.host_state.holders.live.values():
            names.update(
                name
                for info in record.resources.get(resource, ())
                if self.use(name := canonical(info["id"])) is Use.ALONE
            )
        self._held[resource] = len(names)
        return len(names)
