"""A second manager for the same host never works beside the first."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import BusUnavailableError, CommitUnknownError
from outfitter_service.runtime.machine_lock import ManagerExistsError, alone_on_machine, others
from outfitter_service.runtime.manager.service import HOSTS_SHOWN
from outfitter_service.runtime.processor import takeover
from outfitter_service.runtime.processor.processor import Limits
from outfitter_service.runtime.processor.takeover import ForeignManagerError
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.managers.in_process import HOST, InProcessManager, another, register, static
from support.managers.process import ManagerError, StartManager


async def another_takes_over(first: InProcessManager, serve: Serve, url: str, go: anyio.Event) -> InProcessManager:
    """A second manager answers, then the first one may `go` on, and gives up: the second one."""
    async with FaultyBus(url) as bus, serve(static(2), on=bus, identity=another(instance="second")) as second:
        await second.state("a", "allocated")
        go.set()
        await first.ended_by(ForeignManagerError)
        await second.say(register("b", gpu=1))
        await second.state("b", "allocated")
        return second


async def test_a_fenced_manager_says_who_took_over_and_does_not_fence_back(serve: Serve) -> None:
    async with serve(static(2), identity=another(instance="first")) as first:
        await first.say(register("a", gpu=1))
        await first.state("a", "allocated")
        async with serve(static(2), identity=another(instance="second")) as second:
            await second.say(register("b", gpu=1))
            await second.state("b", "allocated")
            failure = await first.ended_by(ForeignManagerError)
            assert "second" in failure
            assert HOST in failure
            assert not first.processor.ready
            await second.say(register("c", gpu=1))
            await second.state("c", "pending")
            assert second.processor.ready
    report = await verdict(first.bus.url)
    assert report.violations == ()
    assert report.counts["managers"] == 2


async def test_a_manager_whose_commit_failed_looks_before_it_fences_a_newer_one(
    bus: FaultyBus, serve: Serve, url: str
) -> None:
    async with serve(static(2), identity=another(instance="first")) as first:
        hanging = anyio.Event()
        go = anyio.Event()

        async def hang(point: str) -> None:
            if point == "commit:before":
                hanging.set()
                await go.wait()
                raise CommitUnknownError("no answer")

        bus.script = hang
        await first.say(register("a", gpu=1))
        await hanging.wait()
        second = await another_takes_over(first, serve, url, go)
        assert second.metric("outfitter_commits_total", outcome="fenced") == 0


async def test_a_manager_that_was_replaced_between_its_look_and_its_fencing_gives_the_host_back(
    bus: FaultyBus, serve: Serve, url: str
) -> None:
    async with serve(static(2), identity=another(instance="first")) as first:
        hanging = anyio.Event()
        go = anyio.Event()

        async def hang(point: str) -> None:
            if point == "commit:before" and not hanging.is_set():
                raise CommitUnknownError("no answer")
            if point == "open_writer:before":
                hanging.set()
                await go.wait()

        bus.script = hang
        await first.say(register("a", gpu=1))
        await hanging.wait()
        await another_takes_over(first, serve, url, go)
    report = await verdict(url)
    assert report.violations == ()
    assert report.counts["managers"] == 2


def leave_undecided(bus: FaultyBus, *, told: bool) -> anyio.Event:
    """Fail the next commit, and leave the ledger's end undecided until the identity is taken anew; then the event is
    set. `told`: the bus says who has the identity."""
    failed, taken = False, anyio.Event()

    async def hang(point: str) -> None:
        nonlocal failed
        if point == "commit:before" and not failed:
            failed = True
            raise CommitUnknownError("no answer")
        if point == "tenure:before" and not told:
            raise BusUnavailableError("nobody tells who has the identity")
        if point == "open_writer:before" and failed:
            taken.set()
        if point == "stable_end:before" and failed and not taken.is_set():
            await anyio.sleep_forever()

    bus.script = hang
    return taken


async def take_the_undecided(bus: FaultyBus, serve: Serve, *, told: bool) -> None:
    """Let a manager whose ledger's end stays undecided grant all the same."""
    async with serve(static(2)) as manager:
        taken = leave_undecided(bus, told=told)
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")
        assert taken.is_set()


