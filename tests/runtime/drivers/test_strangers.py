"""Who uses a device and may, and who is a stranger: real processes, through the real runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from outfitter_drivers.api import CannotTell, Device, DeviceUser, Users
from outfitter_proto.support import processes
from outfitter_service.runtime.drivers import running_processes
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.drivers.reporting import SOURCES, Source, reporting
from support.managers.in_process import InProcessManager, deregister, register
from support.processes.families import Family, families
from support.processes.owners import body, owner_of

CONFIG = reporting("gpu", factory="CheckingFactory")


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    # the tests may run in a container, and the pids there are its own
    monkeypatch.setattr(processes, "INITIAL_PID_NAMESPACE", processes.pid_namespace())
    found = SOURCES["gpu"] = Source()
    return found


@pytest.fixture
def family() -> Iterator[Family]:
    with families(1) as (one,):
        yield one


@pytest.fixture
def other() -> Iterator[Family]:
    with families(1) as (one,):
        yield one


def device(name: str, users: Users | None) -> Device:
    return Device(id=name, properties={"index": name}, users=users)


def by(*pids: int) -> Users:
    return tuple([DeviceUser(pid=pid, program="python") for pid in pids])


def stranger(pid: int) -> str:
    """The words for a process that this user has started."""
    return f"process {pid} (python) of {running_processes.user_name(os.getuid())}"


async def seen(manager: InProcessManager, **expected: str | None) -> None:
    """Wait until the host's record names these strangers, by device."""

    def is_so(records: dict[str, dict[str, Any]]) -> bool:
        listed = records.get("@host/h", {}).get("resources", {}).get("gpu", {}).get("devices", [])
        return {each["id"]: each.get("used_by") for each in listed} == expected

    await manager.until(is_so)


def owned(worker: str, pid: int, **fields: Any) -> dict[str, Any]:
    return register(worker, gpu=1, owner=body(owner_of(pid)), **fields)


async def grant_of(manager: InProcessManager, worker: str) -> dict[str, Any]:
    await manager.state(worker, "allocated")
    steps = await manager.history()
    return next(step for step in steps if step.get("worker") == worker and step.get("to") == "allocated")


async def test_what_a_stranger_uses_is_lent_to_nobody_until_its_process_has_ended(
    serve: Serve, source: Source, family: Family
) -> None:
    source.report(device("a", by(family.parent)))
    async with serve(CONFIG) as manager:
        await manager.say(register("w", gpu=1))
        record = await manager.state("w", "pending")
        await manager.until(lambda records: records["h/w/1"].get("reason_code") == "used-by-stranger")
        record = (await manager.records())["h/w/1"]
        assert f"1 used by {stranger(family.parent)}, which Outfitter did not lend to" in record["reason"]
        family.end(family.parent)
        step = await grant_of(manager, "w")
        assert (step["explanation"], step.get("confirmed")) == ("granted", None)
        assert (await verdict(manager.bus.url)).violations == ()


async def test_a_process_that_was_seen_and_has_ended_uses_nothing_although_a_look_still_names_it(
    serve: Serve, source: Source, family: Family
) -> None:
    source.report(device("a", by(family.parent)))
    async with serve(CONFIG) as manager:
        await seen(manager, a=stranger(family.parent))
        family.end(family.parent)
        source.report(device("a", by(family.parent)), device("b", ()))
        await seen(manager, a=None, b=None)
        await manager.say(register("w", gpu=1))
        assert (await grant_of(manager, "w"))["explanation"] == "granted"


async def test_a_holders_process_and_its_child_are_no_strangers_and_others_on_its_device_are_told(
    serve: Serve, source: Source, family: Family, other: Family
) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(owned("w", family.parent))
        before = await manager.state("w", "allocated")
        source.report(device("a", by(family.parent, family.child)), device("b", by(other.child)))
        await seen(manager, a=None, b=stranger(other.child))
        source.report(device("a", by(family.parent, family.child, other.parent)), device("b", ()))
        await seen(manager, a=stranger(other.parent), b=None)
        assert (await manager.records())["h/w/1"] == before


async def test_who_holds_one_device_is_a_stranger_on_another(serve: Serve, source: Source, family: Family) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        source.report(device("a", by(family.child)), device("b", by(family.child)))
        await seen(manager, a=None, b=stranger(family.child))


async def test_a_process_that_has_lost_its_parent_is_its_workers_by_its_environment(
    serve: Serve, source: Source, family: Family
) -> None:
    source.report(device("a", ()))
    env = {"OUTFITTER_HOST": "h", "OUTFITTER_WORKER": "w", "OUTFITTER_INCARNATION": "1"}
    with families(1, **env) as (lost,), families(1) as (unmarked,):
        async with serve(CONFIG) as manager:
            await manager.say(owned("w", family.parent))
            await manager.state("w", "allocated")
            source.report(device("a", by(lost.child)), device("b", by(unmarked.child)))
            await seen(manager, a=None, b=stranger(unmarked.child))


async def test_an_owner_that_has_given_a_device_back_and_lives_on_is_no_stranger_and_its_child_is(
    serve: Serve, source: Source, family: Family
) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        source.report(device("a", by(family.parent)))
        await manager.say(deregister("w"))
        await manager.state("w", "ended")
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        await manager.say(deregister("next"))
        await manager.state("next", "ended")
        source.report(device("a", by(family.parent, family.child)))
        await seen(manager, a=stranger(family.child))


