"""The embedded bus when something is in its way: a full disk, a lock that is held, a file that is gone, a fork."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import (
    BusConfigurationError,
    BusUnavailableError,
    Create,
    Entry,
    FencedError,
    TopicSpec,
    connect,
)
from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import parse
from outfitter_proto.bus.embedded.connecting.lock import Lock
from outfitter_proto.bus.embedded.connecting.notify import Notifier
from outfitter_proto.bus.embedded.connecting.thread import JobThread, TurnTimeoutError
from support.processes.few_descriptors import descriptors_left

COMMITTER = Path(__file__).parent / "committing_process.py"


@asynccontextmanager
async def database(url: str) -> AsyncIterator[Database]:
    opened = Database(parse(url))
    await opened.open(log.recognise, log.set_up)
    try:
        yield opened
    finally:
        await opened.close()


# --- the disk ------------------------------------------------------------------------------------------


async def test_a_full_disk_is_unavailable_leaves_nothing_of_the_commit_and_heals_without_a_restart(
    embedded_url: str,
) -> None:
    async with connect(embedded_url) as bus, database(embedded_url) as small:
        await bus.create_topics([TopicSpec("t", 1, {})])
        topic = await small.read(partial(log.find_topic, name="t"))
        assert topic is not None
        # What SQLite says of a disk without room (SQLITE_FULL), at a size of our choosing.
        await small.exclusively(lambda connection: connection.execute("PRAGMA max_page_count=40").fetchall())
        write = partial(log.append, topic=topic, partition=0, entries=[Entry(b"k", b"x" * 100_000)] * 4)
        with pytest.raises(BusUnavailableError, match="disk is full"):
            await small.commit(write)
        assert await bus.offsets("t", 0) == (0, 0)
        await small.exclusively(lambda connection: connection.execute("PRAGMA max_page_count=4000").fetchall())
        assert await small.commit(write) == 0
        assert await bus.offsets("t", 0) == (0, 4)


@pytest.mark.parametrize("kilobytes", [8, 40])  # no room for the file; room for it, and none for its shared memory
def test_a_disk_that_is_full_at_the_first_start_is_called_full(tmp_path: Path, kilobytes: int) -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mounted = f'mount -t tmpfs -o size={kilobytes}k,mode=0755 none "$0" && exec "$@"'
    opening = (
        "import sys, anyio\n"
        "from outfitter_proto.bus import connect\n"
        "async def main():\n"
        "    async with connect(sys.argv[1]): pass\n"
        "anyio.run(main)\n"
    )
    command = ["unshare", *user, "--mount", "sh", "-c", mounted, tmp_path]
    command += [sys.executable, "-c", opening, f"sqlite://{tmp_path}/bus.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "the disk is full: make room, and nothing else is needed" in done.stderr.splitlines()[-1]


async def test_a_program_that_locks_the_file_past_the_bus_makes_it_unavailable_until_it_unlocks_it(
    embedded_url: str, tmp_path: Path
) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        stranger = sqlite3.connect(tmp_path / "bus.db", isolation_level=None)
        stranger.execute("BEGIN IMMEDIATE")
        with pytest.raises(BusUnavailableError, match="another program holds it locked"):
            await bus.publish("t", 0, Entry(b"k", b"v"))
        stranger.close()
        assert await bus.publish("t", 0, Entry(b"k", b"v")) == 0


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_file_that_was_removed_or_replaced_in_use_stops_reading_and_writing(
    embedded_url: str, tmp_path: Path, replaced: bool
) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        await bus.publish("t", 0, Entry(b"k", b"v"))
        before = await bus.topic("t")
        reader = await bus.open_reader("t", 0, start=None, committed=True)
        writer = await bus.open_writer("w", 0)
        for name in ("bus.db", "bus.db-wal", "bus.db-shm"):
            (tmp_path / name).unlink()
        if replaced:
            async with connect(embedded_url) as newcomer:
                await newcomer.create_topics([TopicSpec("t", 1, {})])
                assert (await newcomer.topic("t")).id != before.id
        with pytest.raises(BusConfigurationError, match="deleted or replaced"):
            await bus.publish("t", 0, Entry(b"k", b"lost"))
        with pytest.raises(BusConfigurationError, match="deleted or replaced"):
            await writer.commit([("t", [Entry(b"k", b"lost")])])
        with pytest.raises(BusConfigurationError, match="deleted or replaced"):
            await reader.fetch(timeout=0.1)


async def test_a_file_that_was_renamed_in_use_is_named_and_loses_nothing(embedded_url: str, tmp_path: Path) -> None:
    """SQLite finds its log by the former name, and would delete it for a new file there."""
    here, there = tmp_path / "bus.db", tmp_path / "other.db"
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        await bus.publish("t", 0, Entry(b"k", b"v"))
        here.rename(there)
        with pytest.raises(BusConfigurationError) as caught:
            await bus.publish("t", 0, Entry(b"k", b"too late"))
        assert f"{here} was renamed to {there} while this process used it" in str(caught.value)
        assert f"`mv {there} {here}`" in str(caught.value)
        assert await refused(embedded_url, create=Create.NOTHING) == await refused(embedded_url)
        assert f"{here} is not there, but its log {here}-wal is" in await refused(embedded_url)
        assert f"`mv {there} {here}`" in await refused(embedded_url.replace("bus.db", "other.db"))
    assert f"{here} is not there, but its log {here}-wal is" in await refused(embedded_url)
    there.rename(here)
    async with connect(embedded_url) as again:
        assert await again.offsets("t", 0) == (0, 1)


async def test_a_directory_that_was_renamed_in_use_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "bus", tmp_path / "other"
    async with connect(f"sqlite://{here}/bus.db?synchronous=NORMAL") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        here.rename(there)
        with pytest.raises(BusConfigurationError, match=f"`mv {there} {here}`"):
            await bus.publish("t", 0, Entry(b"k", b"too late"))
        there.rename(here)


async def test_a_file_that_was_renamed_and_replaced_in_use_is_named(embedded_url: str, tmp_path: Path) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        (tmp_path / "bus.db").rename(tmp_path / "other.db")
        (tmp_path / "bus.db").touch()
        with pytest.raises(BusConfigurationError, match=f"replaced .*the former file is {tmp_path}/other.db now"):
            await bus.publish("t", 0, Entry(b"k", b"too late"))


async def test_the_log_of_a_file_that_is_lost_can_be_removed_and_another_programs_log_is_named(
    embedded_url: str, tmp_path: Path
) -> None:
    log_file = tmp_path / "bus.db-wal"
    log_file.write_bytes(b"of a file that was deleted")
    assert "If it is lost, remove the log" in await refused(embedded_url)
    assert not (tmp_path / "bus.db").exists()
    log_file.write_bytes(b"")
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
    foreign = tmp_path / "foreign.sqlite-wal"
    foreign.write_bytes(b"of another program")
    assert f"{foreign} is the log of a file that is not there" in await refused(embedded_url)
    (tmp_path / "foreign.sqlite").touch()
    async with connect(embedded_url) as bus:
        assert await bus.offsets("t", 0) == (0, 0)


async def refused(url: str, create: Create = Create.DIRECTORY) -> str:
    with pytest.raises(BusConfigurationError) as caught:
        async with connect(url, create=create):
            pass
    return str(caught.value)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("names", [("bus.db-wal", "bus.db-shm"), ("bus.db-wal",), ("bus.db-shm",)])
async def test_a_log_or_an_index_that_was_removed_or_replaced_in_use_stops_reading_and_writing(
    embedded_url: str, tmp_path: Path, names: tuple[str, ...], replaced: bool
) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        await bus.publish("t", 0, Entry(b"k", b"v"))
        reader = await bus.open_reader("t", 0, start=None, committed=True)
        writer = await bus.open_writer("w", 0)
        for name in names:
            (tmp_path / name).rename(tmp_path / "aside") if replaced else (tmp_path / name).unlink()
            if replaced:
                shutil.copy(tmp_path / "aside", tmp_path / name)
        with pytest.raises(BusConfigurationError, match=f"{names[0]} was deleted or replaced"):
            await bus.publish("t", 0, Entry(b"k", b"lost"))
        with pytest.raises(BusConfigurationError, match=f"{names[0]} was deleted or replaced"):
            await writer.commit([("t", [Entry(b"k", b"lost")])])
        with pytest.raises(BusConfigurationError, match=f"{names[0]} was deleted or replaced"):
            await reader.fetch(timeout=0.1)


async def test_opening_again_and_again_while_others_come_and_go_finds_no_log_replaced(embedded_url: str) -> None:
    """SQLite removes the log and its index with the last connection, and makes new ones with the next."""
    for _ in range(3):
        async with connect(embedded_url) as bus:
            await bus.create_topics([TopicSpec("t", 1, {})])
            async with connect(embedded_url) as other:
                await other.publish("t", 0, Entry(b"k", b"v"))
            await bus.publish("t", 0, Entry(b"k", b"v"))
            await bus.maintain()
            await bus.publish("t", 0, Entry(b"k", b"v"))
    async with connect(embedded_url) as bus:
        assert await bus.offsets("t", 0) == (0, 9)


async def test_a_lock_file_that_was_removed_is_made_again_and_locks_newcomers_too(
    embedded_url: str, tmp_path: Path
) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        (tmp_path / "bus.lock").unlink()
        await bus.publish("t", 0, Entry(b"k", b"v"))
        lock = Lock(parse(embedded_url))
        with lock, anyio.move_on_after(0.05):
            await bus.publish("t", 0, Entry(b"k", b"must wait for the lock, and is given up"))
        lock.close()
        assert await bus.offsets("t", 0) == (0, 1)


# --- the lock between processes ------------------------------------------------------------------------


async def test_a_job_that_does_not_get_its_turn_in_time_never_runs(embedded_url: str) -> None:
    lock = Lock(parse(embedded_url))
    other = Lock(parse(embedded_url))
    thread = JobThread("test", at_end=other.close)
    thread.start()
    ran: list[str] = []
    with lock, pytest.raises(TurnTimeoutError):
        await thread.run(lambda: ran.append("too late"), turn=other, after=lambda _: None, limit=0.05)
    await thread.run(lambda: ran.append("in time"), turn=other, after=lambda _: None)
    thread.stop()
    lock.close()
    assert ran == ["in time"]


async def test_a_job_that_runs_when_its_caller_is_cancelled_ends_before_the_caller_does() -> None:
    thread = JobThread("test", at_end=lambda: None)
    thread.start()
    begun, may_end = anyio.Event(), threading.Event()
    steps: list[str] = []

    def job() -> None:
        anyio.from_thread.run_sync(begun.set, token=token)
        may_end.wait()
        steps.append("job ended")

    async def ask() -> None:
        try:
            await thread.run(job, turn=nullcontext(), after=lambda _: steps.append("others told"))
        finally:
            steps.append("caller ended")

    token = anyio.lowlevel.current_token()
    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await begun.wait()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
        may_end.set()
    thread.stop()
    assert steps == ["job ended", "others told", "caller ended"]


async def test_writers_of_several_processes_all_get_their_turns_and_none_is_refused(embedded_url: str) -> None:
    writers, total = 4, 6000
    script = Path(__file__).parent / "publishing_process.py"
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), embedded_url, str(n), str(total)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for n in range(writers)
        ]
        for process in processes:
            assert process.stdout is not None
            assert await anyio.to_thread.run_sync(process.stdout.readline) == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            assert await anyio.to_thread.run_sync(process.wait) == 0
            assert process.stdout is not None
            process.stdout.close()
        reader = await bus.open_reader("t", 0, start=None, committed=True)
        authors = [message.key for message in await reader.fetch(max_records=total)]
    counts = [authors.count(b"%d" % n) for n in range(writers)]
    assert min(counts) >= total / writers / 8, counts  # one of them may have paused for a while


async def test_an_open_that_is_given_up_closes_its_connection_in_its_turn(embedded_url: str, tmp_path: Path) -> None:
    """Closing may checkpoint, and no checkpoint may meet a commit."""
    async with connect(embedded_url):
        pass
    lock = Lock(parse(embedded_url))
    looked, token = anyio.Event(), anyio.lowlevel.current_token()
    late, threads = Database(parse(embedded_url)), set(threading.enumerate())

    def look(connection: sqlite3.Connection) -> bool:
        anyio.from_thread.run_sync(looked.set, token=token)
        return log.recognise(connection)

    with lock:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.open, look, log.set_up)
            await looked.wait()
            tasks.cancel_scope.cancel()
        assert open_files(tmp_path / "bus.db") == 1
        (thread,) = set(threading.enumerate()) - threads
    await anyio.to_thread.run_sync(thread.join, 10.0)
    lock.close()
    assert open_files(tmp_path / "bus.db") == 0


def open_files(path: Path) -> int:
    """How many descriptors this process has of it."""
    return [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()].count(str(path))


# --- no file descriptors -------------------------------------------------------------------------------


@pytest.mark.parametrize("left", range(8))
async def test_a_lack_of_descriptors_is_said_and_over_once_there_are_some(embedded_url: str, left: int) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
    bus = connect(embedded_url)
    with descriptors_left(left):
        failure = ""
        try:
            await bus.start()
            await (await bus.open_reader("t", 0, start=None, committed=True)).aclose()
        except BusUnavailableError as error:
            failure = str(error)
    assert "too many open files (RLIMIT_NOFILE: soft limit " in failure
    await bus.start()
    async with await bus.open_reader("t", 0, start=None, committed=True):
        pass
    await bus.aclose()


@pytest.mark.parametrize("left", [0, 1])
async def test_a_reader_that_lacks_descriptors_costs_itself_only(embedded_url: str, left: int) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        before = len(list(Path("/proc/self/fd").iterdir()))
        with descriptors_left(left), pytest.raises(BusUnavailableError, match="too many open files"):
            await bus.open_reader("t", 0, start=None, committed=True)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        async with await bus.open_reader("t", 0, start=None, committed=True):
            pass


# --- processes that come and go ------------------------------------------------------------------------


async def test_a_commit_wakes_the_readers_of_its_partitions_and_no_others(embedded_url: str) -> None:
    async with connect(embedded_url) as bus, database(embedded_url) as reading:
        await bus.create_topics([TopicSpec("t", 2, {}), TopicSpec("u", 2, {})])
        topics = {topic.name: topic.id for topic in await reading.read(log.all_topics)}
        notifier = Notifier(parse(embedded_url))
        listeners = {(name, part): notifier.listen(topics[name], part) for name in "tu" for part in (0, 1)}
        async with await bus.open_writer("w", 1) as writer:
            await writer.commit([("u", [Entry(b"k", b"v")]), ("t", [])])
        with anyio.fail_after(10):
            await listeners["u", 1].wait()
        # all were poked before the commit returned
        heard = [place for place, listener in listeners.items() if select.select([listener._socket], [], [], 0)[0]]
        for listener in listeners.values():
            listener.close()
        notifier.close()
    assert heard == [("u", 1)]


async def test_the_socket_of_a_killed_reader_is_removed_by_the_next_commit(embedded_url: str, tmp_path: Path) -> None:
    echo = Path(__file__).parents[1] / "echo_process.py"
    sockets = tmp_path / "bus.wake"
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("calls", 1, {}), TopicSpec("answers", 1, {})])
        reader = await bus.open_reader("answers", 0, start=None, committed=True)
        command = [sys.executable, str(echo), embedded_url, "calls", "answers"]
        process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=None, stderr=None)
        await bus.publish("calls", 0, Entry(b"k", b"v"))
        assert await reader.fetch(timeout=30)
        assert len(list(sockets.iterdir())) == 2
        process.send_signal(signal.SIGKILL)
        await process.aclose()
        await bus.publish("calls", 0, Entry(b"k", b"v"))
        assert len(list(sockets.iterdir())) == 1


async def test_a_bus_works_where_its_path_is_longer_than_a_sockets_may_be(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 20) / ("longer-" * 20)
    folder.mkdir(parents=True)
    async with connect(f"sqlite://{folder}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        async with await bus.open_reader("t", 0, start=None, committed=True) as reader:
            await bus.publish("t", 0, Entry(b"k", b"v"))
            assert await reader.fetch(timeout=5)


FORKING = """
import os, sys
import anyio
from outfitter_proto.bus import BusError, Entry, TopicSpec, connect

