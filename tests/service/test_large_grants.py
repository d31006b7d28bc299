"""A grant that is larger than a record may be fails the worker that asked for it, and nobody else notices."""

from __future__ import annotations

from typing import Any

import pytest

from outfitter_drivers.api import Device
from outfitter_service.core import model as m
from service.conftest import Serve
from support.faulty_bus import FaultyBus
from support.house import House, deregister, register, static
from support.reporting import SOURCES, Source, reporting
from support.verdict import verdict

LICENCE = "floating-licence-of-the-simulation-package"


def wants(worker: str, amount: int, **more: Any) -> dict[str, Any]:
    """A registration for licences, all of which its one operator gets."""
    one = {LICENCE: {"amount": amount}}
    return register(worker, resources=one, operators={"solve": one}, **more)


async def end_holder(house: House, how: str) -> None:
    """The holder `w0` is over, for one reason or another."""
    if how == "goodbye":
        await house.say(deregister("w0"))
    elif how == "owner-died":
        house.processor.agenda.add(m.OwnerDied(allocation="h/w0/1", detail="gone"))
    # else its lease ends by itself


@pytest.mark.parametrize("how", ["goodbye", "owner-died", "lease"])
async def test_a_waiter_whose_grant_is_too_large_fails_alone_when_its_turn_comes(
    bus: FaultyBus, serve: Serve, how: str
) -> None:
    async with serve(static(5600, LICENCE)) as house:
        await house.say(wants("w0", 200, lease_s=3.0 if how == "lease" else None))
        await house.state("w0", "allocated")
        # its devices would fit into a record, but not with what its operator is told of them
        await house.say(wants("large", 5500, lease_s=None), wants("next", 4000, lease_s=None))
        await house.until(lambda records: "h/next/1" in records)
        assert (await house.records())["h/large/1"]["state"] == "pending"
        await end_holder(house, how)
        await house.state("w0", "ended")
        assert len((await house.state("next", "allocated"))["resources"][LICENCE]) == 4000
        record = await house.state("large", "failed")
        assert record["reason_code"] == "too-large"
        assert "bytes" in record["reason"]
        assert "fewer" in record["reason"]
        await house.told()
        assert house.metric("outfitter_dead_letters_total") == 0
        assert house.metric("outfitter_commits_total", outcome="too-large") == 0
        assert (await verdict(bus.url)).violations == ()


async def test_a_waiter_that_came_before_the_driver_reported_fails_alone(bus: FaultyBus, serve: Serve) -> None:
    source = SOURCES["gpu"] = Source()
    async with serve(reporting("gpu")) as house:
        await house.say(register("large", gpu=400), register("w0", gpu=1), register("w1", gpu=1))
        await house.until(lambda records: "h/w1/1" in records)
        source.report(*[Device(id=f"g{n}", properties={"note": "x" * 4000}) for n in range(400)])
        await house.state("w0", "allocated")
        await house.state("w1", "allocated")
        assert (await house.state("large", "failed"))["reason_code"] == "too-large"
        assert (await verdict(bus.url)).violations == ()


async def test_operators_that_share_devices_do_not_multiply_them(bus: FaultyBus, serve: Serve) -> None:
    one = {"gpu": {"amount": 1}}
    async with serve(static(500, extra='sharing = "shared"\n')) as house:
        await house.say(register("few", gpu=1, operators={f"o{n}": one for n in range(256)}))
        record = await house.state("few", "allocated")
        assert len(str(record)) < 150_000
        assert record["operators"]["o7"]["shared"] == ["gpu"]
        assert len(record["common"]["gpu"]["resources"]["gpu"]) == 500
        assert (await verdict(bus.url)).violations == ()
