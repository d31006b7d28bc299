"""Bugs of a sweeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from outfitter_proto.partitioning import partition_of
from outfitter_service.runtime.sweeper.held_messages import HeldMessages
from outfitter_service.runtime.sweeper.host_registry import HostRegistry
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager
from simulation.bugs.bug import Bug


@contextmanager
def _registry_read_once() -> Iterator[None]:
    catch_up = HostRegistry.catch_up

    async def catch_up_once(self: HostRegistry) -> None:
        if self._position is None:
            await catch_up(self)

    with patch.object(HostRegistry, "catch_up", catch_up_once):
        yield


@contextmanager
def _own_partition_only() -> Iterator[None]:
    by_signs = SweepingManager._by_signs

    async def first_of(self: SweepingManager) -> set[int]:
        due = await by_signs(self)
        return {partition_of(self.identity.host or "", self.partitions)} & due

    with patch.object(SweepingManager, "_by_signs", first_of):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="no-managers-partition-unswept",
        what="a manager sweeps its own partition only, and nobody those without one",
        within=300,
        patches=_own_partition_only,
    ),
    Bug(
        name="nobodys-passed-over",
        what="a sweeper's position passes over what it has still to answer",
        within=40,
        patches=lambda: patch.object(HeldMessages, "position_after", lambda *given: given[-1]),
    ),
    Bug(
        name="swept-by-an-old-registry",
        what="a sweeper reads once who has a manager",
        within=60,
        patches=_registry_read_once,
    ),
)
