"""The devices of one resource on one host, in the driver's order of preference, and which of them are free."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.device_names import CanonicalName, Classes
from outfitter_service.core.state.infos import GrantInfos, grant_infos
from outfitter_service.core.state.lending import block_of
from outfitter_service.core.state.pools import Pools
from outfitter_service.core.state.sizes import granted_bytes, info_bytes


class FreeList:
    """One resource's devices on one host: their positions, and which of them are free."""

    __slots__ = (
        "_classes", "_least", "alone", "blocks", "devices", "free", "largest", "names", "positions", "repeats",
        "resource",
    )  # fmt: skip

    def __init__(
        self,
        resource: str,
        devices: tuple[KnownDevice, ...],
        *,
        names: list[CanonicalName],
        classes: Classes,
        pools: Pools,
    ) -> None:
        """`names`: the devices' canonical ones. `classes`: all names of the devices that have several. `pools`: what is
        used."""
        self.resource = resource
        self.devices = devices
        """In the driver's order. A position is an index of this list."""
        self.names = names
        """Their canonical names."""
        self.blocks = [block_of(device.health, device.reason, cordoned=device.cordon is not None) for device in devices]
        """Why each of them is lent to nobody, or None."""
        self.alone = [grant_infos({resource: (device,)}, classes) for device in devices]
        """The infos of a grant of each device alone."""
        self.largest = max(map(granted_bytes, self.alone), default=0)
        """The most bytes that one device takes in a grant."""
        self.positions: dict[CanonicalName, list[int]] = {}
        """The positions of each device, by its canonical name."""
        self.free: list[int] = []
        """The negated positions of the free devices in ascending order: the driver's preferred device is the last."""
        self._classes = classes
        smallest_first = sorted([info_bytes(infos.infos[resource][0]) for infos in self.alone])
        self._least = list(accumulate(smallest_first, initial=0))
        for position, (name, block) in enumerate(zip(names, self.blocks, strict=True)):
            self.positions.setdefault(name, []).append(position)
            if block is None and name not in pools.used:
                self.free.append(-position)
        self.free.reverse()
        self.repeats = len(self.positions) < len(devices)
        """Whether one device is listed more than once."""

    def serves(self, name: CanonicalName) -> bool:
        """Whether nothing blocks the device of that name in this resource."""
        return any(self.blocks[position] is None for position in self.positions.get(name, ()))

    def least_bytes(self, amount: int) -> int:
        """The least bytes of a grant of `amount` devices, or of all if there are fewer."""
        return self._least[min(amount, len(self.devices))]

    def offer(self, amount: int) -> tuple[GrantInfos, list[CanonicalName]] | None:
        """The infos and canonical names of the preferred free devices; None: there are too few."""
        free = self.free
        if amount > len(free):
            return None
        if amount == 1:
            position = -free[-1]
            return self.alone[position], [self.names[position]]
        return self._together(self._first(amount))

    def _together(self, positions: list[int]) -> tuple[GrantInfos, list[CanonicalName]]:
        infos = grant_infos({self.resource: [self.devices[position] for position in positions]}, self._classes)
        return infos, [self.names[position] for position in positions]

    def _first(self, enough: int) -> list[int]:
        """The positions of the preferred free devices, at most `enough`."""
        return [-position for position in self.free[: -enough - 1 : -1]]

    def pop(self, amount: int) -> None:
        """Remove the preferred free devices: those of `offer`."""
        del self.free[len(self.free) - amount :]  # -amount would mean all of them where amount is 0

    def remove(self, name: CanonicalName) -> None:
        """A worker holds the device now."""
        free = self.free
        for position in self.positions[name]:
            if free and free[-1] == -position:  # nearly always: the preferred one
                free.pop()
                continue
            at = bisect_left(free, -position)
            if at < len(free) and free[at] == -position:
                del free[at]

    def refit(self, name: CanonicalName, pools: Pools, free: list[int]) -> None:
        """The use of a device's pool has changed. Correct `free`, a list as that of this object: a device is free if
        nobody uses it and nothing blocks it."""
        is_unused = not pools.amount(name)
        for position in self.positions[name]:
            at = bisect_left(free, -position)
            was_free = at < len(free) and free[at] == -position
            if is_unused and not was_free and self.blocks[position] is None:
                free.insert(at, -position)
            elif was_free and not is_unused:
                del free[at]
