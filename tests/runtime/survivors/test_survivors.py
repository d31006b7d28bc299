"""Processes that a worker leaves behind keep its devices, where its registration asks for that."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto.bus import CommitUnknownError
from outfitter_proto.records import ResolvedRequest, Survivors
from outfitter_proto.support.processes import user_namespace
from outfitter_service.runtime.survivors import processes
from outfitter_service.runtime.survivors.processes import Mark, Search, Survivor
from outfitter_service.runtime.survivors.survivor_watch import NONE_LEFT, SearchProcesses, SurvivorWatch
from runtime.conftest import Serve
from support.api import allocation
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.drivers.preparing import BENCHES, Bench
from support.managers.in_process import InProcessManager, another, deregister, preparing, register, static
from support.processes.owners import body, owner_of

IDLE = "import sys; sys.stdin.read()"
DEAF = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); sys.stdin.read()"

HOPS = """
import os, sys
while os.read(0, 1) == b"x":
    if os.fork():
        os._exit(0)
    os.setsid()
    print(flush=True)
print(flush=True)
"""
"""For each x that it reads it goes on as another process, in a session of its own. Then it says so."""

RUN = secrets.token_hex(4)
"""The incarnation: tests on the same machine find only their own processes."""
KEY = f"h/w/{RUN}"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process of the worker `w`; the fixture ends it."""
    with ExitStack() as processes:

        def start(program: str = IDLE, worker: str = "w", **more: str) -> subprocess.Popen[bytes]:
            names = {"OUTFITTER_HOST": "h", "OUTFITTER_WORKER": worker, "OUTFITTER_INCARNATION": RUN, **more}
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=names, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


def asking(owner: int | None = None, *, uid: int | None = None, **more: Any) -> dict[str, Any]:
    """A registration of `w` whose survivors count."""
    survivors = {"uid": os.getuid() if uid is None else uid, **more}
    return register("w", RUN, gpu=1, owner=body(owner_of(owner or os.getpid())), survivors=survivors)


async def test_a_process_that_outlives_its_owner_keeps_the_device_until_it_has_ended(
    serve: Serve, start: Start, url: str
) -> None:
    owner, survivor = start(OUTFITTER_WORKER="another"), start()
    async with serve(static(1)) as manager:
        await manager.say(asking(owner.pid), register("next", gpu=1))
        await manager.state("w", "allocated", RUN)
        owner.kill()
        record = await manager.until(lambda records: (found := records.get(KEY, {})).get("delayed_by") and found)
        assert record["state"] == "releasing"
        assert record["delayed_by"] == f"process {survivor.pid} ({Path(sys.executable).name}) of the worker still runs"
        assert record["reason"].endswith(record["delayed_by"])
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        survivor.kill()
        ended = await manager.state("w", "ended", RUN)
        assert (ended["reason_code"], ended.get("delayed_by")) == ("owner-died", None)
        await manager.state("next", "allocated")
        [step] = [step for step in await manager.history() if step.get("to") == "ended"]
        assert " of the worker " in step["explanation"]
    assert (await verdict(url)).violations == ()


