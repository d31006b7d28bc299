"""Backups and disasters of the embedded bus, and of one record, by the commands of service/recover.md."""

from __future__ import annotations

import gzip
import json
import re
import secrets
import shutil
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import BusUnavailableError, Entry, connect
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Register
from outfitter_proto.support.processes import process_owner
from outfitter_service.runtime.changelog.backup.archive import BackupError
from outfitter_service.runtime.changelog.backup.restoration import restore_backup
from support.api import checkpoint
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verified_with_replay
from support.managers.process import Manager, ManagerError, StartManager, files_config
from support.recipes import commands, run

pytestmark = pytest.mark.slow

LEDGER = topics().allocations


def register(manager: Manager, worker: str, *more: str) -> dict[str, Any]:
    """A worker without a lease that has its device."""
    done = manager.outfitter("register", "--worker", worker, "--lease", "none", "--wait", "20", "--json", *more)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def held(manager: Manager) -> dict[str, tuple[str, list[str]]]:
    """State and devices of all workers."""
    return {
        record["worker"]: (record["state"], [info["id"] for info in record.get("resources", {}).get("gpu", [])])
        for record in manager.records()
    }


def refused(manager: Manager, *arguments: str) -> str:
    """What a manager says that does not start."""
    with pytest.raises(ManagerError, match="ended with 1 before it was ready") as error:
        manager.start(*arguments)
    return str(error.value)


def renew(manager: Manager) -> None:
    """Replace the bus by a new one, which has nothing but empty topics."""
    for name in ("bus.db", "bus.db-wal", "bus.db-shm"):
        (manager.folder / name).unlink(missing_ok=True)
    assert manager.outfitter("topics", "create").returncode == 0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Manager:
    """A stopped manager that had lent two of three devices. Its ledger is in `ledger.gz`."""
    folder = tmp_path_factory.mktemp("original")
    manager = Manager(folder, files_config(folder / "gpus", gpus=3))
    manager.start()
    try:
        register(manager, "w1")
        register(manager, "w2")
        run(manager, commands("Back up")[0])
        manager.stop()
    finally:
        manager.kill9()
    return manager


@pytest.fixture
def saved(original: Manager, tmp_path: Path) -> Iterator[Manager]:
    """The same, of this test alone."""
    folder = shutil.copytree(original.folder, tmp_path / "saved")
    manager = Manager(folder, original.config.read_text(), host=original.host)
    try:
        yield manager
    finally:
        manager.kill9()
        print(f"--- {manager.log}\n{manager.log_tail()}")


# --- backup and restore -----------------------------------------------------------------------------------


def test_a_backup_is_made_while_a_manager_serves_and_only_its_owner_may_read_it(saved: Manager) -> None:
    file = saved.folder / "ledger.gz"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first, *records, last = map(json.loads, gzip.decompress(file.read_bytes()).splitlines())
    assert (first["type"], first["version"], first["partitions"]) == ("outfitter-backup", 2, 1)
    assert last["records"] == len(records) > 2
    assert [path.name for path in saved.folder.iterdir() if "ledger" in path.name] == ["ledger.gz"]


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("", "names no file"),
        (".", "names no file"),
        ("gpus", "gpus is a directory: name a file in it"),
        ("nowhere/ledger.gz", "nowhere/ledger.gz: No such file or directory"),
    ],
)
def test_a_backup_that_cannot_be_written_is_refused_by_the_name_that_was_given(
    original: Manager, out: str, words: str
) -> None:
    done = original.outfitter("backup", "--out", out)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_restored_ledger_is_taken_only_if_it_is_adopted_and_then_lends_nothing_twice(saved: Manager) -> None:
    before, token = held(saved), max(record["token"] for record in saved.records())
    renew(saved)
    told = run(saved, ["outfitter", "restore", "ledger.gz"])
    assert "records of 1 managers are restored, as of 20" in told
    assert "end all workers that got devices after 20" in told
    assert "was restored from a backup of 20" in refused(saved)
    check = saved.outfitter("topics", "check")
    assert check.returncode == 1
    assert "--adopt-ledger" in check.stdout
    saved.start("--adopt-ledger")
    assert held(saved) == before
    record = register(saved, "w3")
    assert record["token"] > token + 2**32
    assert [info["id"] for info in record["resources"]["gpu"]] == ["GPU-2"]
    verified_with_replay(saved)
    saved.restart()  # once adopted it needs nobody's word any more
    verdict = saved.outfitter("verify")
    assert verdict.returncode == 0, verdict.stdout


