"""Owners: their death releases at once, and nobody is taken for dead who may be alive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest
from msgspec import structs

from outfitter_proto.bus import BusUnavailableError, Entry
from outfitter_proto.processes import boot_id, pid_namespace, process_owner
from outfitter_proto.records import Owner
from outfitter_service.runtime import owners
from outfitter_service.runtime.owners import OwnerWatch
from outfitter_service.runtime.processor import Limits
from service.conftest import Serve
from support.faulty_bus import FaultyBus, no_faults
from support.house import HOST, TOPICS, House, another, deregister, register, static


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another kind that lives until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def owner_of(pid: int, **changes: Any) -> Owner:
    owner = process_owner(pid)
    assert owner is not None
    return structs.replace(owner, **changes)


def body(owner: Owner) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(owner)
    return found


async def test_an_owners_death_releases_at_once_whatever_its_lease(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as house:
        owner = body(owner_of(process.pid))
        await house.say(register("w", gpu=1, owner=owner, lease_s=3600.0), register("next", gpu=1))
        await house.state("w", "allocated")
        await house.told()
        assert house.processor.attendance.watched == 1
        process.kill()
        ended = await house.state("w", "ended")
        assert ended["reason_code"] == "owner-died"
        assert str(process.pid) in ended["reason"]
        await house.state("next", "allocated")
        await house.told()
        assert house.processor.attendance.watched == 0
        assert house.metric("outfitter_releases_total", cause="owner-died") == 1


async def test_a_watched_owner_needs_no_heartbeats(serve: Serve) -> None:
    async with serve(static(2)) as house:
        await house.say(
            register("w", gpu=1, owner=body(owner_of(os.getpid())), lease_s=0.2),
            register("silent", gpu=1, lease_s=0.2),
        )
        await house.state("silent", "ended")
        assert (await house.records())["h/w/1"]["state"] == "allocated"


async def test_an_owner_whose_name_is_no_text_is_watched_like_any_other(serve: Serve) -> None:
    """The kernel cuts a process's name after 15 bytes, be it in the middle of a character."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'worker-\\xc3', 0, 0, 0); print(flush=True); input()"
    async with serve(static(1)) as house:
        with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as renamed:
            await anyio.to_thread.run_sync(renamed.stdout.readline if renamed.stdout else bytes)
            await house.say(register("w", gpu=1, owner=body(owner_of(renamed.pid)), lease_s=None))
            await house.state("w", "allocated")
            await house.told()
            assert house.processor.attendance.watched == 1
            renamed.kill()
        assert (await house.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_with_a_number_that_no_process_can_have_is_dead(serve: Serve) -> None:
    async with serve(static(1)) as house:
        owner = {**body(owner_of(os.getpid())), "pid": 2**31}
        await house.say(register("w", gpu=1, owner=owner, lease_s=None))
        assert (await house.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_that_died_while_no_manager_looked_is_found_dead_at_the_start(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as house:
        await house.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await house.state("w", "allocated")
    process.kill()
    process.wait()
    async with serve(static(1), identity=another()) as house:
        assert (await house.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_that_was_dead_when_it_registered_holds_nothing_for_long(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    owner = body(owner_of(process.pid))
    process.kill()
    process.wait()
    async with serve(static(1)) as house:
        await house.say(register("w", gpu=1, owner=owner, lease_s=None))
        assert (await house.state("w", "ended"))["reason_code"] == "owner-died"


async def test_owners_of_the_boot_before_are_dead_if_it_was_this_machines(serve: Serve) -> None:
    owner = body(owner_of(os.getpid()))
    async with serve(static(1), identity=another(machine_id="m")) as house:
        await house.say(register("w", gpu=1, owner=owner, lease_s=None), register("next", gpu=1))
        await house.state("w", "allocated")
    async with serve(static(1), identity=another(machine_id="m", boot_id="the next")) as house:
        assert "restart" in (await house.state("w", "ended"))["reason"]
        await house.state("next", "allocated")


@pytest.mark.parametrize(("before", "after"), [(None, None), ("m", None), (None, "m")])
async def test_owners_of_another_boot_are_not_taken_for_dead_where_the_machine_may_be_another(
    serve: Serve, before: str | None, after: str | None
) -> None:
    owner = body(owner_of(os.getpid()))
    async with serve(static(2), identity=another(machine_id=before)) as house:
        await house.say(register("w", gpu=1, owner=owner, lease_s=None))
        await house.state("w", "allocated")
    async with serve(static(2), identity=another(machine_id=after, boot_id="another")) as house:
        await house.say(register("next", gpu=1))
        await house.state("next", "allocated")
        assert (await house.records())["h/w/1"]["state"] == "allocated"
    # a machine that is gone for good has taken its processes with it
    limits = Limits(take_over=True)
    async with serve(static(2), identity=another(machine_id=after, boot_id="a third"), limits=limits) as house:
        await house.say(register("last", gpu=1, owner={**owner, "boot_id": "another"}, lease_s=None))
        assert (await house.state("last", "ended"))["reason_code"] == "owner-died"


@pytest.mark.parametrize(("last_commit", "least", "most"), [(1, 0, 0), (2, 1, 7)])
async def test_a_crash_while_the_deaths_of_the_boot_before_are_written_down_loses_none(
    bus: FaultyBus, serve: Serve, last_commit: int, least: int, most: int
) -> None:
    """Neither before the first of them, when who manages the host has been written, nor in the middle."""
    owner = body(owner_of(os.getpid()))
    workers = [f"w{index}" for index in range(8)]
    async with serve(static(8), identity=another(machine_id="m")) as house:
        await house.say(*[register(worker, gpu=1, owner=owner, lease_s=None) for worker in workers])
        for worker in workers:
            await house.state(worker, "allocated")
    limits = Limits(batch_records=3)
    async with serve(static(8), identity=another(machine_id="m", boot_id="b"), limits=limits, ready=False) as house:
        crashed = anyio.Event()
        commits = 0

        async def crash(point: str) -> None:
            nonlocal commits
            commits += point == "commit:before"
            if commits > last_commit:
                crashed.set()
                await anyio.sleep_forever()

        bus.script = crash
        with anyio.fail_after(20):
            await crashed.wait()
        bus.script = no_faults
        ended = [worker for worker in workers if (await house.records())[f"h/{worker}/1"]["state"] == "ended"]
        assert least <= len(ended) <= most
    async with serve(static(8), identity=another(machine_id="m", boot_id="b")) as house:
        for worker in workers:
            assert (await house.state(worker, "ended"))["reason_code"] == "owner-died"
        # and with the last of them, the boot that goes on is named
        assert (await house.records())["@checkpoint/host/h"]["boot_id"] == "b"
        await house.say(register("w", "2", gpu=1, owner={**owner, "boot_id": "b"}, lease_s=None))
        await house.state("w", "allocated", "2")
    async with serve(static(8), identity=another(machine_id="m", boot_id="c")) as house:
        assert (await house.state("w", "ended", "2"))["reason_code"] == "owner-died"


# --- last words: the kernel is faster than the bus -----------------------------------------------------------


async def seen_dead(house: House) -> None:
    with anyio.fail_after(20):
        while house.processor.attendance.watched:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.002)


@pytest.mark.parametrize("words", ["deregister", "nothing"])
async def test_what_a_worker_said_before_it_died_counts_although_its_death_is_seen_sooner(
    bus: FaultyBus, serve: Serve, process: subprocess.Popen[bytes], words: str
) -> None:
    async with serve(static(1)) as house:
        await house.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await house.state("w", "allocated")
        slow = anyio.Event()

        async def hold(point: str) -> None:
            if point == "fetch:after":
                await slow.wait()

        bus.script = hold
        if words == "deregister":
            await house.say(deregister("w"))
        process.kill()
        await seen_dead(house)
        slow.set()
        ended = await house.state("w", "ended")
    assert ended["reason_code"] == ("deregistered" if words == "deregister" else "owner-died")


async def test_a_death_is_judged_once_the_bus_can_be_asked_again(
    bus: FaultyBus, serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as house:
        await house.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await house.state("w", "allocated")
        asked = 0

        async def refuse_twice(point: str) -> None:
            nonlocal asked
            asked += point == "offsets:before"
            if point == "offsets:before" and asked < 3:
                raise BusUnavailableError("away")

        bus.script = refuse_twice
        process.kill()
        assert (await house.state("w", "ended"))["reason_code"] == "owner-died"
        assert asked >= 3


async def test_last_words_of_the_time_without_a_manager_count_too(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as house:
        await house.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await house.state("w", "allocated")
        bus = house.bus
    await bus.publish(TOPICS.registrations, 0, Entry(HOST.encode(), json.dumps(deregister("w")).encode()))
    process.kill()
    process.wait()
    async with serve(static(1), identity=another()) as house:
        assert (await house.state("w", "ended"))["reason_code"] == "deregistered"


# --- who can be watched at all -----------------------------------------------------------------------------


class Deaths(list[tuple[str, str]]):
    def __call__(self, key: str, detail: str) -> None:
        self.append((key, detail))


def watch(**changes: Any) -> tuple[OwnerWatch, Deaths]:
    died = Deaths()
    fields = {"boot_id": boot_id(), "pid_ns": pid_namespace(), "earlier_boot_id": None, "died": died}
    return OwnerWatch(**{**fields, **changes}), died


async def test_a_pid_that_belongs_to_another_process_by_now_means_that_the_owner_is_gone() -> None:
    watching, died = watch()
    assert watching.watch("k", owner_of(os.getpid(), start_ticks=1))
    assert "belongs to another process" in died[0][1]
    assert len(watching) == 0


async def test_an_owner_in_another_pid_namespace_is_not_looked_for() -> None:
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid(), pid_ns=1))
    assert died == []


async def test_an_owner_of_another_boot_is_not_looked_for_unless_it_was_this_machines_last() -> None:
    watching, died = watch()
    assert not watching.watch("k", owner_of(os.getpid(), boot_id="another machine's"))
    assert died == []
    watching, died = watch(earlier_boot_id="the boot before")
    assert watching.watch("k", owner_of(os.getpid(), boot_id="the boot before"))
    assert "restart" in died[0][1]


async def test_a_process_that_proc_does_not_show_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid=2 for other users' processes."""
    monkeypatch.setattr(owners, "start_ticks", lambda _: None)
    watching, died = watch()
    assert not watching.watch(
        "k", Owner(pid=os.getpid(), start_ticks=1, pid_ns=pid_namespace() or 0, boot_id=boot_id() or "")
    )
    assert died == []
    assert len(watching) == 0


async def test_a_process_that_proc_does_not_show_because_it_ended_is_dead(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes]
) -> None:
    owner = owner_of(process.pid)
    process.kill()
    # it stays a zombie, so its pid stays its own
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(owners, "start_ticks", lambda _: None)
    watching, died = watch()
    assert watching.watch("k", owner)
    assert len(died) == 1


async def test_where_the_own_boot_is_not_known_nobody_is_watched() -> None:
    watching, died = watch(boot_id=None)
    assert not watching.watch("k", owner_of(os.getpid()))
    assert died == []


async def test_descriptors_are_given_back(process: subprocess.Popen[bytes]) -> None:
    before = pidfds()
    watching, _ = watch()
    for key in "abc":
        watching.watch(key, owner_of(process.pid))
    watching.forget("a")
    watching.forget("a")
    assert pidfds() == before + 2
    watching.close()
    assert pidfds() == before


def pidfds() -> int:
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return sum(link.endswith("anon_inode:[pidfd]") for link in links)
