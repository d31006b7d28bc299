"""A host has one place: what is granted in one partition must not be granted in another one."""

from __future__ import annotations

from outfitter_verify.check import check
from outfitter_verify.logs import Partition, Reading
from support.checker.streams import PARTITION, PARTITIONS, World


def holding(worker: str, *devices: str, shared: bool = False) -> World:
    """A world in which a worker of the same host as ever has these devices, to itself unless they are `shared`."""
    world = World()
    world.commit()
    world.register(worker)
    record = world.allocation(worker, "allocated", devices=list(devices), shared=["gpu"] if shared else [])
    world.commit(record)
    return world


def together(here: World, there: World) -> Reading:
    """Both in one cluster, the second in another partition than its host's."""
    reading, other = here.reading(), there.reading()
    (logs,) = other.logs
    registrations, allocations, history, letters = (
        log._replace(partition=(PARTITION + 1) % PARTITIONS) for log in logs.logs[:4]
    )
    moved = Partition(registrations, allocations, history, letters)
    return reading._replace(logs=[*reading.logs, moved])


def said(reading: Reading) -> list[str]:
    return [str(violation) for violation in check(reading).violations if violation.check == "exclusivity"]


def test_a_device_that_is_held_in_two_partitions_is_found() -> None:
    [found] = said(together(holding("a", "GPU-0", "GPU-1"), holding("b", "GPU-1", "GPU-0")))
    assert f"/{(PARTITION + 1) % PARTITIONS}/" in found
    assert f"a/1 holds in partition {PARTITION}" in found


def test_other_devices_and_the_same_allocation_on_its_way_are_none() -> None:
    assert said(together(holding("a", "GPU-0"), holding("b", "GPU-1"))) == []
    assert said(together(holding("a", "GPU-0"), holding("a", "GPU-0"))) == []


def test_a_device_may_be_shared_over_two_partitions_and_not_with_whoever_has_it_alone() -> None:
    alone, sharing = holding("a", "GPU-0"), holding("b", "GPU-0", shared=True)
    assert said(together(holding("a", "GPU-0", shared=True), sharing)) == []
    assert len(said(together(alone, sharing))) == len(said(together(sharing, alone))) == 1
