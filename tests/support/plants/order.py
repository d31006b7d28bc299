"""Plants in what was granted to whom: devices that nobody reported, and workers that were passed over."""

from __future__ import annotations

from support.plants import planted
from support.streams import DEVICES, World

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


@planted("inventory", says="was not reported")
def a_device_is_granted_as_a_resource_that_does_not_have_it(world: World) -> None:
    world.host(gpu=None, fpga=None)
    world.commit()
    world.commit(world.allocation("e", "preparing", devices=["card0"], resource="fpga"))


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


@planted("queue", says="waits for what is free")
def a_worker_waits_for_what_is_free(world: World) -> None:
    _queue(world)
    for _ in range(5):
        world.commit()