async def test_a_ledger_whose_end_stays_undecided_is_taken_all_the_same(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps it open may be this manager's own transaction, which taking the partition ends."""
    monkeypatch.setattr(takeover, "END_WAIT_S", 0.2)
    await take_the_undecided(bus, serve, told=False)


async def test_a_manager_that_nobody_replaced_goes_on_without_waiting_for_what_it_has_open_itself(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "END_WAIT_S", 3600.0)
    await take_the_undecided(bus, serve, told=True)
    assert (await verdict(bus.url)).violations == ()


async def test_a_managers_first_look_waits_for_nothing_that_a_crash_of_its_own_left_open(
    bus: FaultyBus, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "END_WAIT_S", 3600.0)
    taken = False

    async def hang(point: str) -> None:
        nonlocal taken
        taken = taken or point == "open_writer:before"
        if point == "stable_end:before" and not taken:
            await anyio.sleep_forever()

    bus.script = hang
    async with serve(static(2)) as manager:
        assert taken
        assert bus.looked_for == set(bus.named)
        await manager.say(register("a", gpu=1))
        await manager.state("a", "allocated")


async def test_another_machine_is_refused_and_does_not_disturb_the_one_that_serves(serve: Serve) -> None:
    async with serve(static(2), identity=another(instance="first", machine_id="this-machine")) as first:
        await first.say(register("a", gpu=1))
        await first.state("a", "allocated")
        async with serve(
            static(2), identity=another(instance="second", machine_id="that-machine"), ready=False
        ) as second:
            failure = await second.ended_by(ForeignManagerError)
            for words in ("this-machine", "that-machine", "--take-over", "--host"):
                assert words in failure
        await first.say(register("b", gpu=1))
        await first.state("b", "allocated")
        assert first.metric("outfitter_commits_total", outcome="fenced") == 0


async def test_another_machine_may_take_over_when_it_is_told_to(serve: Serve) -> None:
    async with serve(static(2), identity=another(machine_id="this-machine")) as first:
        await first.say(register("a", gpu=1))
        await first.state("a", "allocated")
    limits = Limits(take_over=True)
    async with serve(static(2), identity=another(machine_id="that-machine"), limits=limits) as second:
        await second.say(register("b", gpu=1))
        await second.state("b", "allocated")
        assert (await second.records())["h/a/1"]["state"] == "allocated"


def test_the_machines_lock_is_held_by_one_manager_per_host() -> None:
    with (
        alone_on_machine("t-lock-a"),
        alone_on_machine("t-lock-b"),
        pytest.raises(ManagerExistsError, match="t-lock-a"),
        alone_on_machine("t-lock-a"),
    ):
        pytest.fail("two managers")
    with alone_on_machine("t-lock-a"):
        pass


def test_hosts_with_long_names_have_locks_of_their_own() -> None:
    with alone_on_machine("h" * 200 + "-1"), alone_on_machine("h" * 200 + "-2"):
        pass


def test_a_second_manager_on_this_machine_exits_with_a_reason_even_on_another_bus(
    start_manager: StartManager, tmp_path: Path
) -> None:
    first = start_manager()
    only = "another --host only if the two lend different devices"
    with pytest.raises(ManagerError, match=rf"already serves host .*another bus.*{only}"):
        start_manager(host=first.host)
    with pytest.raises(ManagerError, match="already serves host"):
        start_manager(host=first.host, bus=first.bus_url)
    assert first.metric("outfitter_ready") == 1
    assert first.metric("outfitter_commits_total", outcome="fenced") == 0
    first.kill9()
    start_manager(host=first.host, bus=first.bus_url)


def test_a_manager_of_another_host_on_this_machine_warns_that_both_may_lend_the_same_devices(
    start_manager: StartManager,
) -> None:
    first = start_manager()
    second = start_manager()
    [line] = [line for line in second.log_tail().splitlines() if "and may lend the same devices" in line]
    assert first.host in others(second.host)
    assert second.host not in others(second.host)
    managers = int(re.findall(r"managers=(\d+)", line)[0])
    assert first.host in line or managers > HOSTS_SHOWN  # other tests may run at the same time


def test_who_serves_the_host_is_asked_before_the_port(start_manager: StartManager) -> None:
    first = start_manager()
    taken = first.url.removeprefix("http://")
    done = first.outfitter("serve", "--config", str(first.config), "--http", taken)
    assert done.returncode == 1
    assert f"already serves host {first.host!r}" in done.stderr
    done = first.outfitter("serve", "--config", str(first.config), "--http", taken, "--host", f"{first.host}-2")
    assert done.returncode == 1
    assert taken in done.stderr