def test_a_restored_ledger_raises_no_alarm_once_it_is_compacted_and_a_lost_step_is_found(saved: Manager) -> None:
    renew(saved)
    run(saved, ["outfitter", "restore", "ledger.gz"])
    saved.start("--adopt-ledger")
    for _ in range(3):
        lend_and_return(saved)
    saved.stop()
    compact(saved)
    verdict = saved.outfitter("verify")
    assert verdict.returncode == 0, verdict.stdout
    saved.start()
    lend_and_return(saved)
    saved.stop()
    forget_a_step(saved)
    forged = saved.outfitter("verify")
    assert forged.returncode == 1
    assert "history does not have" in forged.stdout


def test_a_ledger_that_begins_anew_raises_no_alarm_and_a_lost_step_is_found(saved: Manager) -> None:
    saved.start()
    for worker in ("w1", "w2"):
        assert saved.outfitter("deregister", "--worker", worker).returncode == 0
        saved.wait_for_state(worker, "ended")
    lend_and_return(saved)
    saved.stop()
    assert saved.outfitter("verify").returncode == 0
    forget_all(saved)
    assert saved.outfitter("verify").returncode == 0, "nobody has begun the new one yet"
    saved.start("--adopt-ledger")
    for worker in ("w1", "w4"):
        register(saved, worker)
    lend_and_return(saved)
    saved.stop()
    verdict = saved.outfitter("verify", "--json")
    assert verdict.returncode == 0, verdict.stdout
    [check] = [check for check in json.loads(verdict.stdout)["checks"] if check["name"] == "history"]
    assert re.search(rf"not looked at before {topics().history}/0/\d+: an earlier ledger", str(check["partial"]))
    verified_with_replay(saved)
    forget_a_step(saved)
    forged = saved.outfitter("verify")
    assert forged.returncode == 1
    assert "history does not have" in forged.stdout


def test_orders_in_effect_are_in_the_backup_and_end_as_any_others_where_their_topic_is_lost(saved: Manager) -> None:
    saved.start()
    for device in ("GPU-1", "GPU-2"):
        ordered = saved.outfitter("cordon", saved.host, "--device", device, "--reason", "XID 79")
        assert ordered.returncode == 0, ordered.stderr
    (saved.folder / "ledger.gz").unlink()
    run(saved, commands("Back up")[0])
    saved.stop()
    renew(saved)
    run(saved, ["outfitter", "restore", "ledger.gz"])
    saved.start("--adopt-ledger")
    assert saved.outfitter("orders").stdout.count("in effect, lost in the topic") == 2
    saved.outfitter("register", "--worker", "w3", "--lease", "none")
    assert "0 of 3 free, 2 cordoned" in saved.wait_for_state("w3", "pending")["reason"]
    ended = saved.outfitter("uncordon", saved.host, "--device", "GPU-2")
    assert ended.returncode == 0, ended.stderr
    assert [info["id"] for info in saved.wait_for_state("w3", "allocated")["resources"]["gpu"]] == ["GPU-2"]
    assert json.loads(saved.outfitter("orders", "--json").stdout)[0]["device"] == "GPU-1"


def lend_and_return(manager: Manager) -> None:
    worker = f"short-{secrets.token_hex(4)}"
    register(manager, worker)
    assert manager.outfitter("deregister", "--worker", worker).returncode == 0
    manager.wait_for_state(worker, "ended")