async def start(bus):
    await bus.start()
    await bus.create_topics([TopicSpec("t", 1, {})])

async def publish(bus):
    try:
        await bus.publish("t", 0, Entry(b"k", b"v"))
        print("published", await bus.offsets("t", 0), flush=True)
    except BusError as error:
        print(type(error).__name__, error, flush=True)
    await bus.aclose()

# Between two event loops: what a fork does to a running one is asyncio's own affair.
bus = connect(sys.argv[1])
anyio.run(start, bus)
child = os.fork()
if child:
    os.waitpid(child, 0)
anyio.run(publish, bus)
"""


def test_a_bus_used_after_fork_raises_with_the_remedy_and_its_parent_goes_on(embedded_url: str) -> None:
    command = [sys.executable, "-c", FORKING, embedded_url]
    refused, parent = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert refused.startswith("BusConfigurationError")
    assert "spawn" in refused
    assert parent == "published (0, 1)"


LOCKING = """
import os, signal, sys
from outfitter_proto.bus.embedded.connecting.lock import Lock
from outfitter_proto.bus.embedded.connecting.location import parse

lock = Lock(parse(sys.argv[1]))
lock.__enter__()
if os.fork() == 0:
    print("the child lives", flush=True)
    sys.stdin.read()
    os._exit(0)
