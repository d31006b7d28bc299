"""A partition's checkpoint may say that some hosts were read further than the others: what the checker makes of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outfitter_verify.wire import partition_of
from support.checker.streams import HOST, NEIGHBOUR, PARTITION, PARTITIONS, World

ELSEWHERE = next(name for name in map("gpu-{}".format, range(99)) if partition_of(name, PARTITIONS) != PARTITION)

FLOOD = 6
QUIET = FLOOD
"""The offset of the neighbour's registration, which stands behind a flood."""


def flooded() -> World:
    """A world in which half of a flood is read, and all that the neighbour has said behind it."""
    world = World()
    world.writer = f"partition/{PARTITION}"
    for number in range(FLOOD):
        world.register(f"w{number}")
    assert world.register("quiet", host=NEIGHBOUR) == QUIET
    world.commit(world.allocation("w0", "pending"), to=1)
    world.commit(
        world.allocation("w1", "pending"), world.allocation("quiet", "pending", host=NEIGHBOUR),
        to=2, ahead={NEIGHBOUR: QUIET + 1},
    )  # fmt: skip
    return world


def rest(world: World, *, begin: int = 2) -> None:
    """Read what is left of the flood, and come by what was read before."""
    world.commit(*(world.allocation(f"w{number}", "pending") for number in range(begin, FLOOD)))


def test_a_host_that_is_read_ahead_of_the_others_is_no_violation() -> None:
    world = flooded()
    assert world.report().counts["unread"] == FLOOD - 2
    world.commit(world.allocation("w2", "pending"), to=3, ahead={NEIGHBOUR: QUIET + 1})
    rest(world, begin=3)
    report = world.report()
    assert report.violations == ()
    assert report.complete
    assert report.counts["unread"] == 0


def test_what_was_answered_ahead_may_be_over_and_deleted_when_the_others_come_by() -> None:
    world = flooded()
    world.commit(world.allocation("quiet", "ended", host=NEIGHBOUR), to=2, ahead={NEIGHBOUR: QUIET + 1})
    world.commit(f"{NEIGHBOUR}/quiet/1", to=2, ahead={NEIGHBOUR: QUIET + 1})
    rest(world)
    assert world.report().violations == ()


def passed_over(world: World) -> None:
    world.register("second", host=NEIGHBOUR)
    world.commit(to=2, ahead={NEIGHBOUR: QUIET + 2})


def read_again(world: World) -> None:
    world.commit(to=2, ahead={NEIGHBOUR: QUIET + 1})
    world.register("late", host=NEIGHBOUR)
    world.sources[f"{NEIGHBOUR}/late/1"] = QUIET
    rest(world)
    world.commit(world.allocation("late", "pending", host=NEIGHBOUR))


def answered_unread(world: World) -> None:
    world.register("second", host=NEIGHBOUR)
    world.commit(world.allocation("second", "pending", host=NEIGHBOUR), to=2, ahead={NEIGHBOUR: QUIET + 1})


def forgotten(world: World) -> None:
    world.commit(to=3)


def gone_back(world: World) -> None:
    world.register("second", host=NEIGHBOUR)
    world.commit(world.allocation("second", "pending", host=NEIGHBOUR), to=2, ahead={NEIGHBOUR: QUIET + 2})
    world.commit(to=2, ahead={NEIGHBOUR: QUIET + 1})


def past_the_end(world: World) -> None:
    world.commit(to=2, ahead={NEIGHBOUR: QUIET + 9})


def not_ahead(world: World) -> None:
    rest(world)
    world.commit(ahead={HOST: 1})


def of_another_partition(world: World) -> None:
    world.commit(to=2, ahead={NEIGHBOUR: QUIET + 1, ELSEWHERE: QUIET + 1})


@pytest.mark.parametrize(
    ("plant", "by"),
    [
        (passed_over, "answers"),
        (read_again, "answers"),
        (answered_unread, "answers"),
        (forgotten, "positions"),
        (gone_back, "positions"),
        (past_the_end, "positions"),
        (not_ahead, "positions"),
        (of_another_partition, "partitions"),
    ],
)
def test_what_is_said_wrongly_of_hosts_ahead_is_found(plant: Callable[[World], None], by: str) -> None:
    world = flooded()
    plant(world)
    assert by in world.violated()
