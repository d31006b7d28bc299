"""What only a real bus shows: heartbeats, leases, absent managers, attaching, forks, interruptions."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

import outfitter
from operators.conftest import HOST, WorkerSetup
from outfitter import RuntimeContext
from outfitter.session.late_deregistration import deregister_late
from outfitter.session.worker_session import MANAGER_PATIENCE, WorkerSession
from outfitter.testing import FakeOutfitter
from outfitter_proto import topics
from outfitter_proto.bus import (
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    DamagedTopicError,
    UnknownTopicError,
    connect,
)
from outfitter_proto.records import Register
from support.bus.faulty_bus import FaultyBus
from support.bus.frozen import frozen
from support.managers.scripted import ScriptedManager, host_record, publish_record
from support.polling import until

pytestmark = pytest.mark.timeout(60)


def test_heartbeats_go_on_while_the_event_loop_is_blocked(real: WorkerSetup, manager: ScriptedManager) -> None:
    async def block() -> None:
        async with real.context({"gpu": 1}, lease=0.6):
            manager.wait_until(lambda: len(manager.heartbeats) >= 5)  # blocks the loop, which is the point

    asyncio.run(block())
    (registration,) = manager.registrations
    assert {beat.incarnation for beat in manager.heartbeats} == {registration.incarnation}
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert manager.deregistrations[0].reason == "finished"


def test_heartbeats_go_on_while_python_computes(real: WorkerSetup, manager: ScriptedManager) -> None:
    with real.context({"gpu": 1}, lease=0.6):
        number = 0
        while len(manager.heartbeats) < 5:
            number += 1
    assert number > 0


def test_a_worker_that_waits_sends_heartbeats_too(real: WorkerSetup, manager: ScriptedManager) -> None:
    real.fake.keep_waiting("busy")

    async def wait() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(real.context({"gpu": 1}, lease=0.6).__aenter__)
                await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.heartbeats) >= 3)
                scope.cancel()

    asyncio.run(wait())


@pytest.mark.parametrize(
    "error",
    [BusConfigurationError("nobody may read"), DamagedTopicError("nobody can read"), UnknownTopicError("it is gone")],
    ids=lambda error: type(error).__name__,
)
async def test_a_ledger_that_cannot_be_read_any_more_ends_no_heartbeats_and_no_farewell(
    url: str, manager: ScriptedManager, error: BusError
) -> None:
    blind, blinded = False, anyio.Event()

    async def go_blind(point: str) -> None:
        if blind and point == "fetch:after":
            blinded.set()
            raise error

    asked = Register(host=HOST, worker="w", incarnation="1", lease_s=0.3)
    async with FaultyBus(url, go_blind) as bus, WorkerSession(bus, asked) as session:
        record = await session.wait()
        blind = True
        manager.fake.set("gpu", [])
        await blinded.wait()
        count = len(manager.heartbeats)
        await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.heartbeats) > count + 2)
        assert session.record == record
        assert not session.allocation_watch.read().over
    await anyio.to_thread.run_sync(manager.wait_until, lambda: manager.deregistrations)


async def test_after_the_end_of_its_lease_a_worker_that_cannot_read_the_ledger_is_not_served(
    url: str, manager: ScriptedManager
) -> None:
    cut, blind = True, False
    unread = anyio.Event()

    async def harm(point: str) -> None:
        if blind and point == "publish:before" and cut:
            raise BusUnavailableError("cut off")
        if blind and point == "fetch:before":
            unread.set()
            await anyio.sleep_forever()

    asked = Register(host=HOST, worker="w", incarnation="1", lease_s=0.6)
    async with FaultyBus(url, harm) as bus, WorkerSession(bus, asked) as session:
        await session.wait()
        lease = session.allocation_watch.lease
        blind = True
        with anyio.fail_after(20):
            manager.fake.set("gpu", [{"id": "GPU-a"}])
            await unread.wait()  # it has read that, and is stuck
            manager.fake.set("gpu", [{"id": "GPU-b"}])
            while (lease.remaining or 0.0) > 0:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)
            cut, heard = False, len(manager.heartbeats)
            await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.heartbeats) >= heard + 4)
        assert lease.at_risk


def test_without_a_lease_there_are_no_heartbeats(real: WorkerSetup, manager: ScriptedManager) -> None:
    with real.context({"gpu": 1}, lease=None, worker="silent"), real.context({"gpu": 1}, lease=0.3) as other:
        manager.wait_until(lambda: len(manager.heartbeats) >= 5)
    assert {beat.worker for beat in manager.heartbeats} == {other.worker}


def test_user_code_is_told_before_its_lease_ends_and_again_served_when_heartbeats_get_through(
    real: WorkerSetup, manager: ScriptedManager, url: str
) -> None:
    told: queue.Queue[outfitter.LeaseLostError] = queue.Queue()
    with real.context({"gpu": 1}, lease=12.0, on_lease_at_risk=told.put) as context:
        changes = context.changes("gpu")
        next(changes)
        with frozen(url):
            error = told.get(timeout=20)
            assert context.lease_lost
            with pytest.raises(outfitter.LeaseLostError, match=r"most of its lease, which .*: stop using"):
                context.get_external_resource_infos("gpu")
            with pytest.raises(outfitter.LeaseLostError):
                next(changes)
        assert "ends in" in str(error), "it was told in time"
        manager.wait_until(lambda: not context.lease_lost)
        assert context.get_external_resource_infos("gpu")


def test_a_callback_that_raises_does_not_stop_the_heartbeats(
    real: WorkerSetup, manager: ScriptedManager, url: str
) -> None:
    told: queue.Queue[outfitter.LeaseLostError] = queue.Queue()

    def fail(error: outfitter.LeaseLostError) -> None:
        told.put(error)
        raise ValueError("user code")

    with real.context({"gpu": 1}, lease=0.9, on_lease_at_risk=fail):
        with frozen(url):
            told.get(timeout=20)
        so_far = len(manager.heartbeats)
        manager.wait_until(lambda: len(manager.heartbeats) >= so_far + 3)


@pytest.fixture
def _majority_asked_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outfitter.session.worker_session.LOOKUP_WITHIN", 60.0)


@pytest.mark.usefixtures("_majority_asked_from_the_start")
def test_nobody_answering_is_an_error_that_names_the_hosts_served_and_withdraws(
    manager: ScriptedManager, url: str
) -> None:
    stopped = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    async def scene() -> None:
        async with connect(url) as bus:
            for host in ("gpu-1", "gpu-2"):
                await publish_record(bus, host_record(host))
            for host in ("gpu-8", "gpu-9"):
                await publish_record(bus, host_record(host, stopped_at=stopped))

    anyio.run(scene)
    with pytest.raises(outfitter.NoManagerError) as caught:
        RuntimeContext({"gpu": 1}, bus=url, host="gpu-9", wait_for_manager=5.0).__enter__()
    message = str(caught.value)
    assert "no manager answers for host 'gpu-9': its manager manager-of-gpu-9 was stopped" in message
    assert "(2026-01-02T03:04:05Z)" in message
    assert f"other hosts served: gpu-1, gpu-2, {HOST};" in message
    assert f"bus {url} and cluster 'outfitter'" in message


@pytest.mark.usefixtures("_majority_asked_from_the_start")
def test_a_manager_that_has_gone_silent_is_named_with_when_it_last_wrote(
    real: WorkerSetup, manager: ScriptedManager
) -> None:
    manager.fake.absent = True
    with pytest.raises(outfitter.NoManagerError, match=f"for host '{HOST}': its manager last wrote \\d+ s ago"):
        real.context({"gpu": 1}, worker="w", wait_for_manager=5.0).__enter__()
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert manager.deregistrations[0].reason == "no manager"


@pytest.mark.usefixtures("_majority_asked_from_the_start")
def test_nobody_answering_is_found_out_within_five_seconds(url: str) -> None:
    async def make() -> None:
        async with connect(url) as bus:
            await topics.create(bus, "outfitter", partitions=4)

    anyio.run(make)
    assert MANAGER_PATIENCE < 5.0
    with pytest.raises(outfitter.NoManagerError, match="it never had a manager here; other hosts served: none;"):
        RuntimeContext({"gpu": 1}, bus=url, host=HOST).__enter__()


def test_a_bus_on_which_no_manager_ever_ran_has_no_manager(url: str) -> None:
    with pytest.raises(outfitter.NoManagerError, match=f"there is no cluster 'staging' on {url}".replace("?", r"\?")):
        RuntimeContext({"gpu": 1}, bus=url, host=HOST, cluster="staging", wait_for_manager=0.1).__enter__()


async def test_told_to_wait_a_worker_waits_for_the_first_manager_of_a_new_bus(url: str, fake: FakeOutfitter) -> None:
    async with anyio.create_task_group() as group:
        entered = anyio.Event()

        async def enter() -> None:
            async with RuntimeContext({"gpu": 1}, bus=url, host=HOST, wait_for_manager=True) as context:
                assert context.get_external_resource_infos("gpu")
                entered.set()

        group.start_soon(enter)
        async with connect(url) as bus:  # the worker finds a bus without topics
            await anyio.wait_all_tasks_blocked()
            assert bus.url == url
        manager = ScriptedManager(url, HOST, fake)
        await anyio.to_thread.run_sync(manager.__enter__)
        await entered.wait()
    await anyio.to_thread.run_sync(manager.__exit__)


def test_a_bus_that_is_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(outfitter.BusError, match=str(tmp_path / "missing" / "deeper")):
        RuntimeContext({"gpu": 1}, bus=f"sqlite://{tmp_path}/missing/deeper/bus.db", host=HOST).__enter__()


def test_a_url_that_is_no_bus_is_refused_on_entry() -> None:
    context = RuntimeContext({"gpu": 1}, bus="amqp://x", host=HOST)
    with pytest.raises(outfitter.BusConfigurationError, match="'amqp://x' is no bus URL"):
        context.__enter__()


@pytest.fixture
def attached(real: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeContext]:
    """The allocation that `outfitter run` holds, and the environment it gives its child."""
    with real.context({"gpu": 2}, {"infer": {"gpu": 1}}, worker="w", lease=0.3) as parent:
        for name, value in {
            "BUS": parent._settings.bus,
            "HOST": parent.host,
            "WORKER": parent.worker,
            "INCARNATION": parent.incarnation,
        }.items():
            monkeypatch.setenv(f"OUTFITTER_{name}", value)
        yield parent


def test_under_outfitter_run_a_context_attaches_and_publishes_nothing(
    attached: RuntimeContext, manager: ScriptedManager, real: WorkerSetup
) -> None:
    with RuntimeContext({"gpu": 1}, operator="infer") as context, RuntimeContext() as second:
        assert [info["id"] for info in context.get_external_resource_infos("gpu")] == ["GPU-a"]
        assert second.record == attached._allocation_watch().read().record  # whose lease may be at risk
        changes = context.changes("gpu")
        next(changes)
        real.fake.set("gpu", [{"id": "GPU-y"}, {"id": "GPU-z"}])
        assert [info["id"] for info in next(changes)] == ["GPU-y"]
        so_far = len(manager.heartbeats)
        manager.wait_until(lambda: len(manager.heartbeats) >= so_far + 4)  # longer than the lease
        assert context.get_external_resource_infos("gpu")
    assert {beat.incarnation for beat in manager.heartbeats} == {attached.incarnation}
    with RuntimeContext({"gpu": 1}, worker="after"):
        pass  # answered after all that those two may have said
    # `w` asks again, should it have been slow for its short lease
    assert {each.incarnation for each in manager.registrations if each.worker != "after"} == {attached.incarnation}
    assert {left.worker for left in manager.deregistrations} <= {"after"}


def test_what_is_over_is_not_given_back(real: WorkerSetup, manager: ScriptedManager) -> None:
    with real.context({"gpu": 1}, worker="w") as context:
        changes = context.changes("gpu")
        next(changes)
        real.fake.end()
        with pytest.raises(outfitter.AllocationEndedError):
            next(changes)
    with real.context({"gpu": 1}, worker="next"):  # answered after all that the first one may have said
        assert manager.deregistrations == []


def test_under_outfitter_run_needing_more_than_was_asked_for_is_an_error(attached: RuntimeContext) -> None:
    with pytest.raises(outfitter.InvalidRequestError, match="3 of 'gpu' are needed and `outfitter run` asked for 2"):
        RuntimeContext({"gpu": 3}).__enter__()


@pytest.mark.parametrize(
    ("operators", "needed"),
    [
        ({"score": {"gpu": 1}}, "score:gpu=1"),
        ({"infer": {"gpu": 2}}, "infer:gpu=2"),
        ({"infer": {"nic": 1}}, "infer:nic=1"),
    ],
)
def test_under_outfitter_run_operators_that_it_did_not_ask_for_are_an_error(
    attached: RuntimeContext, operators: dict[str, dict[str, int]], needed: str
) -> None:
    """They would see the devices of all others."""
    with pytest.raises(outfitter.InvalidRequestError, match=f"run it with --operator {needed}"):
        RuntimeContext(operators=operators).__enter__()
    with RuntimeContext(operators={"infer": {"gpu": 1}}) as context:
        assert len(context.for_operator("infer").get_external_resource_infos("gpu")) == 1


def test_under_outfitter_run_another_worker_registers_for_itself(
    attached: RuntimeContext, manager: ScriptedManager
) -> None:
    with RuntimeContext({"gpu": 1}, worker="another") as context:
        assert context.incarnation != attached.incarnation
    assert [registration.worker for registration in manager.registrations] == ["w", "another"]


def test_under_outfitter_run_a_bus_in_another_spelling_takes_nobodys_name(
    attached: RuntimeContext, manager: ScriptedManager, url: str
) -> None:
    with RuntimeContext({"gpu": 1}, bus=url.replace("/bus.db", "/./bus.db")) as context:
        assert context.worker != attached.worker
        assert attached.get_external_resource_infos("gpu")
    assert [registration.worker for registration in manager.registrations] == [attached.worker, context.worker]


def test_attaching_to_what_is_not_there_says_so(
    real: WorkerSetup, manager: ScriptedManager, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"BUS": url, "HOST": HOST, "WORKER": "w", "INCARNATION": "gone"}.items():
        monkeypatch.setenv(f"OUTFITTER_{name}", value)
    with pytest.raises(outfitter.AllocationEndedError, match=f"there is no allocation {HOST}/w/gone on"):
        RuntimeContext({"gpu": 1}).__enter__()


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_a_forked_child_is_told_the_remedy_and_gives_nothing_back(
    real: WorkerSetup, manager: ScriptedManager, url: str
) -> None:
    program = """
        import os, sys, outfitter
        with outfitter.RuntimeContext({"gpu": 1}, bus=sys.argv[1], host=sys.argv[2], worker="parent") as context:
            changes, view = context.changes("gpu"), context.for_operator("infer")
            child = os.fork()
            if child == 0:
                new = outfitter.RuntimeContext({"gpu": 1}, bus=sys.argv[1], host=sys.argv[2], worker="child")
                uses = (lambda: context.get_external_resource_infos("gpu"), lambda: next(changes), lambda: view.env,
                        lambda: context.record, context.__enter__, new.__enter__)
                for use in uses:
                    try:
                        use()
                    except outfitter.UsedAfterForkError as error:
                        assert "'spawn' method" in str(error)
                    else:
                        os._exit(1)
                context.__exit__(None, None, None)
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            context.get_external_resource_infos("gpu")
    """
    done = run(program, url, HOST)
    assert (done.returncode, done.stderr) == (0, ""), "the child's leaving, too, was silent"
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert [(left.worker, left.reason) for left in manager.deregistrations] == [("parent", "finished")]
    assert len(manager.registrations) == 1


def test_ctrl_c_while_waiting_withdraws_the_registration(real: WorkerSetup, manager: ScriptedManager, url: str) -> None:
    real.fake.keep_waiting("all are busy")
    program = """
        import signal, sys, outfitter
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
        with outfitter.RuntimeContext({"gpu": 1}, bus=sys.argv[1], host=sys.argv[2]):
            print("entered")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), url, HOST]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
        manager.wait_until(lambda: bool(manager.registrations))
        worker.send_signal(signal.SIGINT)
        out, err = worker.communicate(timeout=30)
    assert out == ""
    assert err.rstrip().endswith("KeyboardInterrupt")
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert manager.deregistrations[0].reason == "left by KeyboardInterrupt"


