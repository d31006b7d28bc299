"""The bus away, full, locked or gone: a clear line, not ready, nothing decided is lost, and work goes on afterwards."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import BusConfigurationError, BusUnavailableError, Entry, OffsetOutOfRangeError, connect
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import parse
from outfitter_proto.bus.embedded.connecting.lock import Lock
from runtime.conftest import Serve
from support.bus.faulty_bus import FaultyBus, no_faults
from support.checker.verdict import verdict
from support.jumping_clock import JumpingClock
from support.kafka.broker import Broker
from support.managers.in_process import (
    CLUSTER,
    HOST,
    TOPICS,
    InProcessManager,
    bulky,
    deregister,
    heartbeat,
    register,
    static,
)
from support.managers.process import StartManager

pytestmark = pytest.mark.slow


async def not_ready(in_process: InProcessManager) -> None:
    with anyio.fail_after(20):
        while in_process.processor.ready:  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


async def limit(bus: FaultyBus, pages: int) -> None:
    """What SQLite says of a disk without room, for this connection."""
    writing: Database = bus._inner._open.writing  # type: ignore[attr-defined]  # the embedded bus's own connection
    await writing.exclusively(lambda connection: connection.execute(f"PRAGMA max_page_count={pages}").fetchall())


async def test_a_full_disk_is_said_so_and_work_goes_on_when_there_is_room(
    url: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FaultyBus(url) as bus, FaultyBus(url) as workers, serve(static(2), on=bus) as in_process:
        in_process.bus = workers
        await in_process.say(register("a", gpu=1))
        await in_process.state("a", "allocated")
        await limit(bus, 1)
        await in_process.say(register("b", gpu=1), deregister("a"))
        await in_process.say(*[register(f"x{index}", gpu=1, operators=bulky(50)) for index in range(6)])
        await not_ready(in_process)
        await limit(bus, 1_000_000)
        await in_process.ready()
        await in_process.state("b", "allocated")
        await in_process.state("a", "ended")
        assert (await verdict(workers.url)).violations == ()
    assert "disk is full" in capsys.readouterr().out


async def test_a_file_locked_by_a_stranger_is_said_so_and_work_goes_on_when_it_is_free(
    url: str, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FaultyBus(url) as bus, serve(static(2), on=bus) as in_process:
        await in_process.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
        await in_process.say(register("a", gpu=1))
        await in_process.state("a", "allocated")
        stranger = sqlite3.connect(tmp_path / "bus.db", isolation_level=None, check_same_thread=False)
        stranger.execute("BEGIN IMMEDIATE")
        stranger.execute("INSERT INTO record SELECT topic, part, off + 1000000, time, key, value FROM record WHERE 0")
        in_process.processor.event_queue.add(_anything())
        await not_ready(in_process)
        stranger.close()
        await in_process.ready()
        await in_process.say(register("b", gpu=1))
        await in_process.state("b", "allocated")
    assert "another program holds it locked" in capsys.readouterr().out


def _anything() -> object:
    """An event that has something to write."""
    from outfitter_service.core import model as m

    devices = [m.KnownDevice(id=f"gpu:{index}", properties={"index": str(index)}) for index in range(3)]
    return m.DriverReport(host=HOST, resource="gpu", devices=tuple(devices))


async def test_a_file_that_is_read_only_for_a_while_is_said_so(
    url: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FaultyBus(url) as bus, FaultyBus(url) as workers, serve(static(2), on=bus) as in_process:
        in_process.bus = workers
        await in_process.until(lambda records: records["@host/h"]["resources"]["gpu"]["devices"])
        await query_only(bus, True)
        await in_process.say(register("a", gpu=1))
        await not_ready(in_process)
        assert "h/a/1" not in await in_process.records()
        await query_only(bus, False)
        await in_process.state("a", "allocated")
        assert (await verdict(workers.url)).violations == ()
    assert "read-only" in capsys.readouterr().out


async def query_only(bus: FaultyBus, on: bool) -> None:
    writing: Database = bus._inner._open.writing  # type: ignore[attr-defined]  # the embedded bus's own connection
    await writing.exclusively(lambda connection: connection.execute(f"PRAGMA query_only={on:d}").fetchall())


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_was_deleted_or_replaced_ends_the_manager_with_a_reason(
    url: str, serve: Serve, tmp_path: Path, replaced: bool, busy: bool
) -> None:
    """Going on would be another ledger, in which nobody holds anything."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(FaultyBus(url))
        in_process = await stack.enter_async_context(serve(static(1), on=bus))
        await in_process.say(register("a", gpu=1))
        await in_process.state("a", "allocated")
        for name in ("bus.db", "bus.db-wal", "bus.db-shm"):
            (tmp_path / name).unlink()
        if replaced:
            other = await stack.enter_async_context(connect(url))
            await all_topics.create(other, CLUSTER, partitions=1)
        if busy:
            in_process.processor.event_queue.add(_anything())
        assert "deleted or replaced" in await in_process.ended_by(BusConfigurationError)


