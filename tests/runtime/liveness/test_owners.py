"""Owners: their death releases at once, and who has no lease is given one where nobody watches its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import anyio.to_thread
import pytest
from msgspec import UNSET

from outfitter_proto.bus import BusUnavailableError, Entry
from outfitter_service.runtime.processor.processor import Limits
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.managers.in_process import HOST, TOPICS, InProcessManager, another, deregister, heartbeat, register, static
from support.processes.owners import body, owner_of, process

__all__ = ["process"]


async def test_an_owners_death_releases_at_once_whatever_its_lease(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as manager:
        owner = body(owner_of(process.pid))
        await manager.say(register("w", gpu=1, owner=owner, lease_s=3600.0), register("next", gpu=1))
        await manager.state("w", "allocated")
        await manager.reported()
        assert manager.processor.liveness.owners.watched == 1
        process.kill()
        ended = await manager.state("w", "ended")
        assert ended["reason_code"] == "owner-died"
        assert str(process.pid) in ended["reason"]
        await manager.state("next", "allocated")
        await manager.reported()
        assert manager.processor.liveness.owners.watched == 0
        assert manager.metric("outfitter_releases_total", reason="owner-died") == 1


async def test_a_watched_owner_needs_no_heartbeats(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(
            register("w", gpu=1, owner=body(owner_of(os.getpid())), lease_s=0.2),
            register("silent", gpu=1, lease_s=0.2),
        )
        await manager.state("silent", "ended")
        assert (await manager.records())["h/w/1"]["state"] == "allocated"


async def test_an_owner_whose_name_is_no_text_is_watched_like_any_other(serve: Serve) -> None:
    """The kernel cuts a process's name after 15 bytes, be it in the middle of a character."""
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'worker-\\xc3', 0, 0, 0); print(flush=True); input()"
    async with serve(static(1)) as manager:
        with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as renamed:
            await anyio.to_thread.run_sync(renamed.stdout.readline if renamed.stdout else bytes)
            await manager.say(register("w", gpu=1, owner=body(owner_of(renamed.pid)), lease_s=None))
            await manager.state("w", "allocated")
            await manager.reported()
            assert manager.processor.liveness.owners.watched == 1
            renamed.kill()
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_with_a_number_that_no_process_can_have_is_dead(serve: Serve) -> None:
    async with serve(static(1)) as manager:
        owner = {**body(owner_of(os.getpid())), "pid": 2**31}
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None))
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_that_died_while_no_manager_looked_is_found_dead_at_the_start(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await manager.state("w", "allocated")
    process.kill()
    process.wait()
    async with serve(static(1), identity=another()) as manager:
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"


async def test_an_owner_that_was_dead_when_it_registered_holds_nothing_for_long(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    owner = body(owner_of(process.pid))
    process.kill()
    process.wait()
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None))
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"


async def test_owners_of_the_boot_before_are_dead_if_it_was_this_machines(serve: Serve) -> None:
    owner = body(owner_of(os.getpid()))
    async with serve(static(1), identity=another(machine_id="m")) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None), register("next", gpu=1))
        await manager.state("w", "allocated")
    async with serve(static(1), identity=another(machine_id="m", boot_id="the next")) as manager:
        assert "restart" in (await manager.state("w", "ended"))["reason"]
        await manager.state("next", "allocated")


@pytest.mark.parametrize(("before", "after"), [(None, None), ("m", None), (None, "m")])
async def test_owners_of_another_boot_are_not_taken_for_dead_where_the_machine_may_be_another(
    serve: Serve, before: str | None, after: str | None
) -> None:
    owner = body(owner_of(os.getpid()))
    async with serve(static(2), identity=another(machine_id=before)) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None))
        await manager.state("w", "allocated")
    async with serve(static(2), identity=another(machine_id=after, boot_id="another")) as manager:
        await manager.say(register("next", gpu=1))
        await manager.state("next", "allocated")
        assert (await manager.records())["h/w/1"]["state"] == "allocated"
    # a machine that is gone for good has taken its processes with it
    limits = Limits(take_over=True)
    async with serve(static(2), identity=another(machine_id=after, boot_id="a third"), limits=limits) as manager:
        await manager.say(register("last", gpu=1, owner={**owner, "boot_id": "another"}, lease_s=None))
        assert (await manager.state("last", "ended"))["reason_code"] == "owner-died"


