"""The devices of one resource on one host, in the driver's order of preference, and which of them are free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate

from outfitter_proto.records import Health
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.device_names import CanonicalName, Classes
from outfitter_service.core.state.infos import GrantInfos, grant_infos
from outfitter_service.core.state.sizes import granted_bytes, info_bytes


class FreeList:
    """One resource's devices on one host: their positions, and which of them are free.

    `devices`: in the driver's order; a position is an index of this list. `names`: their canonical names. `positions`:
    by canonical name. `free`: the negated positions of the free devices in ascending order, so that the driver's
    preferred device is the last item. `alone`: the infos of a grant of each device alone. `largest`: the most bytes
    that one device takes in a grant. `repeats`: one device is listed more than once.
    """

    __slots__ = (
        "_classes", "_least", "alone", "devices", "free", "largest", "names", "positions", "repeats", "resource",
    )  # fmt: skip

    def __init__(
        self,
        resource: str,
        devices: tuple[KnownDevice, ...],
        *,
        names: list[CanonicalName],
        classes: Classes,
        unused: Callable[[CanonicalName], bool],
    ) -> None:
        """`classes`: all names of the devices that have several. `unused`: whether nobody holds the device with that
        canonical name."""
        self.resource = resource
        self.devices = devices
        self.names = names
        self._classes = classes
        self.alone = [grant_infos({resource: (device,)}, self._classes) for device in devices]
        self.largest = max(map(granted_bytes, self.alone), default=0)
        smallest_first = sorted([info_bytes(infos.infos[resource][0]) for infos in self.alone])
        self._least = list(accumulate(smallest_first, initial=0))
        self.positions: dict[CanonicalName, list[int]] = {}
        self.free: list[int] = []
        healthy = Health.HEALTHY
        for position, (name, device) in enumerate(zip(self.names, devices, strict=True)):
            self.positions.setdefault(name, []).append(position)
            if device.health == healthy and unused(name):
                self.free.append(-position)
        self.free.reverse()
        self.repeats = len(self.positions) < len(devices)

    def serves(self, name: CanonicalName) -> bool:
        """Whether the device of that name is healthy in this resource."""
        return any(self.devices[position].health == Health.HEALTHY for position in self.positions.get(name, ()))

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

    def put_back(self, name: CanonicalName) -> None:
        """Nobody holds the device any more. It is free if it is healthy."""
        free = self.free
        for position in self.positions[name]:
            at = bisect_left(free, -position)
            if self.devices[position].health == Health.HEALTHY and free[at : at + 1] != [-position]:
                free.insert(at, -position)
