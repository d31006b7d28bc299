"""Bugs of the search for processes that workers leave behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from outfitter_service.runtime.survivors.processes import Mark, Search
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch
from simulation.bugs.bug import Bug, nothing
from simulation.hosts import workers
from simulation.hosts.owners import Survivors
from simulation.world import settings


@contextmanager
def _searching(times: int) -> Iterator[None]:
    """Whatever is left after so many searches that found something is not looked for, where much is left."""
    find = Survivors.find
    found: Counter[tuple[Survivors, Mark]] = Counter()

    async def find_so_often(self: Survivors, mark: Mark) -> Search:
        search = await find(self, mark) if found[self, mark] < times else Search({}, frozenset())
        found[self, mark] += bool(search.survivors)
        return search

    with (
        patch.object(Survivors, "find", find_so_often),
        patch.object(settings, "HAUNTED", 1.0),
        patch.object(settings, "WALLED", 0.0),
        patch.object(settings, "FAULTS", ("worker", "slow", "compaction")),
        patch.object(workers, "CRASHES", 0.9),
    ):
        yield


@contextmanager
def _forgetting() -> Iterator[None]:
    """Looked for where managers start in another PID namespace, and workers leave much behind."""
    with (
        patch.object(SurvivorWatch, "out_of_sight", nothing),
        patch.object(settings, "HAUNTED", 1.0),
        patch.object(settings, "WALLED", 1.0),
        patch.object(settings, "FAULTS", ("kill", "end", "worker", "slow")),
        patch.object(workers, "CRASHES", 0.9),
    ):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="survivors-not-searched",
        what="nobody looks for the processes that a worker leaves behind",
        within=20,
        patches=lambda: _searching(0),
    ),
    Bug(
        name="survivors-searched-once",
        what="once the process that was found has ended nobody looks for another one",
        within=20,
        patches=lambda: _searching(1),
    ),
    Bug(
        name="survivors-searched-twice",
        what="a process is lost that goes on as another one for the second time",
        within=20,
        patches=lambda: _searching(2),
    ),
    Bug(
        name="named-survivors-forgotten",
        what="a manager lends what processes have that an earlier one has named, and that it does not see",
        within=100,
        patches=_forgetting,
    ),
)