@pytest.mark.parametrize("names", [("bus.db-wal", "bus.db-shm"), ("bus.db-wal",), ("bus.db-shm",)])
def test_a_log_that_was_deleted_while_a_worker_holds_devices_ends_the_manager_and_nothing_is_lent_twice(
    start_manager: StartManager, names: tuple[str, ...]
) -> None:
    manager = start_manager(gpus=2)
    holder = manager.popen(
        "run", "--worker", "a", "--resource", "gpu=2", "--", "sleep", "infinity", start_new_session=True
    )
    try:
        manager.wait_for_state("a", "allocated")
        for name in names:
            (manager.folder / name).unlink()
        assert manager.wait() != 0
        assert f"{names[0]} was deleted or replaced while this process used it" in manager.log.read_text()
        manager.start()
        record = manager.record("a")
        assert record is not None
        second = manager.outfitter("run", "--worker", "b", "--resource", "gpu=1", "--wait", "1s", "--", "true")
        if holder.poll() is None:  # it ends with its command once it has noticed, too
            assert record["state"] == "allocated"
            assert second.returncode == 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(holder.pid, signal.SIGKILL)
        holder.communicate()


def test_an_idle_manager_beside_a_process_that_is_stopped_with_the_writers_lock_is_not_ready_until_it_goes_on(
    start_manager: StartManager,
) -> None:
    manager = start_manager(extra='beat-interval = "5s"')
    lock = Lock(parse(manager.bus_url))
    with lock:
        manager.wait_for(lambda: "bus.lock has been held by another process for 10 s" in manager.readiness())
    lock.close()
    manager.wait_for(lambda: manager.readiness() == "ok\n")


async def test_an_input_that_was_deleted_unread_goes_on_at_the_earliest_there_is_and_says_so(
    bus: FaultyBus, serve: Serve
) -> None:
    async with serve(static(2)) as in_process:
        await in_process.say(register("a", gpu=1))
        await in_process.state("a", "allocated")
    for index in range(5):
        await in_process.say(register(f"lost{index}", gpu=1))
    await in_process.say(register("b", gpu=1))
    remove = partial(_cut, before=6)
    writing: Database = bus._inner._open.writing  # type: ignore[attr-defined]  # the embedded bus's own connection
    await writing.commit(remove)
    async with serve(static(2)) as in_process:
        await in_process.state("b", "allocated")
        records = await in_process.records()
        assert records["h/a/1"]["state"] == "allocated"
        assert not any("lost" in key for key in records)
        assert in_process.metric("outfitter_input_lost_total") == 1
        notes = [step for step in await in_process.history() if step["type"] == "note"]
        assert [note["event"] for note in notes] == ["input-lost"]


def _cut(connection: sqlite3.Connection, before: int) -> None:
    (topic,) = connection.execute("SELECT id FROM topic WHERE name = ?", (TOPICS.registrations,)).fetchone()
    connection.execute("DELETE FROM record WHERE topic = ? AND off < ?", (topic, before))
    connection.execute("UPDATE part SET start = ? WHERE topic = ?", (before, topic))


async def test_an_input_that_is_cut_while_it_is_read_goes_on_and_loses_no_more_than_was_cut(
    url: str, serve: Serve
) -> None:
    async with FaultyBus(url) as bus, FaultyBus(url) as workers, serve(static(4), on=bus) as in_process:
        in_process.bus = workers
        await in_process.say(register("a", gpu=1))
        await in_process.state("a", "allocated")
        struck = False

        async def strike(point: str) -> None:
            nonlocal struck
            if point == "fetch:before" and not struck:
                struck = True
                raise OffsetOutOfRangeError("cut", start=1, end=1)

        bus.script = strike
        await in_process.say(register("b", gpu=1))
        await in_process.state("b", "allocated")
        await in_process.say(register("c", gpu=1))
        await in_process.state("c", "allocated")
        assert in_process.failure is None


async def test_nobody_is_judged_by_heartbeats_that_were_deleted_unread(url: str, serve: Serve) -> None:
    clock = JumpingClock()
    async with FaultyBus(url) as bus, FaultyBus(url) as workers, serve(static(2), on=bus, clock=clock) as in_process:
        in_process.bus = workers
        await in_process.say(register("a", gpu=1, lease_s=30))
        await in_process.state("a", "allocated")
        held, suspected, cut = anyio.Event(), anyio.Event(), anyio.Event()

        async def hold(point: str) -> None:
            if point == "fetch:before" and not cut.is_set():
                held.set()
                await cut.wait()
                raise OffsetOutOfRangeError("cut", start=2, end=3)
            if point == "offsets:after":
                suspected.set()

        bus.script = hold
        await held.wait()
        await in_process.say(heartbeat("a"))
        clock.ahead_s = 40.0
        await suspected.wait()
        cut.set()
        await in_process.say(register("b", gpu=1, lease_s=None))
        await in_process.state("b", "allocated")
        assert in_process.processor.liveness.leases.deadline("h/a/1") > clock.monotonic()