def test_importing_and_constructing_starts_and_opens_nothing(tmp_path: Path) -> None:
    program = """
        import os, sys, threading
        before = set(os.listdir("/proc/self/fd"))
        import outfitter, outfitter.testing
        context = outfitter.RuntimeContext({"gpu": 1}, bus=f"sqlite://{sys.argv[1]}/bus.db", host="h")
        assert threading.active_count() == 1
        assert set(os.listdir("/proc/self/fd")) == before
        assert os.listdir(sys.argv[1]) == []
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"aiokafka", "asyncio", "anyio", "sqlite3", "click", "aiohttp"}, loaded
    """
    done = run(program, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_leaving_leaves_no_thread_and_no_file_behind(real: WorkerSetup) -> None:
    """The manager beside it in this process opens and closes files as well. So one more is none left behind."""

    def ours() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("outfitter-")]

    rounds, open_files = 20, 0
    for number in range(rounds):
        with real.context({"gpu": 1}, lease=None):
            [thread] = ours()
            if number == 0:
                open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        thread.join(20)
    assert len(os.listdir("/proc/self/fd")) < open_files + rounds // 2  # noqa: PTH208
    assert ours() == []


def test_a_context_that_is_left_while_the_bus_is_away_is_deregistered_once_it_is_back(
    real: WorkerSetup, manager: ScriptedManager, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """This process lives on, and a manager that watches it takes nothing from it."""
    context = real.context({"gpu": 1}, worker="w", lease=None).__enter__()
    with ThreadPoolExecutor() as pool:
        with frozen(url):
            leaving = pool.submit(context.leave)
            until(lambda: "could not deregister" in caplog.text, lambda: caplog.text)
        leaving.result()
    manager.wait_until(lambda: bool(manager.deregistrations))
    assert [(left.worker, left.reason) for left in manager.deregistrations] == [("w", "finished")]


async def test_a_late_deregistration_is_tried_again_whatever_the_bus_says() -> None:
    """While topics are restored, they are missing."""
    answers: list[BusError | TimeoutError | None] = [UnknownTopicError("t"), None]

    async def publish() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    await deregister_late(publish, "gpu-3/w/1")
    assert answers == []


def test_a_signal_that_wakes_nobody_is_handled_while_a_context_is_entered() -> None:
    """One that comes just before the main thread falls asleep. `interrupt_main` is like it: it only leaves a note."""
    program = """
        import _thread, signal, sys, threading
        from concurrent.futures import Future
        from outfitter.session.backend import wait_for
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.setswitchinterval(1000)  # the other thread goes on when this one falls asleep, and not before
        ready, waiting, handled = Future(), threading.Event(), threading.Event()
        def main_is_told():
            waiting.wait()
            _thread.interrupt_main()
            if not handled.wait(20):
                ready.set_result(None)
        threading.Thread(target=main_is_told, daemon=True).start()
        waiting.set()
        try:
            wait_for(ready)
        except KeyboardInterrupt:
            handled.set()
        print("handled" if not ready.done() else "only when it was woken")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "handled\n", done.stderr


def test_a_mistyped_path_of_the_bus_is_said_at_once_and_makes_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(outfitter.BusConfigurationError, match="there is no bus at"),
        RuntimeContext(bus=f"sqlite://{tmp_path}/nope/bus.db"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