signal.pause()
"""


async def test_a_process_killed_in_a_commit_frees_the_lock_although_its_forked_child_lives(embedded_url: str) -> None:
    command = [sys.executable, "-c", LOCKING, embedded_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"the child lives\n"
        process.kill()
        async with connect(embedded_url) as bus:
            assert await bus.create_topics([TopicSpec("t", 1, {})]) == ["t"]
        # Closing its stdin, on leaving, ends the child.


async def test_a_writer_is_spent_once_it_was_fenced(embedded_url: str) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        old = await bus.open_writer("w", 0)
        await bus.open_writer("w", 0)
        with pytest.raises(FencedError):
            await old.commit([("t", [Entry(b"k", b"v")])])
        with pytest.raises(BusUnavailableError, match="open a new one"):
            await old.commit([("t", [Entry(b"k", b"v")])])


async def test_starting_twice_is_starting_once(embedded_url: str) -> None:
    bus = connect(embedded_url)
    before = set(threading.enumerate())
    await bus.start()
    started = set(threading.enumerate())
    await bus.start()
    assert set(threading.enumerate()) <= started
    await bus.aclose()
    assert started - before


async def test_a_closed_bus_says_so(embedded_url: str) -> None:
    bus = connect(embedded_url)
    with pytest.raises(BusUnavailableError, match="not open"):
        await bus.topic("t")
    await bus.aclose()
    async with bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        reader = await bus.open_reader("t", 0, start=None, committed=True)
        writer = await bus.open_writer("w", 0)
    await bus.aclose()
    with pytest.raises(BusUnavailableError, match="closed"):
        await reader.fetch()
    with pytest.raises(BusUnavailableError, match="closed"):
        await writer.commit([("t", [Entry(b"k", b"v")])])
    assert list(parse(embedded_url).wake.iterdir()) == []