async def test_a_process_that_a_survivor_started_counts_as_well(serve: Serve, start: Start) -> None:
    parent = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {IDLE!r}]); sys.stdin.read()")
    async with serve(static(1)) as manager:
        await manager.say(asking())
        await manager.state("w", "allocated", RUN)
        await manager.say(deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
        parent.kill()  # the other one still has the pipe to read from, as long as this process keeps it open
        parent.wait()
        assert (await manager.records())[KEY]["state"] == "releasing"
        assert parent.stdin is not None
        parent.stdin.close()
        await manager.state("w", "ended", RUN)


@pytest.mark.parametrize(
    "other",
    [{"OUTFITTER_HOST": "g"}, {"OUTFITTER_WORKER": "v"}, {"OUTFITTER_INCARNATION": "2"}, {"OUTFITTER_INCARNATION": ""}],
)
async def test_processes_of_others_hold_nothing_up(serve: Serve, start: Start, other: dict[str, str]) -> None:
    start(**other)
    async with serve(static(1)) as manager:
        await manager.say(asking(), deregister("w", RUN))
        await manager.state("w", "ended", RUN)


async def test_a_process_of_another_user_cannot_forge_its_way_to_a_device(serve: Serve, start: Start) -> None:
    start()
    async with serve(static(1)) as manager:
        await manager.say(asking(uid=os.getuid() + 1), deregister("w", RUN))
        await manager.state("w", "ended", RUN)


async def test_a_manager_that_cannot_see_the_owner_does_not_wait_for_survivors(serve: Serve, start: Start) -> None:
    start()
    async with serve(static(1), identity=another(pid_ns=1)) as manager:
        await manager.say(asking(), deregister("w", RUN))
        await manager.state("w", "ended", RUN)
        [step] = [step for step in await manager.history() if step.get("to") == "ended"]
        assert step["explanation"].endswith("this manager does not see them")


@pytest.fixture
async def named(serve: Serve, start: Start) -> subprocess.Popen[bytes]:
    """A process that has outlived the owner of the only device. A manager of machine `m` has named it and was killed;
    `next` waits."""
    survivor, owner = start(), start(OUTFITTER_WORKER="another")
    async with serve(static(1), identity=another(machine_id="m")) as manager:
        await manager.say(asking(owner.pid), register("next", gpu=1, lease_s=None))
        await manager.state("w", "allocated", RUN)
        owner.kill()
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
    return survivor


OUT_OF_SIGHT = "as an earlier manager saw; this one does not see the worker's processes"
UNSEEING: dict[str, dict[str, Any]] = {
    "another PID namespace": {"machine_id": "m", "pid_ns": 1},
    "another machine, perhaps": {"machine_id": None, "boot_id": "another"},
    "cluster scope": {"machine_id": "m", "pid_ns": None, "boot_id": None},
}


async def _waits(manager: InProcessManager, survivor: subprocess.Popen[bytes]) -> None:
    record = await manager.until(lambda records: OUT_OF_SIGHT in records[KEY].get("delayed_by", "") and records[KEY])
    assert record["state"] == "releasing"
    assert record["delayed_by"].startswith(f"process {survivor.pid} ")
    assert record["delayed_by"].count(OUT_OF_SIGHT) == 1
    assert record["reason"] == f"process {record['request']['owner']['pid']} ended; {record['delayed_by']}"
    assert (await manager.records())["h/next/1"]["state"] == "pending"


@pytest.mark.parametrize("sees", UNSEEING)
async def test_a_device_waits_for_processes_that_an_earlier_manager_has_named_until_somebody_deregisters_the_worker(
    serve: Serve, named: subprocess.Popen[bytes], url: str, sees: str
) -> None:
    for _ in range(2):
        async with serve(static(1), identity=another(**UNSEEING[sees])) as manager:
            await manager.say(register("silent", gpu=1, lease_s=0.1))
            await manager.state("silent", "ended")
            await _waits(manager, named)
    async with serve(static(1), identity=another(**UNSEEING[sees])) as manager:
        await manager.say(deregister("w", RUN))
        ended = await manager.state("w", "ended", RUN)
        assert (ended["reason_code"], ended.get("delayed_by")) == ("owner-died", None)
        assert ended["reason"] == f"process {ended['request']['owner']['pid']} ended"
        await manager.state("next", "allocated")
    assert (await verdict(url)).violations == ()


async def test_a_manager_that_sees_the_named_processes_looks_again(
    serve: Serve, named: subprocess.Popen[bytes], url: str
) -> None:
    async with serve(static(1), identity=another(machine_id="m", pid_ns=1)) as manager:
        await _waits(manager, named)
    async with serve(static(1), identity=another(machine_id="m")) as manager:
        await manager.until(lambda records: OUT_OF_SIGHT not in records[KEY]["delayed_by"])
        await manager.say(deregister("w", RUN), register("after"))
        await manager.state("after", "pending")
        assert (await manager.records())[KEY]["delayed_by"].startswith(f"process {named.pid} ")
        named.kill()
        await manager.state("next", "allocated")
        [step] = [step for step in await manager.history() if step.get("to") == "ended"]
        assert "this manager does not see them" not in step["explanation"]
    assert (await verdict(url)).violations == ()


@pytest.mark.parametrize("after", [{}, {"pid_ns": 1}])
async def test_the_named_processes_have_ended_with_their_machines_boot(
    serve: Serve, named: subprocess.Popen[bytes], after: dict[str, int]
) -> None:
    async with serve(static(1), identity=another(machine_id="m", pid_ns=1)) as manager:
        await _waits(manager, named)
    async with serve(static(1), identity=another(machine_id="m", boot_id="the next", **after)) as manager:
        await manager.state("next", "allocated")


async def test_what_its_driver_says_afterwards_is_no_process_that_a_manager_has_named(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    """A manager that sees no processes lends the device as soon as its driver lets it."""
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path), 1)
    survivor = start()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(asking())
        await manager.state("w", "allocated", RUN)
        bench.users[bench.ids[0]] = "process 4711"
        await manager.say(deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
        survivor.kill()
        await manager.until(lambda records: "still in use by process 4711" in records[KEY]["delayed_by"])
    bench.users.clear()
    async with serve(preparing(bench.name), identity=another(pid_ns=1)) as manager:
        await manager.state("w", "ended", RUN)


async def test_a_manager_without_the_driver_does_not_forget_the_processes_that_were_named(
    serve: Serve, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path), 1)
    survivor = start()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(asking())
        await manager.state("w", "allocated", RUN)
        await manager.say(deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
    capsys.readouterr()
    said = ""
    async with serve(static(name="fpga")) as manager:
        with anyio.fail_after(20):
            while "devices stay held" not in said:
                await anyio.sleep(0.02)
                said += capsys.readouterr().out
        assert (await manager.records())[KEY]["delayed_by"].startswith(f"process {survivor.pid} ")
        survivor.kill()
        await manager.until(lambda records: "is not configured" in records[KEY]["delayed_by"])


async def test_nobody_claims_that_no_process_of_another_user_namespace_is_left(serve: Serve) -> None:
    """Some may be in a further one, where the worker's user id means another user."""
    async with serve(static(1)) as manager:
        await manager.say(asking(user_ns=1), deregister("w", RUN))
        await manager.state("w", "ended", RUN)
        [step] = [step for step in await manager.history() if step.get("to") == "ended"]
        assert step["explanation"].endswith("the worker is in another user namespace")


async def test_a_user_namespace_that_is_the_managers_makes_no_difference(serve: Serve, start: Start) -> None:
    survivor = start()
    async with serve(static(1)) as manager:
        await manager.say(asking(user_ns=user_namespace()), deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
        survivor.kill()
        await manager.state("w", "ended", RUN)
        [step] = [step for step in await manager.history() if step.get("to") == "ended"]
        assert "user namespace" not in step["explanation"]


@pytest.mark.parametrize(("program", "number"), [(IDLE, signal.SIGTERM), (DEAF, signal.SIGKILL)])
async def test_survivors_are_ended_where_the_registration_asks_for_it(
    serve: Serve, start: Start, program: str, number: int
) -> None:
    survivor = start(program)
    if program == DEAF:
        assert survivor.stdout is not None
        survivor.stdout.readline()
    async with serve(static(1)) as manager:
        await manager.say(asking(kill_after_s=60.0 if program == IDLE else 0.3), deregister("w", RUN))
        await manager.state("w", "ended", RUN)
    assert survivor.wait() == -number


async def test_a_manager_that_starts_again_waits_for_the_same_survivors(serve: Serve, start: Start, url: str) -> None:
    survivor = start()
    async with serve(static(1)) as manager:
        await manager.say(asking(), deregister("w", RUN), register("next", gpu=1))
        await manager.state("w", "releasing", RUN)
    async with serve(static(1)) as manager:
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
        assert (await manager.records())["h/next/1"]["state"] == "pending"
        survivor.kill()
        await manager.state("next", "allocated")
    assert (await verdict(url)).violations == ()


async def test_a_failed_commit_of_the_end_is_repeated_after_the_survivors_are_gone(
    bus: FaultyBus, serve: Serve, start: Start, url: str
) -> None:
    survivor = start()
    async with serve(static(1)) as manager:
        await manager.say(asking(), deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))

        async def fail(point: str) -> None:
            if point.startswith("commit"):
                bus.script = no_faults
                raise CommitUnknownError("the answer was lost")

        bus.script = fail
        survivor.kill()
        await manager.state("w", "ended", RUN)
    assert (await verdict(url)).violations == ()


async def test_a_driver_takes_the_devices_back_only_after_the_survivors_are_gone(
    serve: Serve, start: Start, tmp_path: Path
) -> None:
    bench = BENCHES[str(tmp_path)] = Bench(str(tmp_path), 1)
    survivor = start()
    async with serve(preparing(bench.name)) as manager:
        await manager.say(asking())
        await manager.state("w", "allocated", RUN)
        await manager.say(deregister("w", RUN))
        await manager.until(lambda records: records.get(KEY, {}).get("delayed_by"))
        assert [call.what for call in bench.calls] == ["prepare"]
        survivor.kill()
        await manager.state("w", "ended", RUN)
        assert [call.what for call in bench.calls] == ["prepare", "unprepare"]


async def test_a_process_that_goes_on_as_another_one_again_and_again_is_never_lost(start: Start) -> None:
    """Each search finds one process, and that one has ended before anybody can wait for its end."""
    hopper = start(HOPS)
    orders, answers = hopper.stdin, hopper.stdout
    assert orders is not None
    assert answers is not None
    hops = 0

    def search(marks: Collection[Mark]) -> Search:
        nonlocal hops
        found = processes.search(marks)
        if found.survivors and hops < 4:
            hops += 1
            os.write(orders.fileno(), b"x" if hops < 4 else b"e")
            answers.readline()
        return found

    await wait_until_gone(search)
    assert hops == 4


async def test_devices_stay_held_while_a_search_may_have_missed_a_process() -> None:
    """…each time anew, also after a process that was seen has ended."""
    seen = Search({mark(): [Survivor(2**22 + 1, "gone", mark())]}, frozenset())
    missed = Search({}, frozenset(), "processes end before they are read")
    answers = [missed, missed, seen, missed, seen, seen, missed, missed, Search({}, frozenset())]
    assert await wait_until_gone(lambda _: answers.pop(0)) == NONE_LEFT
    assert answers == []


def mark() -> Mark:
    return Mark("h", "w", RUN, os.getuid())


async def wait_until_gone(search: SearchProcesses) -> str | None:
    """What the watch says about `w` in the end."""
    identity = another()
    owner = owner_of(os.getpid(), boot_id=identity.boot_id, pid_ns=identity.pid_ns)
    request = ResolvedRequest(amounts={"gpu": 1}, priority=0, owner=owner, survivors=Survivors(uid=os.getuid()))
    record = structs.replace(allocation("h", "w", "releasing"), request=request, incarnation=RUN)
    return await SurvivorWatch(identity, search=search).wait_until_gone(record, lambda _: None)


async def test_searches_take_at_most_a_tenth_of_the_time_however_many_workers_end() -> None:
    began: list[float] = []
    ended: list[float] = []

    def search(_: Collection[Mark]) -> Search:
        began.append(time.monotonic())
        while time.monotonic() < began[-1] + 0.01:
            pass
        ended.append(time.monotonic())
        return Search({}, frozenset())

    watch = SurvivorWatch(another(), search=search)
    for number in range(3):
        await watch.find(Mark("h", f"w-{number}", RUN, 0))
    for last, following in pairwise(zip(began, ended, strict=True)):
        assert following[0] - last[1] >= 9 * (last[1] - last[0])