@pytest.mark.parametrize(("last_commit", "least", "most"), [(1, 0, 0), (2, 1, 7)])
async def test_a_crash_while_the_deaths_of_the_boot_before_are_written_down_loses_none(
    bus: FaultyBus, serve: Serve, last_commit: int, least: int, most: int
) -> None:
    """Neither before the first of them, when who manages the host has been written, nor in the middle."""
    owner = body(owner_of(os.getpid()))
    workers = [f"w{index}" for index in range(8)]
    async with serve(static(8), identity=another(machine_id="m")) as manager:
        await manager.say(*[register(worker, gpu=1, owner=owner, lease_s=None) for worker in workers])
        for worker in workers:
            await manager.state(worker, "allocated")
    limits = Limits(events_per_commit=3, beat_s=None)  # signs of life would add a commit at some moment
    async with serve(static(8), identity=another(machine_id="m", boot_id="b"), limits=limits, ready=False) as manager:
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
        ended = [worker for worker in workers if (await manager.records())[f"h/{worker}/1"]["state"] == "ended"]
        assert least <= len(ended) <= most
    async with serve(static(8), identity=another(machine_id="m", boot_id="b")) as manager:
        for worker in workers:
            assert (await manager.state(worker, "ended"))["reason_code"] == "owner-died"
        # and with the last of them, the boot that goes on is named
        assert (await manager.records())["@checkpoint/host/h"]["boot_id"] == "b"
        await manager.say(register("w", "2", gpu=1, owner={**owner, "boot_id": "b"}, lease_s=None))
        await manager.state("w", "allocated", "2")
    async with serve(static(8), identity=another(machine_id="m", boot_id="c")) as manager:
        assert (await manager.state("w", "ended", "2"))["reason_code"] == "owner-died"


# --- last words: the kernel is faster than the bus -----------------------------------------------------------


async def seen_dead(manager: InProcessManager) -> None:
    with anyio.fail_after(20):
        while manager.processor.liveness.owners.watched:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.002)


@pytest.mark.parametrize("words", ["deregister", "nothing"])
async def test_what_a_worker_said_before_it_died_counts_although_its_death_is_seen_sooner(
    bus: FaultyBus, serve: Serve, process: subprocess.Popen[bytes], words: str
) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await manager.state("w", "allocated")
        slow = anyio.Event()

        async def hold(point: str) -> None:
            if point == "fetch:after":
                await slow.wait()

        bus.script = hold
        if words == "deregister":
            await manager.say(deregister("w"))
        process.kill()
        await seen_dead(manager)
        slow.set()
        ended = await manager.state("w", "ended")
    assert ended["reason_code"] == ("deregistered" if words == "deregister" else "owner-died")


async def test_a_death_is_judged_once_the_bus_can_be_asked_again(
    bus: FaultyBus, serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await manager.state("w", "allocated")
        asked = 0

        async def refuse_twice(point: str) -> None:
            nonlocal asked
            asked += point == "offsets:before"
            if point == "offsets:before" and asked < 3:
                raise BusUnavailableError("away")

        bus.script = refuse_twice
        process.kill()
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"
        assert asked >= 3


async def test_last_words_of_the_time_without_a_manager_count_too(
    serve: Serve, process: subprocess.Popen[bytes]
) -> None:
    async with serve(static(1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(process.pid)), lease_s=None))
        await manager.state("w", "allocated")
        bus = manager.bus
    await bus.publish(TOPICS.registrations, 0, Entry(HOST.encode(), json.dumps(deregister("w")).encode()))
    process.kill()
    process.wait()
    async with serve(static(1), identity=another()) as manager:
        assert (await manager.state("w", "ended"))["reason_code"] == "deregistered"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pid_ns": 1}, "pid-namespace"),
        ({"boot_id": "another machine's"}, "machine"),
        ({"time_ns": 1}, "time-namespace"),
        ({"start_ticks": 1, "time_ns": UNSET}, "time-namespace"),
    ],
)
async def test_a_worker_without_a_lease_whose_owner_nobody_watches_is_given_one_and_told(
    serve: Serve, changes: dict[str, Any], code: str
) -> None:
    owner = body(owner_of(os.getpid(), **changes))
    async with serve(static(1), lease_s=0.5) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None))
        given = await manager.until(
            lambda records: (found := records.get("h/w/1")) and found.get("unwatched") and found
        )
        assert (given["state"], given["unwatched"], given["request"]["lease_s"]) == ("allocated", code, 0.5)
        assert (await manager.state("w", "ended"))["reason_code"] == "lease-expired"
        await manager.reported()
        assert manager.processor.state_counts().unwatched_owners == {}


