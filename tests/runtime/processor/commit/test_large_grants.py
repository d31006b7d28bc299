"""A grant that is larger than a record may be fails the worker that asked for it, and nobody else notices."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import anyio
import msgspec
import pytest

from outfitter_drivers.api import Device
from outfitter_proto import topics
from outfitter_proto.bus import TopicSpec
from outfitter_proto.records import Health
from outfitter_proto.support.processes import process_owner
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.processor.processor import Limits
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.drivers.reporting import SOURCES, Source, reporting
from support.managers.in_process import CLUSTER, InProcessManager, deregister, register, static

LICENCE = "floating-licence-of-the-simulation-package"


def wants(worker: str, amount: int, **more: Any) -> dict[str, Any]:
    """A registration for licences, all of which its one operator gets."""
    one = {LICENCE: {"amount": amount}}
    return register(worker, resources=one, operators={"solve": one}, **more)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that owns an allocation."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["deregister", "owner-died", "lease"])
async def test_a_waiter_whose_grant_is_too_large_fails_alone_when_its_turn_comes(
    bus: FaultyBus, serve: Serve, how: str, process: subprocess.Popen[bytes]
) -> None:
    lease_s = 3.0 if how == "lease" else None
    owner = msgspec.to_builtins(process_owner(process.pid)) if how == "owner-died" else None
    async with serve(static(5600, LICENCE)) as manager:
        await manager.say(wants("w0", 200, lease_s=lease_s, owner=owner))
        await manager.state("w0", "allocated")
        # its devices would fit into a record, but not with what its operator is told of them
        await manager.say(wants("large", 5500, lease_s=None), wants("next", 4000, lease_s=None))
        await manager.until(lambda records: "h/next/1" in records)
        assert (await manager.records())["h/large/1"]["state"] == "pending"
        if how == "deregister":
            await manager.say(deregister("w0"))
        elif how == "owner-died":
            process.kill()
        await manager.state("w0", "ended")
        assert len((await manager.state("next", "allocated"))["resources"][LICENCE]) == 4000
        record = await manager.state("large", "failed")
        assert record["reason_code"] == "too-large"
        assert "bytes" in record["reason"]
        assert "fewer" in record["reason"]
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert manager.metric("outfitter_commits_total", outcome="too-large") == 0
        assert (await verdict(bus.url)).violations == ()


async def test_a_waiter_that_came_before_the_driver_reported_fails_alone(bus: FaultyBus, serve: Serve) -> None:
    source = SOURCES["gpu"] = Source()
    async with serve(reporting("gpu")) as manager:
        await manager.say(register("large", gpu=400), register("w0", gpu=1), register("w1", gpu=1))
        await manager.until(lambda records: "h/w1/1" in records)
        source.report(*[Device(id=f"g{n}", properties={"note": "x" * 4000}) for n in range(400)])
        await manager.state("w0", "allocated")
        await manager.state("w1", "allocated")
        assert (await manager.state("large", "failed"))["reason_code"] == "too-large"
        assert (await verdict(bus.url)).violations == ()


async def test_operators_that_share_devices_do_not_multiply_them(bus: FaultyBus, serve: Serve) -> None:
    one = {"gpu": {"amount": 1}}
    async with serve(static(500, extra='sharing = "shared"\n')) as manager:
        await manager.say(register("few", gpu=1, operators={f"o{n}": one for n in range(256)}))
        record = await manager.state("few", "allocated")
        assert len(str(record)) < 150_000
        assert record["operators"]["o7"]["shared"] == ["gpu"]
        assert len(record["common"]["gpu"]["resources"]["gpu"]) == 500
        assert (await verdict(bus.url)).violations == ()


async def test_a_device_of_which_too_much_is_said_is_unhealthy_and_the_others_are_granted(serve: Serve) -> None:
    source = SOURCES["gpu"] = Source()
    async with serve(reporting("gpu")) as manager:
        source.report(
            Device(id="huge", properties={"note": "x" * 1_000_000}),
            *[Device(id=name, properties={}) for name in ("g0", "g1")],
        )
        await manager.say(register("w", gpu=2), register("next", gpu=3))
        assert [one["id"] for one in (await manager.state("w", "allocated"))["resources"]["gpu"]] == ["g0", "g1"]
        assert (await manager.state("next", "pending"))["reason_code"] == "infeasible"
        device = (await manager.records())["@host/h"]["resources"]["gpu"]["devices"][0]
        assert (device["id"], device["health"]) == ("huge", "unhealthy")
        assert "at most 65536" in device["reason"]


@pytest.mark.parametrize(
    "device",
    [
        Device(id="x" * 1025, properties={}),
        Device(id="g", properties={}, aliases=("y" * 1025,)),
        Device(id="g", properties={}, aliases=tuple([f"a{n}" for n in range(65)])),
    ],
)
async def test_a_device_with_too_many_or_too_long_names_fails_its_driver(serve: Serve, device: Device) -> None:
    source = SOURCES["gpu"] = Source()
    async with serve(reporting("gpu")) as manager:
        source.report(device)
        await manager.say(register("w", gpu=1))
        record = await manager.state("w", "failed")
        assert "at most 64 aliases of 1024" in record["reason"]


async def test_long_reasons_of_many_resources_leave_room_for_each_others_devices(bus: FaultyBus, serve: Serve) -> None:
    names = [f"r{number}" for number in range(12)]
    for name in names:
        SOURCES[name] = Source()
    async with serve(reporting(*names)) as manager:
        for name in names:
            note = {"note": "x" * 1500}
            SOURCES[name].report(*[Device(id=f"{name}-{n}", properties=note) for n in range(256)])
        await manager.say(*[register(f"w-{name}", **{name: 200}) for name in names])
        for name in names:
            assert len((await manager.state(f"w-{name}", "allocated"))["resources"][name]) == 200
        told = (await manager.records())["@host/h"]["resources"]
        assert {one["total"] for one in told.values()} == {256}
        assert all(one["devices"] for one in told.values())
        for name in names:  # each of them ill, at length
            ill = [
                Device(id=f"{name}-{n}", properties=note, health=Health.UNHEALTHY, reason="y" * 5000)
                for n in range(256)
            ]
            SOURCES[name].report(*ill)
        await manager.until(
            lambda records: all(
                records[f"h/w-{name}/1"]["resources"][name][0].get("health") == "unhealthy" for name in names
            )
        )
        await manager.say(*[deregister(f"w-{name}") for name in names])
        for name in names:
            await manager.state(f"w-{name}", "ended")
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 0
        assert (await verdict(bus.url)).violations == ()


async def has_a_piece_of_one_record(manager: InProcessManager) -> bool:
    return any(len(one["records"]) == 1 for one in await manager.history() if one["type"] == "snapshot")


async def test_nothing_is_decided_that_exceeds_the_bound_of_a_commit(bus: FaultyBus, serve: Serve) -> None:
    """The topics refuse nothing: neither grants, nor what history and its snapshots say of those."""
    less = {"max.message.bytes": "40000"}
    settings = {name: {one.name: one.value for one in of_topic} for name, of_topic in topics.required(CLUSTER).items()}
    await bus.create_topics([TopicSpec(name, 1, config | less, 1) for name, config in settings.items()])
    pace = Pace(piece_bytes=8_000, interval=timedelta(seconds=0.1), between_bytes=1)
    limits = Limits(lease_grace_s=0.1, history=pace)
    async with serve(static(1700), limits=limits, max_bytes=35_000) as manager:
        await manager.say(register("large", gpu=1000))
        assert (await manager.state("large", "failed"))["reason_code"] == "too-large"
        for number in range(8):
            await manager.say(register(f"w{number}", gpu=200))
            await manager.state(f"w{number}", "allocated")
        await manager.say(register("next", gpu=250), *[deregister(f"w{number}") for number in range(4)])
        await manager.state("next", "allocated")
        with anyio.fail_after(20):
            while not await has_a_piece_of_one_record(manager):  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)
        await manager.reported()
        assert manager.metric("outfitter_commits_total", outcome="too-large") == 0
        assert (await verdict(bus.url)).violations == ()
