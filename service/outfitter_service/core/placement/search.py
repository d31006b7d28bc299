"""Finds devices where parts and replicas make a request more than a matching: some devices exclude others.

First fit finds nearly all. If it fails, a search with steps back follows, within a budget: it may give up although
there is a way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from msgspec import Struct, field

from outfitter_service.core.state.device_index import DeviceIndex
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.pools import Pools

MOST_STEPS = 2_000
"""Most steps of one request's search, which take some 10 to 40 ms. A step is a device or a group of devices that is
tried, or `DEVICES_PER_STEP` devices that are looked at."""
DEVICES_PER_STEP = 16
MOST_REMEMBERED = 1024
"""Of so many different requests a host's state remembers whether they are feasible."""

Wanted = Mapping[str, int]
"""Amounts by resource."""
Found = dict[str, list[int]]
"""The positions of devices by resource."""


class BudgetError(Exception):
    """A search has found nothing within its budget. There may be a way."""


class Budget:
    """What the search for one request may cost. Its steps count as effort of the decision, too."""

    __slots__ = ("_overlay", "spent")

    def __init__(self, overlay: HostOverlay) -> None:
        self._overlay = overlay
        self.spent = 0
        """Steps so far."""

    def spend(self, steps: int) -> None:
        """Raises:
        BudgetError: there are not so many steps left.
        """
        self.spent += steps
        self._overlay.effort += steps * DEVICES_PER_STEP
        if self.spent > MOST_STEPS:
            raise BudgetError


class _Choice:
    """The devices of one request so far. `repeats`: the resources of which it may have several replicas of a device."""

    def __init__(self, devices: DeviceIndex, pools: Pools, repeats: Collection[str]) -> None:
        self._lists = devices.free_lists
        self._pools = Pools(pools)
        self._repeats = repeats
        self._taken: dict[CanonicalName, list[str]] = {}

    def fits(self, resource: str, position: int) -> bool:
        """Whether the request can have this device, too."""
        free_list = self._lists[resource]
        others = self._taken.get(free_list.names[position])
        if others and (resource not in self._repeats or others[0] != resource):
            return False
        return free_list.fits(position, self._pools)

    def take(self, resource: str, position: int, sign: int = 1) -> None:
        """Add a device to the request, or take it back (`sign` -1)."""
        free_list = self._lists[resource]
        taken = self._taken.setdefault(free_list.names[position], [])
        if sign > 0:
            taken.append(resource)
        else:
            taken.pop()
        for pool, use in free_list.uses_of(position):
            self._pools.change(pool, use, sign)

    def times(self, resource: str, position: int, most: int) -> int:
        """Take a device as often as it fits, at most `most` times. Returns how often."""
        taken = 0
        while taken < most and self.fits(resource, position):
            self.take(resource, position)
            taken += 1
        return taken


def find(
    wanted: Wanted,
    candidates: Callable[[str], Iterable[int]],
    devices: DeviceIndex,
    pools: Pools,
    repeats: Collection[str],
    budget: Budget,
) -> Found | None:
    """Devices for all resources that fit together beside what `pools` has, in the order of preference as far as that
    leaves enough for each; None: there are none. `candidates`: the positions of devices that fit alone.

    Raises:
        BudgetError: it would take too long.
    """
    choice = _Choice(devices, pools, repeats)
    found: Found = {}
    looked_at = 0
    for resource, amount in wanted.items():
        own = found[resource] = []
        for position in candidates(resource):
            looked_at += 1
            own += [position] * choice.times(resource, position, amount - len(own))
            if len(own) == amount:
                break
        else:
            budget.spend(looked_at // DEVICES_PER_STEP)
            each = {name: list(candidates(name)) for name in wanted}
            return _search(wanted, each, devices, _Choice(devices, pools, repeats), repeats, budget)
    return found


class _Slot(Struct, gc=False):
    """One device that a request wants: the index of the candidate to try next, and what has been tried."""

    index: int = 0
    tried: set[object] = field(default_factory=set)


def _search(
    wanted: Wanted,
    candidates: Mapping[str, Sequence[int]],
    devices: DeviceIndex,
    choice: _Choice,
    repeats: Collection[str],
    budget: Budget,
) -> Found | None:
    """As `find`: tries candidates slot by slot, and steps back where none fits. Devices that differ for nobody are
    tried once."""
    wants = [resource for resource, amount in wanted.items() for _ in range(amount)]
    slots = [_Slot()]
    while len(slots) <= len(wants):
        slot, resource = slots[-1], wants[len(slots) - 1]
        own, free_list = candidates[resource], devices.free_lists[resource]
        is_first = len(slots) == 1 or wants[len(slots) - 2] != resource
        is_counted = is_first and not slot.index and resource not in repeats
        if is_counted and not _has_enough(choice, resource, own, wanted[resource], budget):
            slot.index = len(own)
        while slot.index < len(own):
            position = own[slot.index]
            budget.spend(1)
            alike = _alike(devices, free_list, position)
            if alike not in slot.tried and choice.fits(resource, position):
                slot.tried.add(alike)
                choice.take(resource, position)
                is_same = len(slots) < len(wants) and wants[len(slots)] == resource
                next_index = slot.index + (resource not in repeats) if is_same else 0
                slots.append(_Slot(next_index))
                break
            slot.index += 1
        else:
            slots.pop()
            if not slots:
                return None
            last = slots[-1]
            taken_for = wants[len(slots) - 1]
            choice.take(taken_for, candidates[taken_for][last.index], -1)
            last.index += 1
    found: Found = {resource: [] for resource in wanted}
    for slot, resource in zip(slots, wants, strict=False):
        found[resource].append(candidates[resource][slot.index])
    return found


def _has_enough(choice: _Choice, resource: str, own: Sequence[int], amount: int, budget: Budget) -> bool:
    """Whether enough devices fit, each alone."""
    fitting = looked_at = 0
    for position in own:
        looked_at += 1
        fitting += choice.fits(resource, position)
        if fitting == amount:
            break
    budget.spend(looked_at // DEVICES_PER_STEP)
    return fitting == amount


def _alike(devices: DeviceIndex, free_list: FreeList, position: int) -> object:
    """Equal for devices that differ for nobody: no other device uses their own pools."""
    name = free_list.names[position]
    (_, own), *wholes = free_list.uses_of(position)
    is_crowded = len(free_list.users[name]) > 1 or len(devices.users.get(name, ())) > 1
    return name if is_crowded else (own.amount, *[whole for whole, _ in wholes])


def is_feasible(overlay: HostOverlay, wanted: Wanted, repeats: Collection[str], *, lendable: bool) -> bool | None:
    """Whether a request fits into the host if nobody held a device; None: not found within the budget. `lendable`: only
    devices count that nothing blocks. Each answer is remembered until devices change."""
    devices = overlay.devices
    key = (lendable, *wanted.items(), *sorted(wanted.keys() & set(repeats)))
    if key in devices.feasible:
        found, steps = devices.feasible[key]
        overlay.effort += steps * DEVICES_PER_STEP  # as if it were searched for: a decision depends on no memory
        return found

    def candidates(resource: str) -> Iterable[int]:
        blocks = devices.free_lists[resource].blocks
        return [position for position, block in enumerate(blocks) if not lendable or block is None]

    budget = Budget(overlay)
    found = None
    with suppress(BudgetError):
        found = find(wanted, candidates, devices, Pools(), repeats, budget) is not None
    if len(devices.feasible) >= MOST_REMEMBERED:
        devices.feasible.clear()
    devices.feasible[key] = found, budget.spent
    return found