async def test_heartbeats_renew_the_lease_that_a_worker_did_not_ask_for(serve: Serve) -> None:
    owner = body(owner_of(os.getpid(), pid_ns=1))
    async with serve(static(1)) as manager:
        asked = register("w", gpu=1, owner=owner, lease_s=None)
        await manager.say(asked)
        await manager.until(lambda records: (found := records.get("h/w/1")) and found.get("unwatched"))
        await manager.reported()
        assert len(manager.processor.liveness.leases) == 1
        assert manager.processor.state_counts().unwatched_owners == {"pid-namespace": 1}
        # the same registration once more asks for nothing else
        await manager.say(asked, heartbeat("w"), deregister("w"))
        assert (await manager.state("w", "ended"))["reason_code"] == "deregistered"
        assert await manager.dead_letters(0) == []


async def test_a_manager_that_can_watch_no_longer_gives_a_lease_to_who_had_none(serve: Serve) -> None:
    """A container that was made anew is another PID namespace."""
    owner = body(owner_of(os.getpid()))
    async with serve(static(2)) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=None), register("x", gpu=1, lease_s=None))
        await manager.state("w", "allocated")
        await manager.reported()
        assert len(manager.processor.liveness.leases) == 0
    async with serve(static(2), identity=another(pid_ns=1), lease_s=7.0) as manager:
        given = await manager.until(lambda records: (found := records["h/w/1"]).get("unwatched") and found)
        assert given["request"]["lease_s"] == 7.0
        untouched = (await manager.records())["h/x/1"]  # it named no owner: it holds until it is deregistered
        assert (untouched["request"]["lease_s"], "unwatched" in untouched) == (None, False)


async def test_a_worker_with_a_lease_is_told_only_what_it_cannot_know(serve: Serve) -> None:
    async with serve(static(2)) as manager:
        await manager.say(
            register("afar", gpu=1, owner=body(owner_of(os.getpid(), pid_ns=1))),
            register("shifted", gpu=1, owner=body(owner_of(os.getpid(), start_ticks=1, time_ns=UNSET))),
        )
        told = await manager.until(lambda records: (found := records.get("h/shifted/1")) and found.get("unwatched"))
        assert told == "time-namespace"
        assert "unwatched" not in (await manager.records())["h/afar/1"]
        assert len(manager.processor.liveness.leases) == 2


# --- workers for which nobody sends heartbeats ----------------------------------------------------------------


ELSEWHERE = [
    {"pid_ns": 1},
    {"boot_id": "another", "machine_id": None},
    {"boot_id": None},
    {"time_ns": 1},
]
"""The identities of managers that cannot watch this machine's processes."""


async def _see_a_lease_expire(manager: InProcessManager, worker: str) -> None:
    await manager.say(register(worker, lease_s=0.2, resources={}))
    assert (await manager.state(worker, "ended"))["reason_code"] == "lease-expired"


