"""Bugs of parts of devices: a whole lent beside its part, a seat counted twice, and what is part of what forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_proto.records import Allocation
from outfitter_service.core.state import names_room
from outfitter_service.core.state.device_index import DeviceIndex, exclusive_ids
from outfitter_service.core.state.device_names import Links
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.pools import PART
from simulation.bugs.bug import Bug
from simulation.world import settings


@contextmanager
def _parted(silent: float, *faults: str) -> Iterator[None]:
    """Looked for where devices have parts. `silent`: where a driver says late and not always of what they are parts."""
    with (
        patch.object(settings, "PARTED", 1.0),
        patch.object(settings, "SILENT", silent),
        patch.object(settings, "FAULTS", faults or settings.FAULTS),
    ):
        yield


@contextmanager
def _beside_its_part() -> Iterator[None]:
    refit = FreeList.refit

    def refit_by_holders(self: FreeList, name: Any, pools: Any, free: list[int]) -> None:
        seats = pools.count(name, PART.word)
        if not (self.is_plain and seats and seats == pools.amount(name)):
            refit(self, name, pools, free)

    with patch.object(FreeList, "refit", refit_by_holders), _parted(0.0):
        yield


@contextmanager
def _after_a_restart() -> Iterator[None]:
    connected = DeviceIndex.connected

    def as_reported(self: DeviceIndex, resource: str) -> Links:
        inventory = self.inventory(resource)
        return Links(connected(self, resource).names, tuple(inventory.parts))

    with (
        patch.object(DeviceIndex, "connected", as_reported),
        patch.object(settings, "TENACIOUS", 1.0),  # looked for where workers keep their devices for long
        _parted(1.0, "kill", "end", "worker"),
    ):
        yield


@contextmanager
def _given_back_twice() -> Iterator[None]:
    hold = DeviceIndex._hold

    def hold_each(self: DeviceIndex, record: Allocation, sign: int) -> None:
        hold(self, record, sign)
        if sign < 0:
            parts = self.names(record, exclusive_ids(record))
            seats = Counter(whole for part in parts for whole in self.above.get(part, ()))
            for whole, count in seats.items():
                for _ in range(count - 1):
                    self.pools.change(whole, PART, -1)
                for free_list in self.users.get(whole, ()):
                    free_list.refit(whole, self.pools, free_list.free)

    with patch.object(DeviceIndex, "_hold", hold_each), _parted(0.0):
        yield


@contextmanager
def _forgotten() -> Iterator[None]:
    with (
        patch.object(names_room, "held_parts", lambda *_: ()),
        patch.object(settings, "TENACIOUS", 1.0),  # looked for where workers keep their devices for long
        _parted(1.0, "worker", "slow", "end"),
    ):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="whole-beside-its-part",
        what="a whole is lent although somebody has a part of it",
        within=12,
        patches=_beside_its_part,
    ),
    Bug(
        name="part-beside-the-whole-after-a-restart",
        what="a restore leaves out what is part of what, until the driver says so again",
        within=30,
        patches=_after_a_restart,
    ),
    Bug(
        name="part-counted-twice",
        what="who has two parts of a device uses one seat there, and gives back two",
        within=15,
        patches=_given_back_twice,
    ),
    Bug(
        name="parts-forgotten",
        what="of what a held device is a part is forgotten where its driver does not say so any more",
        within=36,
        patches=_forgotten,
    ),
)