def compact(manager: Manager) -> None:
    """Do at once what a manager does each minute."""

    async def maintained() -> None:
        async with connect(manager.bus_url) as bus:
            await bus.maintain()

    anyio.run(maintained)


def forget_a_step(manager: Manager) -> None:
    """Remove the newest step from history, as somebody can do in a file."""
    with closing(sqlite3.connect(manager.folder / "bus.db")) as connection, connection:
        [(number,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (topics().history,)).fetchall()
        steps = 'topic = ? AND instr(value, CAST(\'"type":"transition"\' AS BLOB))'
        [(newest,)] = connection.execute(f"SELECT max(off) FROM record WHERE {steps}", (number,)).fetchall()
        connection.execute("DELETE FROM record WHERE topic = ? AND off = ?", (number, newest))


def test_a_file_that_is_no_whole_backup_is_refused_and_nothing_is_written(saved: Manager) -> None:
    file = saved.folder / "ledger.gz"
    packed = file.read_bytes()
    lines = gzip.decompress(packed).splitlines(keepends=True)
    later = lines[0].replace(b'"version":2', b'"version":3')
    for damaged, words in (
        (packed[: len(packed) // 2], "is no complete backup"),
        (
            packed[:200] + bytes([packed[200] ^ 1]) + packed[201:],
            "is (no complete backup|no backup of Outfitter|damaged)",
        ),
        (gzip.compress(b"".join(lines[:-1])), "it ends too early"),
        (gzip.compress(b"".join(lines[:2] + lines[3:])), "its records are not those that were saved"),
        (gzip.compress(b"".join([*lines, b"{}\n"])), "its records are not those that were saved"),
        (gzip.compress(b"".join([later, *lines[1:]])), "has version 3, and this version of Outfitter knows 2"),
        (gzip.compress(b"{}\n"), "is no backup of Outfitter"),
        (b"{}\n", "is no complete backup"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(BackupError, match=words):
            anyio.run(restore_into, f"sqlite://{saved.folder}/new.db", file)
    done = saved.outfitter("restore", "ledger.gz")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no complete backup" in done.stderr


async def restore_into(url: str, file: Path) -> None:
    """Restore into new topics, which must stay empty if that fails."""
    async with connect(url) as bus:
        await wanted.create(bus, "outfitter", partitions=1)
        try:
            await restore_backup(bus, "outfitter", file, history=True)
        except BackupError:
            assert await bus.offsets(LEDGER, 0) == (0, 0)
            raise


def test_a_backup_goes_into_new_topics_of_its_cluster_or_of_one_that_is_said_with_any_number_of_partitions(
    saved: Manager,
) -> None:
    before = held(saved)
    for arguments, words in (
        (["backup", "--out", "ledger.gz"], "exists already"),
        (["restore", "ledger.gz"], "holds records, and nothing was restored"),
        (["restore", "ledger.gz", "--cluster", "other"], "or into the topics of another cluster with --from outfitter"),
        (["restore", "ledger.gz", "--cluster", "other", "--from", "third"], "is of cluster 'outfitter'"),
        (["restore", "ledger.gz", "--cluster", "other", "--from", "outfitter"], "topics create --cluster other"),
    ):
        done = saved.outfitter(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert words in done.stderr
    assert saved.outfitter("topics", "create", "--cluster", "other", "--partitions", "5").returncode == 0
    told = run(saved, ["outfitter", "restore", "ledger.gz", "--cluster", "other", "--from", "outfitter"])
    assert "in 5 partitions; 0 registrations sent again" in told
    other = Manager(saved.folder, saved.config.read_text(), host=saved.host, bus=saved.bus_url, cluster="other")
    try:
        other.start("--adopt-ledger")
        assert held(other) == before
        other.stop()
        assert other.outfitter("verify").returncode == 0
    finally:
        other.kill9()


@pytest.mark.parametrize("commits", [1, 2])
def test_a_restore_that_was_interrupted_lets_no_manager_start_adopted_or_not(saved: Manager, commits: int) -> None:
    renew(saved)
    done: list[str] = []

    async def fail(point: str) -> None:
        done.append(point)
        if done.count("commit:before") > commits:
            raise BusUnavailableError("somebody has pulled the plug")

    async def interrupted() -> None:
        async with FaultyBus(saved.bus_url, fail) as bus:
            with pytest.raises(BusUnavailableError, match="plug"):
                await restore_backup(bus, "outfitter", saved.folder / "ledger.gz", history=True)

    anyio.run(interrupted)
    assert "`outfitter restore` has not completed" in refused(saved)
    assert "`outfitter restore` has not completed" in refused(saved, "--adopt-ledger")
    other = Manager(saved.folder / "other", saved.config.read_text(), bus=saved.bus_url)
    assert "`outfitter restore` has not completed" in refused(other), "the host may be one that comes later"
    renew(saved)
    run(saved, ["outfitter", "restore", "ledger.gz"])
    saved.start("--adopt-ledger")


def test_a_restore_that_was_interrupted_lets_no_manager_start_in_another_partition(tmp_path: Path) -> None:
    manager = Manager(tmp_path, files_config(tmp_path / "gpus", gpus=1))
    assert manager.outfitter("topics", "create", "--partitions", "2").returncode == 0
    half = structs.replace(checkpoint("host/h"), partitions=0, ledger_id="backup/2026-11-26T12:00:00Z")

    async def begin() -> None:
        async with connect(manager.bus_url) as bus:
            await bus.publish(LEDGER, 1 - partition_of(manager.host, 2), Entry(half.key.encode(), encode(half)))

    anyio.run(begin)
    assert "`outfitter restore` has not completed" in refused(manager)


def test_a_manager_that_writes_while_a_backup_is_restored_is_found_out(saved: Manager) -> None:
    renew(saved)
    points: list[str] = []

    async def write(point: str) -> None:
        points.append(point)
        if point == "commit:before" and points.count(point) == 2:
            await bus.publish(LEDGER, 0, Entry(b"@host/another", b"{}"))

    async def restored() -> None:
        nonlocal bus
        async with FaultyBus(saved.bus_url, write) as bus:
            with pytest.raises(BackupError, match="somebody else has written to"):
                await restore_backup(bus, "outfitter", saved.folder / "ledger.gz", history=True)

    bus: FaultyBus
    anyio.run(restored)
    assert "has not completed" in refused(saved, "--adopt-ledger")


# --- workers that the ledger lacks ------------------------------------------------------------------------


@pytest.fixture
def sleeper(saved: Manager) -> Iterator[subprocess.Popen[str]]:
    """`outfitter run` of a worker that got its device after the backup was made, and sleeps."""
    saved.start()
    process = saved.popen("run", "--worker", "late", "--", "sleep", "600", start_new_session=True)
    saved.wait_for_state("late", "allocated")
    yield process
    process.kill()
    process.communicate()


def sleepers(manager: Manager) -> list[int]:
    """The processes of the worker."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"OUTFITTER_HOST={manager.host}\0".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return [pid for pid in found if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")]


@pytest.mark.parametrize("lost", ["all topics", "the ledger"])
def test_no_ledger_is_adopted_while_a_worker_runs_that_it_lacks(
    saved: Manager, sleeper: subprocess.Popen[str], lost: str
) -> None:
    saved.wait_for(lambda: sleepers(saved))
    saved.stop()
    [pid] = sleepers(saved)
    if lost == "the ledger":
        forget_all(saved)
    else:
        renew(saved)
    run(saved, ["outfitter", "restore", "ledger.gz"])
    told = refused(saved, "--adopt-ledger")
    assert f"Workers run on this machine that it does not have, or has as waiting: {saved.host}/late/" in told
    assert f"(process {pid}" in told
    assert held(saved).keys() == {"w1", "w2"}
    subprocess.run(["kill", "-9", str(pid)], check=True)
    sleeper.wait(30)
    saved.start("--adopt-ledger")
    assert [info["id"] for info in register(saved, "w3")["resources"]["gpu"]] == ["GPU-2"]


def test_no_ledger_is_begun_while_a_worker_of_its_host_runs(saved: Manager, sleeper: subprocess.Popen[str]) -> None:
    """As if somebody had removed the file of the embedded bus, or the backup were older than the host."""
    saved.wait_for(lambda: sleepers(saved))
    saved.stop()
    [pid] = sleepers(saved)
    renew(saved)
    for arguments in ((), ("--adopt-ledger",)):
        told = refused(saved, *arguments)
        assert f"the ledger has nothing of host '{saved.host}', because it is new, or lost" in told
        assert f"{saved.host}/late/" in told
        assert f"(process {pid}" in told
    subprocess.run(["kill", "-9", str(pid)], check=True)
    sleeper.wait(30)
    saved.start()


def forget_all(manager: Manager) -> None:
    """Recreate the ledger's topic alone, as it can be done in a file."""
    with closing(sqlite3.connect(manager.folder / "bus.db")) as connection, connection:
        [(number,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (LEDGER,)).fetchall()
        connection.execute("DELETE FROM record WHERE topic = ?", (number,))
        connection.execute("UPDATE part SET next = 0, start = 0, clean = 0, live = 0 WHERE topic = ?", (number,))
        connection.execute("UPDATE topic SET uuid = hex(randomblob(16)) WHERE id = ?", (number,))


def test_no_ledger_is_adopted_while_the_owner_of_a_registration_runs_that_it_lacks(saved: Manager) -> None:
    """As with `RuntimeContext`, whose process has no variables of its own."""
    saved.start()
    owner = subprocess.Popen(["sleep", "600"])
    try:
        register_owned(saved, owner.pid)
        saved.stop()
        forget_all(saved)
        run(saved, ["outfitter", "restore", "ledger.gz"])
        assert f"{saved.host}/late/1 (process {owner.pid})" in refused(saved, "--adopt-ledger")
    finally:
        owner.kill()
        owner.wait()
    saved.start("--adopt-ledger")


def register_owned(manager: Manager, pid: int) -> None:
    """Register a worker whose owner is this process, as a client in another language does."""
    message = Register(host=manager.host, worker="late", incarnation="1", owner=process_owner(pid), lease_s=None)

    async def say() -> None:
        async with connect(manager.bus_url) as bus:
            await bus.publish(topics().registrations, 0, Entry(manager.host.encode(), encode(message)))

    anyio.run(say)
    manager.wait_for_state("late", "allocated")


# --- the page ---------------------------------------------------------------------------------------------


def test_a_copy_of_the_file_is_restored_into_a_new_one(start_manager: StartManager) -> None:
    manager = start_manager(gpus=2)
    register(manager, "w1")
    manager.stop()
    shutil.copy(manager.folder / "bus.db", manager.folder / "copy.db")
    manager.start()
    register(manager, "today")
    for command in commands("A disk from yesterday", 1):
        run(manager, command)
    assert held(manager) == {"w1": ("allocated", ["GPU-0"])}
    assert (manager.folder / "broken" / "bus.db").exists()


def test_one_damaged_record_is_forgotten(start_manager: StartManager) -> None:
    manager = start_manager(gpus=2)
    key = f"{manager.host}/w1/{register(manager, 'w1')['incarnation']}"
    register(manager, "w2")
    manager.stop()

    async def damage() -> None:
        async with connect(manager.bus_url) as bus:
            await bus.publish(LEDGER, 0, Entry(key.encode(), b"{"))

    anyio.run(damage)
    assert "The ledger in outfitter.allocations/0 is damaged there; to continue without this record" in refused(manager)
    for command in commands("One damaged record"):
        run(manager, command, **{"gpu-3/tm-17/run-1": key})
    assert held(manager) == {"w2": ("allocated", ["GPU-1"])}
    assert [info["id"] for info in register(manager, "w3")["resources"]["gpu"]] == ["GPU-0"]