async def test_what_goes_on_after_its_worker_has_ended_becomes_a_stranger_without_a_new_look(
    serve: Serve, source: Source, family: Family
) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        source.report(device("a", by(family.child)), device("b", ()))
        await seen(manager, a=None, b=None)
        await manager.say(deregister("w"))
        await seen(manager, a=stranger(family.child), b=None)


async def test_whoever_waits_gets_the_device_that_it_uses_already(serve: Serve, source: Source, family: Family) -> None:
    source.report(device("a", by(family.child)))
    async with serve(CONFIG) as manager:
        await seen(manager, a=stranger(family.child))
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        await seen(manager, a=None)


async def test_a_restarted_manager_knows_past_owners_and_lends_nothing_before_it_knows_the_strangers(
    serve: Serve, source: Source, bus: FaultyBus, family: Family, other: Family
) -> None:
    source.report(device("a", ()), device("b", by(other.parent)))
    async with serve(CONFIG) as manager:
        await seen(manager, a=None, b=stranger(other.parent))
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        await manager.state("w", "ended")
        await manager.stop()
    source.report(device("a", by(family.parent)), device("b", by(other.parent)))
    async with serve(CONFIG) as manager:
        await manager.say(register("both", resources={"gpu": {"amount": 2}}), register("one", gpu=1))
        assert (await manager.state("one", "allocated"))["resources"]["gpu"][0]["id"] == "a"
        assert (await manager.records())["h/both/1"]["reason_code"] == "used-by-stranger"
        assert (await verdict(manager.bus.url)).violations == ()


async def test_what_runs_on_a_device_that_is_being_released_is_the_drivers_matter(
    serve: Serve, source: Source, family: Family, other: Family
) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(owned("w", family.parent))
        await manager.state("w", "allocated")
        source.in_use["a"] = "process 1"
        await manager.say(deregister("w"))
        await manager.state("w", "releasing")
        source.report(device("a", by(family.child)), device("b", by(other.child)))
        await seen(manager, a=None, b=stranger(other.child))


UNTOLD = {
    "the driver cannot tell": (CannotTell("its library is too old"), "its library is too old"),
    "a process without a pid": ((DeviceUser(program="[Insufficient Permissions]"),), "whom its driver cannot name"),
    "a process that is not here": (by(2**22 + 1), f"no process {2**22 + 1} runs here"),
    "no users": (("python",), "its driver names users that are none"),
    "no pid": ((DeviceUser(pid="4711"),), "whom its driver cannot name"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", UNTOLD)
async def test_where_nobody_can_tell_the_device_is_lent_and_history_says_so(
    serve: Serve, source: Source, kind: str
) -> None:
    users, why = UNTOLD[kind]
    source.report(device("a", users))  # type: ignore[arg-type]
    async with serve(CONFIG) as manager:
        await manager.say(register("w", gpu=1))
        step = await grant_of(manager, "w")
        assert step["confirmed"] is False
        assert step["explanation"].startswith("granted (unconfirmed: ")
        assert why in step["explanation"]
        assert "used_by" not in (await manager.records())["@host/h"]["resources"]["gpu"]["devices"][0]


async def test_a_manager_in_a_pid_namespace_of_its_own_cannot_tell_whose_pids_its_driver_reads(
    serve: Serve, source: Source, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "INITIAL_PID_NAMESPACE", 1)
    source.report(device("a", by(family.parent)))
    async with serve(CONFIG) as manager:
        await manager.say(register("w", gpu=1))
        step = await grant_of(manager, "w")
        assert "PID namespace of its own" in step["explanation"]


async def test_on_a_device_of_a_worker_whose_process_is_not_known_nobody_can_tell(
    serve: Serve, source: Source, family: Family, other: Family
) -> None:
    source.report(device("a", ()))
    async with serve(CONFIG) as manager:
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        source.report(device("a", by(family.parent)), device("b", by(other.parent)))
        await seen(manager, a=None, b=stranger(other.parent))


async def test_of_a_shared_resource_nobody_is_a_stranger(serve: Serve, source: Source, family: Family) -> None:
    source.report(device("a", by(family.parent)))
    async with serve(f'{CONFIG}\nsharing = "shared"') as manager:
        await manager.say(register("w", gpu=1))
        assert (await grant_of(manager, "w"))["explanation"] == "granted"


async def test_a_driver_without_a_check_has_no_strangers(serve: Serve, source: Source, family: Family) -> None:
    source.report(device("a", by(family.parent)))
    async with serve(reporting("gpu")) as manager:
        await manager.say(register("w", gpu=1))
        assert (await grant_of(manager, "w"))["explanation"] == "granted"


async def test_a_stranger_is_logged_once(
    serve: Serve, source: Source, family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    source.report(device("a", by(family.parent)))
    async with serve(CONFIG) as manager:
        await seen(manager, a=stranger(family.parent))
        source.report(device("a", by(family.parent)), device("b", ()))
        await seen(manager, a=stranger(family.parent), b=None)
    said = capsys.readouterr().out
    assert said.count("a process uses a device that was not lent to it") == 1
    assert stranger(family.parent) in said


def test_it_is_found_whether_a_process_runs_here() -> None:
    with families(1) as (family,):
        found = running_processes.find([family.parent, family.child, 2**22 + 1, os.getpid()])
        parent, child = found[family.parent], found[family.child]
        assert isinstance(parent, running_processes.RunningProcess)
        assert isinstance(child, running_processes.RunningProcess)
        assert parent.identity in child.lineage
        assert child.identity not in parent.lineage
        assert found[2**22 + 1] is None
        assert os.getpid() not in {pid for pid, _ in child.lineage}
