"""After the recoveries of service/recover.md the checker raises no alarm, and still finds what is planted."""

from __future__ import annotations

import pytest

from support.checker.plants import (  # noqa: F401 - imported for what they plant
    PLANTS,
    allocations,
    answers,
    order,
    releases,
    replay,
    writers,
)
from support.checker.streams import World, compact, lived_in

on_each_bus = pytest.mark.parametrize("markers", [True, False], ids=["kafka", "embedded"])


def begun_anew(*, markers: bool = True) -> World:
    """The ledger was lost. History still has the earlier one's, and the new one has everything that `lived_in` has."""
    world = lived_in(markers=markers)
    world.begin_anew()
    return lived_in(world)


def compacted(*, markers: bool = True, restore: bool = False) -> World:
    """A ledger that was compacted, and before that perhaps lost and restored."""
    world = lived_in(markers=markers)
    if restore:
        world.restore()
    for _ in range(3):
        world.commit(to=world.position)
    compact(world.allocations, world.allocations.end)
    return world


def finds(world: World, name: str) -> bool:
    """Whether the checker finds this plant in a world."""
    by, says, plant = PLANTS[name]
    plant(world)
    return any(each.check == by and says in each.what for each in world.report().violations)


BEGINNINGS = {"history leaves out a step in between", "an allocation begins in the middle"}
"""What nobody can know of a restored ledger: its allocations began in an earlier one."""


@on_each_bus
def test_a_ledger_that_begins_anew_raises_no_alarm_and_the_verdict_says_what_was_not_looked_at(markers: bool) -> None:
    world = begun_anew(markers=markers)
    report = world.report()
    assert report.violations == ()
    partial = {check.name: check.partial for check in report.checks if check.partial}
    assert partial.keys() == {"history"}
    assert "not looked at before outfitter.history/" in str(partial)


@on_each_bus
def test_a_ledger_that_nobody_has_begun_yet_raises_no_alarm(markers: bool) -> None:
    world = lived_in(markers=markers)
    world.begin_anew()
    assert world.report().violations == ()


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_in_a_ledger_that_began_anew_is_found(name: str) -> None:
    assert finds(begun_anew(), name)


@on_each_bus
def test_a_restored_ledger_raises_no_alarm_once_it_is_compacted(markers: bool) -> None:
    assert compacted(markers=markers, restore=True).report().violations == ()


@pytest.mark.parametrize("name", sorted(PLANTS.keys() - BEGINNINGS))
def test_whatever_is_found_in_a_compacted_ledger_is_found_in_a_restored_one_as_well(name: str) -> None:
    assert finds(compacted(restore=True), name) >= finds(compacted(), name)


@on_each_bus
@pytest.mark.parametrize(("skipped", "removed"), [(1, 0), (2**32, 0), (2**32, 4)])
def test_numbers_that_are_left_out_are_found_in_a_restored_ledger(markers: bool, skipped: int, removed: int) -> None:
    """A restore begins a ledger: nothing in it goes on higher a second time. `removed`: another writer's records, which
    compaction has taken."""
    world = compacted(markers=markers, restore=True)
    world.commits += skipped
    world.allocations.end += removed
    world.commit(to=world.position)
    assert world.violated() == {"commits"}


def test_a_commit_that_names_another_ledger_behind_the_first_of_this_one_hides_nothing() -> None:
    world = lived_in()
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"]), tell=False)
    checkpoint = world.history.body(-1)["checkpoint"]
    world.history.change(-1, checkpoint=checkpoint | {"ledger_id": "another"})
    assert "history" in world.violated()
