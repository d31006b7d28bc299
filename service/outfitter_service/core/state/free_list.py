"""The devices of one resource on one host, in the driver's order of preference, and which of them are free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from itertools import accumulate

from outfitter_proto.clauses import Clauses
from outfitter_proto.records import PoolUse
from outfitter_service.core.model import KnownDevice
from outfitter_service.core.state.device_names import CanonicalName, Classes
from outfitter_service.core.state.infos import GrantInfos, grant_infos
from outfitter_service.core.state.lending import block_of
from outfitter_service.core.state.pools import ALONE, PART, SEAT, SHARED_PART, Pools, may_exclude, replica
from outfitter_service.core.state.selections import Selection
from outfitter_service.core.state.sizes import granted_bytes, info_bytes

MOST_SELECTIONS = 128
"""So many selections are remembered: those of all that are kept apart (`MOST_WANTS`), and of newcomers."""

Uses = tuple[tuple[CanonicalName, PoolUse], ...]
"""What a grant of one device uses: its own pool, and those of the devices that it is a part of."""


class FreeList:
    """One resource's devices on one host: their positions, and which of them are free."""

    __slots__ = (
        "_above", "_classes", "_least", "_properties", "_selections", "_sizes", "alone", "blocks", "devices", "free",
        "is_plain", "largest", "names", "positions", "repeats", "resource", "users", "uses",
    )  # fmt: skip

    def __init__(
        self,
        resource: str,
        devices: tuple[KnownDevice, ...],
        *,
        names: list[CanonicalName],
        classes: Classes,
        pools: Pools,
        above: Mapping[CanonicalName, tuple[CanonicalName, ...]],
        replicas: int,
        before: FreeList | None = None,
    ) -> None:
        """`names`: the devices' canonical ones. `classes`: all names of the devices that have several. `pools`: what is
        used. `above`: what devices are parts of. `replicas`: to how many workers each device is lent at once. `before`:
        the list that this one replaces, which knows what devices take that have not changed since."""
        self.resource = resource
        self.devices = devices
        """In the driver's order. A position is an index of this list."""
        self.names = names
        """Their canonical names."""
        self.blocks = [
            block_of(d.health, d.reason, cordoned=d.cordon is not None, stranger=d.used_by is not None) for d in devices
        ]
        """Why each of them is lent to nobody, or None."""
        self._classes = classes
        self.alone: list[GrantInfos] = []
        """The infos of a grant of each device alone."""
        self._sizes: list[tuple[int, int]] = []
        """The bytes of each device alone: in a grant, and of its info."""
        known = {id(device): position for position, device in enumerate(before.devices)} if before else {}
        for device in devices:
            position = known.get(id(device), -1)
            if before and position >= 0 and before._classes.get(device.id) == classes.get(device.id):
                self.alone.append(before.alone[position])
                self._sizes.append(before._sizes[position])
            else:
                infos = grant_infos({resource: (device,)}, classes)
                self.alone.append(infos)
                self._sizes.append((granted_bytes(infos), info_bytes(infos.infos[resource][0])))
        self.largest = max([granted for granted, _ in self._sizes], default=0)
        """The most bytes that one device takes in a grant."""
        self.positions: dict[CanonicalName, list[int]] = {}
        """The positions of each device, by its canonical name."""
        self.free: list[int] = []
        """The negated positions of the free devices in ascending order: the driver's preferred device is the last."""
        self._selections: dict[Clauses, Selection] = {}
        self._properties: frozenset[str] | None = None
        self._above = above
        self.is_plain = replicas == 1 and (not above or above.keys().isdisjoint(names))
        """Each device uses all of its own pool, and no other. Only then two devices of this list have no pool in
        common."""
        own = replica(replicas)
        self.uses: list[Uses] = [] if self.is_plain else [_uses(name, own, above.get(name, ()), PART) for name in names]
        """What a grant of each device alone uses. Empty in a plain list."""
        self._least = list(accumulate(sorted([size for _, size in self._sizes]), initial=0))
        for position, (name, block) in enumerate(zip(names, self.blocks, strict=True)):
            self.positions.setdefault(name, []).append(position)
            if block is None and (name not in pools.used if self.is_plain else self.fits(position, pools)):
                self.free.append(-position)
        self.free.reverse()
        self.users: dict[CanonicalName, list[int]] = self.positions if self.is_plain else {}
        """The positions of the devices that use each pool."""
        for position, uses in enumerate(self.uses):
            for pool, _ in uses:
                self.users.setdefault(pool, []).append(position)
        self.repeats = len(self.positions) < len(devices)
        """Whether one device is listed more than once."""

    @property
    def properties(self) -> frozenset[str]:
        """The names of all properties that some device has."""
        if self._properties is None:
            self._properties = frozenset({"id"}.union(*[device.properties for device in self.devices]))
        return self._properties

    def selection(self, clauses: Clauses) -> Selection:
        """The devices that a request's clauses select."""
        selection = self._selections.pop(clauses, None)
        if selection is None:
            if len(self._selections) >= MOST_SELECTIONS:
                del self._selections[next(iter(self._selections))]
            selection = Selection(self.devices, self.blocks, clauses)
        self._selections[clauses] = selection  # the last one used is the last to be forgotten
        return selection

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

    def uses_of(self, position: int) -> Uses:
        """What a grant of that device alone uses."""
        return ((self.names[position], ALONE),) if self.is_plain else self.uses[position]

    def shared_uses_of(self, position: int) -> Uses:
        """What a grant of that device uses that shares it with others."""
        name = self.names[position]
        return _uses(name, SEAT, self._above.get(name, ()), SHARED_PART)

    def fits(self, position: int, pools: Pools) -> bool:
        """Whether nobody's use keeps the device from being lent alone."""
        return all(pools.fits(pool, use) for pool, use in self.uses_of(position))

    def may_need(self, pool: CanonicalName, use: PoolUse, among: Collection[int] | None = None) -> bool:
        """Whether that use of a pool may keep some device from being lent that nothing blocks. `among`: only devices at
        these positions count; None: all."""
        return any(
            may_exclude(use, own)
            for position in self.users.get(pool, ())
            if self.blocks[position] is None and (among is None or position in among)
            for name, own in self.uses_of(position)
            if name == pool
        )

    def refit(self, pool: CanonicalName, pools: Pools, free: list[int]) -> None:
        """The use of a pool has changed. Correct `free`, a list as that of this object: a device is free if all of
        its uses fit and nothing blocks it."""
        is_unused = self.is_plain and not pools.amount(pool)
        for position in self.users[pool]:
            at = bisect_left(free, -position)
            was_free = at < len(free) and free[at] == -position
            is_free = is_unused if self.is_plain else self.fits(position, pools)
            if is_free and not was_free and self.blocks[position] is None:
                free.insert(at, -position)
            elif was_free and not is_free:
                del free[at]


def _uses(name: CanonicalName, own: PoolUse, wholes: tuple[CanonicalName, ...], part: PoolUse) -> Uses:
    return ((name, own), *[(whole, part) for whole in wholes])