@pytest.mark.parametrize("lease_s", [0.2, None])
@pytest.mark.parametrize("elsewhere", ELSEWHERE, ids=str)
async def test_without_heartbeats_a_worker_keeps_its_devices_while_a_manager_cannot_see_its_process(
    serve: Serve, process: subprocess.Popen[bytes], elsewhere: dict[str, Any], lease_s: float | None
) -> None:
    owner = body(owner_of(process.pid))
    async with serve(static(1), lease_s=0.2) as manager:
        await manager.say(register("w", gpu=1, owner=owner, lease_s=lease_s, heartbeats=False))
        await manager.state("w", "allocated")
    async with serve(static(1), identity=another(**elsewhere), lease_s=0.2) as manager:
        await manager.say(register("next", gpu=1, lease_s=None))
        await _see_a_lease_expire(manager, "silent")
        await _see_a_lease_expire(manager, "after")
        records = await manager.records()
        assert (records["h/w/1"]["state"], records["h/next/1"]["state"]) == ("allocated", "pending")
    async with serve(static(1), identity=another()) as manager:
        await manager.reported()
        process.kill()
        assert (await manager.state("w", "ended"))["reason_code"] == "owner-died"
        await manager.state("next", "allocated")


async def test_without_heartbeats_a_worker_ends_with_its_machines_boot(serve: Serve) -> None:
    owner = body(owner_of(os.getpid()))
    async with serve(static(1), identity=another(machine_id="m")) as manager:
        await manager.say(register("w", gpu=1, owner=owner, heartbeats=False))
        await manager.state("w", "allocated")
    async with serve(static(1), identity=another(machine_id="m", pid_ns=1)) as manager:
        await manager.ready()
    async with serve(static(1), identity=another(machine_id="m", pid_ns=1, boot_id="the next")) as manager:
        assert "restart" in (await manager.state("w", "ended"))["reason"]


async def test_without_heartbeats_a_worker_that_nobody_sees_ends_when_somebody_deregisters_it(serve: Serve) -> None:
    async with serve(static(1), identity=another(pid_ns=1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(os.getpid())), heartbeats=False))
        await manager.state("w", "allocated")
        await manager.say(deregister("w"))
        assert (await manager.state("w", "ended"))["reason_code"] == "deregistered"


async def test_without_heartbeats_a_newer_run_of_the_worker_takes_nothing_from_an_owner_that_nobody_sees(
    serve: Serve,
) -> None:
    async with serve(static(1), identity=another(pid_ns=1), lease_s=0.2) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(os.getpid())), lease_s=0.2, heartbeats=False))
        await manager.state("w", "allocated")
        await manager.say(register("w", "2", gpu=1, lease_s=None))
        await manager.state("w", "pending", "2")
        await _see_a_lease_expire(manager, "silent")
        await _see_a_lease_expire(manager, "after")
        assert (await manager.records())["h/w/1"]["state"] == "allocated"


@pytest.mark.parametrize("fields", [{"heartbeats": False}, {"heartbeats": True, "owner": None}, {"owner": None}])
async def test_with_heartbeats_or_without_an_owner_the_lease_decides_where_nobody_watches(
    serve: Serve, fields: dict[str, Any]
) -> None:
    if "owner" not in fields:
        message = register("w", gpu=1, lease_s=0.2, **fields)
    else:
        message = register("w", gpu=1, lease_s=0.2, **fields | {"owner": body(owner_of(os.getpid()))})
    async with serve(static(1), identity=another(pid_ns=1)) as manager:
        await manager.say(message)
        assert (await manager.state("w", "ended"))["reason_code"] == "lease-expired"


async def test_that_a_worker_without_heartbeats_is_out_of_sight_is_logged(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "workers that send no heartbeats keep their devices, because this manager cannot see their processes"
    said = ""
    async with serve(static(1), identity=another(pid_ns=1)) as manager:
        await manager.say(register("w", gpu=1, owner=body(owner_of(os.getpid())), heartbeats=False))
        await manager.state("w", "allocated")
        with anyio.fail_after(20):
            while words not in said:
                await anyio.sleep(0.02)
                said += capsys.readouterr().out
    assert "outfitter explain h/w/1" in said