@pytest.mark.parametrize(
    ("point", "told"),
    [("fetch:before", "cannot read registrations: gone fishing"), ("commit:before", "again, because gone fishing")],
)
async def test_why_nothing_is_answered_is_told(bus: FaultyBus, serve: Serve, point: str, told: str) -> None:
    async with serve(static(1)) as in_process:
        assert in_process.processor.condition == "serving"

        async def refuse(at: str) -> None:
            if at in {point, "open_writer:before"}:
                raise BusUnavailableError("gone fishing")

        bus.script = refuse
        await in_process.say(register("a", gpu=1))
        with anyio.fail_after(20):
            while in_process.processor.ready or told not in in_process.processor.condition:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.005)
        bus.script = no_faults
        await in_process.state("a", "allocated")
        await in_process.ready()
        assert in_process.processor.condition == "serving"


@pytest.mark.kafka
async def test_a_broker_that_is_killed_and_comes_back_costs_nothing_that_was_decided(
    own_broker: Broker, start_manager: StartManager
) -> None:
    async with connect(own_broker.url) as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)
    manager = await anyio.to_thread.run_sync(lambda: start_manager(bus=own_broker.url, gpus=2))
    async with connect(own_broker.url) as bus:
        for worker in ("a", "b", "c"):
            await publish(bus, register(worker, host=manager.host, gpu=1, lease_s=4.0 if worker == "b" else None))
        await anyio.to_thread.run_sync(
            lambda: manager.wait_for(lambda: manager.metric("outfitter_allocations", state="allocated") == 2)
        )
    own_broker.kill9()
    await anyio.to_thread.run_sync(lambda: manager.wait_for(lambda: manager._get("/readyz")[0] == 503))
    assert own_broker.bootstrap in manager._get("/readyz")[1]
    assert manager._get("/livez")[0] == 200
    await anyio.sleep(5)  # longer than a lease: nobody could be heard
    back = datetime.now(UTC)
    await own_broker.restarted()
    await anyio.to_thread.run_sync(lambda: manager.wait_for(lambda: manager._get("/readyz")[0] == 200, timeout=60))
    async with connect(own_broker.url) as bus:
        report = await verdict(bus.url)
        b = report.last[f"{manager.host}/b/1"]  # has had a whole lease anew, and its grace
        assert b["state"] == "allocated" or datetime.fromisoformat(b["since"]) >= back + timedelta(seconds=4 + 2)
        await publish(bus, {**deregister("a"), "host": manager.host})
        await anyio.to_thread.run_sync(
            lambda: manager.wait_for(lambda: (manager.metric("outfitter_grants_total") or 0) >= 3)
        )
        manager.signal(signal.SIGTERM)
        assert await anyio.to_thread.run_sync(manager.wait) == 0
        report = await verdict(bus.url)
        assert report.violations == ()
        assert report.last[f"{manager.host}/c/1"]["state"] == "allocated"


async def publish(bus: object, body: dict[str, object]) -> None:
    entry = Entry(str(body["host"]).encode(), json.dumps(body).encode())
    await bus.publish(TOPICS.registrations, 0, entry)  # type: ignore[attr-defined]  # any bus


def _make_anew(path: Path) -> None:
    """The registrations topic as if it had been deleted and made again."""
    with sqlite3.connect(path) as connection:
        (topic,) = connection.execute("SELECT id FROM topic WHERE name = ?", (TOPICS.registrations,)).fetchone()
        connection.execute("DELETE FROM record WHERE topic = ?", (topic,))
        connection.execute("UPDATE part SET start = 0, next = 0 WHERE topic = ?", (topic,))
        connection.execute("UPDATE topic SET uuid = 'made-anew' WHERE id = ?", (topic,))
    connection.close()


async def test_a_registrations_topic_that_was_made_anew_makes_nobody_new_older_than_those_before(
    url: str, serve: Serve, tmp_path: Path
) -> None:
    async with FaultyBus(url) as bus, serve(static(2), on=bus) as in_process:
        await in_process.say(*[register(f"x{index}", gpu=1) for index in range(5)], register("w", gpu=1))
        await in_process.state("w", "pending")
    _make_anew(tmp_path / "bus.db")
    for life in (2, 3):
        async with FaultyBus(url) as bus, serve(static(2), on=bus) as in_process:
            await in_process.say(register("w", incarnation=str(life), gpu=1), heartbeat("w", incarnation=str(life)))
            await in_process.state("w", "ended", incarnation=str(life - 1))
            await in_process.state("w", "pending", incarnation=str(life))
            records = await in_process.records()
            numbers = [records[f"h/w/{incarnation}"]["source"]["offset"] for incarnation in range(1, life + 1)]
            assert numbers == sorted(set(numbers))
            await in_process.say(register(f"after-{life}", gpu=1))
            await in_process.state(f"after-{life}", "pending")  # and so the heartbeat is decided
            await in_process.reported()
            assert in_process.metric("outfitter_dead_letters_total") == 0
            assert in_process.metric("outfitter_input_lost_total") == (1 if life == 2 else 0)
