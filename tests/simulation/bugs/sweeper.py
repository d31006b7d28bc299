"""Bugs of a sweeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from outfitter_proto.bus import (
    Writer,
)
from outfitter_service.runtime.sweeper.host_registry import HostRegistry
from outfitter_service.runtime.sweeper.partition_sweeper import PartitionSweeper
from simulation.bugs.bug import Bug


@contextmanager
def _rolls_once() -> Iterator[None]:
    catch_up = HostRegistry.catch_up

    async def catch_up_once(self: HostRegistry) -> None:
        if self._position is None:
            await catch_up(self)

    with patch.object(HostRegistry, "catch_up", catch_up_once):
        yield


async def _answer_at_once(self: PartitionSweeper, writer: Writer, host_registry: HostRegistry, read_to: int) -> None:
    await host_registry.catch_up()
    self._look_again(host_registry)
    letters = self._ripe(host_registry)
    if letters or self._is_due(read_to):
        await self._commit(writer, letters, self._next(letters, read_to))


BUGS: tuple[Bug, ...] = (
    Bug(
        name="nobodys-passed-over",
        what="a sweeper's position passes over what it has still to answer",
        within=40,
        patches=lambda: patch.object(PartitionSweeper, "_next", lambda *given: given[-1]),
    ),
    Bug(
        name="swept-by-an-old-roll",
        what="a sweeper reads once who has a manager",
        within=60,
        patches=_rolls_once,
    ),
    Bug(
        name="swept-without-a-claim",
        what="a sweeper does not say what it is about to answer before it does",
        within=400,
        patches=lambda: patch.object(PartitionSweeper, "_answer", _answer_at_once),
    ),
)
