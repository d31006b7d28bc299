"""Plants in what workers get that take certain devices only."""

from __future__ import annotations

from typing import Any

from support.checker.plants import planted
from support.checker.streams import World


def _request(amount: int = 1, **choice: Any) -> dict[str, Any]:
    return {"amounts": {"gpu": amount}, "choices": {"gpu": choice}}


def _granted(world: World, request: dict[str, Any], *infos: dict[str, str]) -> None:
    """`e` is granted devices with these infos."""
    devices = [{"id": f"GPU-{2 + number}", "local_index": str(number), **info} for number, info in enumerate(infos)]
    listed = [{"id": each["id"]} for each in devices]
    world.inventory({"gpu": {"state": "reported", "devices": listed}})
    world.commit()
    granted = world.allocation("e", "allocated", devices=[each["id"] for each in devices], request=request)
    world.commit(granted | {"resources": {"gpu": devices}})


@planted("choices", says="which is not as its clause on model says")
def a_device_is_granted_that_is_not_what_its_worker_takes(world: World) -> None:
    _granted(world, _request(where={"model": "*H100*"}), {"model": "NVIDIA A100"})


@planted("choices", says="which is not as its clause on memory.total_bytes says")
def a_device_is_granted_that_is_too_small(world: World) -> None:
    _granted(world, _request(where={"memory.total_bytes": {"min": "40Gi"}}), {"memory.total_bytes": "42949672959"})


@planted("choices", says="have no value of nvlink.group in common")
def devices_are_granted_that_have_nothing_in_common(world: World) -> None:
    _granted(world, _request(2, same=["nvlink.group"]), {"nvlink.group": "0,4"}, {"nvlink.group": "1,5"})


@planted("choices", says="by other clauses than those with which it waited")
def a_clause_is_forgotten_by_a_restart(world: World) -> None:
    request = _request(where={"id": "GPU-2"})
    world.commit(world.allocation("e", "pending", request=request, reason_code="infeasible"))
    world.instance = "second"
    world.commit()
    world.commit(world.allocation("e", "allocated", request={"amounts": {"gpu": 1}}, devices=["GPU-2"]))


@planted("queue", says="waits for it and comes before")
def a_device_is_granted_although_an_earlier_worker_takes_only_such(world: World) -> None:
    overtaken(world, "H100")


@planted("queue", says="waits for free devices")
def a_worker_waits_for_such_devices_as_are_free(world: World) -> None:
    waits_for(world, "H100", "b,a")


def waits_for(world: World, model: str, group: str) -> None:
    """`e` waits for two H100 with something in common. Of those that are free, two are of this model and group."""
    infos = {"GPU-7": ("A100", "c"), "GPU-8": (model, "a"), "GPU-9": (model, group)}
    listed = [{"id": one, "properties": {"model": named, "group": of}} for one, (named, of) in infos.items()]
    world.inventory({"gpu": {"state": "reported", "devices": listed}})
    request = _request(2, where={"model": "H100"}, same=["group"])
    world.commit(world.allocation("e", "pending", request=request, reason_code="busy"))
    for _ in range(5):
        world.commit()


def overtaken(world: World, model: str) -> None:
    """`e` waits for an H100, and a later worker gets a device of this model."""
    world.commit(world.allocation("e", "pending", request=_request(where={"model": "H100"}), reason_code="busy"))
    world.register("f")
    granted = world.allocation("f", "allocated", devices=["GPU-2"])
    world.commit(granted | {"resources": {"gpu": [{"id": "GPU-2", "local_index": "0", "model": model}]}})
