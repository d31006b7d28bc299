"""Plants in what was granted to whom: devices that nobody reported, and workers that were passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.checker.plants import planted
from support.checker.streams import DEVICES, World

# --- inventory ---


@planted("inventory", says="was not reported")
def a_device_is_granted_that_nobody_reported(world: World) -> None:
    world.commit(world.allocation("e", "allocated", devices=["GPU-9"]))


@planted("inventory", says="is not healthy")
def a_device_is_granted_that_is_ill(world: World) -> None:
    listed = [{"id": one, "health": "unhealthy" if one == "GPU-2" else "healthy"} for one in DEVICES]
    world.inventory({"gpu": {"state": "reported", "devices": listed}})
    world.commit()
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"]))


@planted("inventory", says="gets GPU-2 of gpu, which a stranger uses")
def a_device_is_granted_that_a_stranger_uses(world: World) -> None:
    listed = [{"id": one, **({"used_by": "process 7 (x) of ada"} if one == "GPU-2" else {})} for one in DEVICES]
    world.inventory({"gpu": {"state": "reported", "devices": listed}})
    world.commit()
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"]))


@planted("inventory", says="was not reported")
def a_device_is_granted_as_a_resource_that_does_not_have_it(world: World) -> None:
    world.host(gpu=None, fpga=None)
    world.commit()
    world.commit(world.allocation("e", "preparing", devices=["card0"], resource="fpga"))


# --- operators ---


def _deal(world: World, one: Mapping[str, Any], two: Mapping[str, Any], **fields: Any) -> None:
    """`e` is granted a device, and two operators named one each."""
    named = {"gpu": {"amount": 1}}
    request = {"amounts": {"gpu": 1}, "operators": {"one": named, "two": named}}
    shares = {"one": one, "two": two}
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"], request=request, operators=shares, **fields))


@planted("operators", says="named 1 gpu, but has 0")
def an_operator_gets_less_than_it_named(world: World) -> None:
    _deal(world, {"resources": {"gpu": ["GPU-2"]}}, {"resources": {"gpu": []}})


@planted("operators", says="named 1 gpu, but has 0")
def an_operator_has_no_share(world: World) -> None:
    _deal(world, {"resources": {"gpu": ["GPU-2"]}}, {})


@planted("operators", says="belongs to operator one")
def two_operators_have_one_device(world: World) -> None:
    _deal(world, {"resources": {"gpu": ["GPU-2"]}}, {"resources": {"gpu": ["GPU-2"]}})


@planted("operators", says="which its worker does not have")
def an_operator_has_another_workers_device(world: World) -> None:
    _deal(world, {"resources": {"gpu": ["GPU-2"]}}, {"resources": {"gpu": ["GPU-0"]}})


@planted("operators", says="does not see it")
def an_operator_does_not_see_what_is_shared(world: World) -> None:
    _deal(world, {"resources": {}, "shared": ["gpu"]}, {"resources": {}}, shared=["gpu"])


# --- the queue ---


def _queue(world: World) -> None:
    """`e` waits, and so does `f`, who came later."""
    world.register("f")
    waits = {"reason_code": "busy"}
    world.commit(world.allocation("e", "pending", **waits), world.allocation("f", "pending", **waits))


@planted("queue", says="comes before")
def a_later_worker_is_served_first(world: World) -> None:
    _queue(world)
    world.commit(world.allocation("f", "allocated", devices=["GPU-2"], reason_code=None))


@planted("queue", says="comes before")
def a_new_worker_is_served_while_another_waits(world: World) -> None:
    _queue(world)
    world.register("g")
    world.commit(world.allocation("g", "allocated", devices=["GPU-2"]))


@planted("queue", says="comes before")
def a_worker_of_low_priority_is_served_first(world: World) -> None:
    world.register("f", priority=5)
    urgent = {"amounts": {"gpu": 1}, "owner": {"pid": 1}, "lease_s": 30.0, "priority": 5}
    world.commit(
        world.allocation("e", "pending", reason_code="busy"),
        world.allocation("f", "pending", reason_code="busy", request=urgent),
    )
    world.commit(world.allocation("e", "allocated", devices=["GPU-2"], reason_code=None))


def _other_names(world: World) -> None:
    """Another resource shows `GPU-2` as well, under a name that only a third one connects."""
    listed = {
        name: {"state": "reported", "devices": [{"id": one} for one in devices]} for name, devices in SHOWN.items()
    }
    listed["map"]["names"] = [["GPU-2", "card2"]]
    listed["map"]["sharing"] = "shared"
    world.inventory(listed)
    world.commit()
    world.register("f")


SHOWN = {"gpu": DEVICES, "card": ["card2"], "map": []}


@planted("queue", says="comes before")
def a_later_worker_gets_the_device_as_another_resource(world: World) -> None:
    _other_names(world)
    world.commit(world.allocation("e", "pending", reason_code="busy"))
    world.commit(world.allocation("f", "allocated", devices=["card2"], resource="card"))


def replicas(world: World, count: int) -> None:
    """`e` waits for a device that has so many replicas, and of which two others have one each."""
    world.inventory({"gpu": {"state": "reported", "devices": [{"id": "GPU-9"}], "replicas": count}})
    uses = {"GPU-9": [720720 // count, 720720, "replicas"]}
    for worker in "fg":
        world.register(worker)
    world.commit(
        world.allocation("f", "allocated", devices=["GPU-9"], uses=uses),
        world.allocation("g", "allocated", devices=["GPU-9"], uses=uses),
        world.allocation("e", "pending", reason_code="busy"),
    )
    for _ in range(5):
        world.commit()


@planted("queue", says="waits for free devices")
def a_worker_waits_for_a_replica_that_is_free(world: World) -> None:
    replicas(world, 3)


@planted("queue", says="waits for free devices")
def a_worker_waits_for_what_is_free(world: World) -> None:
    _queue(world)
    for _ in range(5):
        world.commit()
