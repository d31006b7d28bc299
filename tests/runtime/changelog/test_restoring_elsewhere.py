"""A backup goes into topics of another name and with any number of partitions, with what nobody had answered yet."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.codec import decode_ledger, encode
from outfitter_proto.keys import host_of, host_writer, partition_writer, writer_names, writer_of
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, CommitNumber, InputPosition, Register, Token
from outfitter_service.runtime.changelog.backup import archive, restoration
from outfitter_service.runtime.changelog.backup.archive import BackupError, SavedRecord, SavedRegistration
from outfitter_service.runtime.changelog.backup.restoration import Restoration, restore_backup
from outfitter_service.runtime.changelog.backup.save import save
from outfitter_service.runtime.changelog.numbers import SKIPPED
from outfitter_service.runtime.changelog.topic_layout import TopicsChangedError
from outfitter_service.runtime.identity import host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.limits import Limits
from support.api import checkpoint
from support.bus.committed import committed
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import add_partitions, ledger
from support.checker.verdict import verdict
from support.managers.in_process import InProcessManager, deregister, register, serving, static

OLD, NEW = "outfitter", "fleet-2"
TWO = 2
HOSTS = ("h0", "h1", "h3")
NUMBERS = (1, TWO, 5)
Records = dict[int, Mapping[bytes, bytes]]


class Original(NamedTuple):
    """The bus of a cluster with two partitions, whose managers are stopped, in `scope`. `grants`: the encoded records
    of its workers, by key."""

    bus: Path
    scope: str
    grants: dict[bytes, bytes]


async def _always() -> bool:
    return True


def _manager(
    bus: Bus, folder: Path, scope: str, host: str, partitions: int, *, cluster: str, adopt: bool = False,
    ready: bool = True,
) -> AbstractAsyncContextManager[InProcessManager]:  # fmt: skip
    """The manager that serves `host`, which has two devices."""
    number = partition_of(host, partitions)
    identity = host_identity(cluster, host)
    options: dict[str, Any] = {"partition": number, "identity": identity, "limits": Limits(adopt=adopt)}
    if scope == "cluster":
        identity = of_partition(replica_identity(cluster), number)
        mine = PartitionScope(number, partitions, identity.writer)
        options |= {"identity": identity, "scope": mine, "owns_partition": _always}
    return serving(bus, static(count=2), folder, cluster=cluster, ready=ready, **options)


async def _say(bus: Bus, host: str, *bodies: dict[str, Any], cluster: str = OLD) -> None:
    topic = topics(cluster).registrations
    number = partition_of(host, (await bus.topic(topic)).partitions)
    for body in bodies:
        await bus.publish(topic, number, Entry(host.encode(), json.dumps(body).encode()))


def _asked(host: str, worker: str) -> dict[str, Any]:
    return register(worker, gpu=1, lease_s=None, host=host)


async def _until(manager: InProcessManager, host: str, **states: str) -> dict[str, dict[str, Any]]:
    wanted_states = {f"{host}/{worker}/1": state for worker, state in states.items()}
    await manager.until(
        lambda records: all(records.get(key, {}).get("state") == state for key, state in wanted_states.items())
    )
    return await manager.records()


@pytest.fixture(scope="module", params=["host", "cluster"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Of each host two workers have a device, and a third one waits. A fourth one has registered, and the first one
    deregistered, since the managers have stopped."""
    return anyio.run(_lent, tmp_path_factory.mktemp(request.param), request.param)


async def _lent(folder: Path, scope: str) -> Original:
    async with connect(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, OLD, partitions=TWO)
        for host in HOSTS:
            async with _manager(bus, folder, scope, host, TWO, cluster=OLD) as manager:
                await _say(bus, host, *(_asked(host, worker) for worker in ("w1", "w2", "w3")))
                await _until(manager, host, w1="allocated", w2="allocated", w3="pending")
                await manager.stop()
        for host in HOSTS:
            await _say(bus, host, _asked(host, "w4"), deregister("w1", host=host))
        return Original(folder / "bus.db", scope, _workers(await ledger(bus, OLD)))


def _workers(records: Records) -> dict[bytes, bytes]:
    return {key: value for each in records.values() for key, value in each.items() if not key.startswith(b"@")}


def _copy(original: Original, folder: Path) -> str:
    for file in original.bus.parent.glob("bus.db*"):
        shutil.copy(file, folder / file.name)
    return f"sqlite://{folder}/bus.db?synchronous=NORMAL"


async def _saved(original: Original, folder: Path) -> Path:
    file = folder / "b.gz"
    async with connect(_copy(original, folder)) as bus:
        done = await save(bus, OLD, file)
    assert done.registrations == 2 * len(HOSTS)
    return file


def _misplaced(records: Records, partitions: int) -> list[bytes]:
    """The keys that are not in the partition of their host."""
    found = []
    for partition, each in records.items():
        for key in each:
            writer = writer_of(key)
            host = host_of(key) if writer is None else writer_names(writer).host
            if host is not None and partition_of(host, partitions) != partition:
                found.append(key)
    return found


async def _goes_on(bus: Bus, folder: Path, scope: str, partitions: int, cluster: str = NEW) -> None:
    """Managers adopt the restored ledger, and answer what nobody had answered."""
    for host in HOSTS:
        async with _manager(bus, folder, scope, host, partitions, cluster=cluster, adopt=True) as manager:
            records = await _until(manager, host, w1="ended", w2="allocated", w3="allocated", w4="pending")
            assert records[f"{host}/w3/1"]["token"] > SKIPPED
            await _say(bus, host, deregister("w2", host=host), cluster=cluster)
            await _until(manager, host, w4="allocated")
            await manager.stop()


@pytest.mark.parametrize("partitions", NUMBERS)
async def test_everything_is_where_its_host_belongs_and_what_was_not_answered_is_answered(
    original: Original, tmp_path: Path, partitions: int
) -> None:
    file = await _saved(original, tmp_path)
    async with connect(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, NEW, partitions=partitions)
        done = await restore_backup(bus, NEW, file, history=True, origin=OLD)
        assert (done.partitions, done.registrations) == (partitions, 2 * len(HOSTS))
        records = await ledger(bus, NEW)
        assert _workers(records) == original.grants
        assert _misplaced(records, partitions) == []
        await _goes_on(bus, tmp_path, original.scope, partitions)
    report = await verdict(f"sqlite://{tmp_path}/new.db", NEW)
    assert report.violations == ()


async def test_what_the_topic_still_holds_is_not_sent_again_and_what_has_another_place_now_is(
    original: Original, tmp_path: Path
) -> None:
    """The ledger alone is made anew, with more partitions: as after somebody has added them by Kafka's own tools."""
    file = await _saved(original, tmp_path)
    five = NUMBERS[-1]
    moved = [host for host in HOSTS if partition_of(host, TWO) != partition_of(host, five)]
    assert 0 < len(moved) < len(HOSTS)
    async with connect(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        await add_partitions(bus, OLD, five)
        forget(tmp_path / "bus.db", topics(OLD).allocations)
        done = await restore_backup(bus, OLD, file, history=True)
        assert done.registrations == 2 * len(moved)
        assert _misplaced(await ledger(bus, OLD), five) == []
        await _goes_on(bus, tmp_path, original.scope, five, OLD)


def forget(file: Path, topic: str) -> None:
    """Make a topic anew."""
    with closing(sqlite3.connect(file)) as connection, connection:
        [(number,)] = connection.execute("SELECT id FROM topic WHERE name = ?", (topic,)).fetchall()
        connection.execute("DELETE FROM record WHERE topic = ?", (number,))
        connection.execute("UPDATE part SET next = 0, start = 0, clean = 0, live = 0 WHERE topic = ?", (number,))
        connection.execute("UPDATE topic SET uuid = hex(randomblob(16)) WHERE id = ?", (number,))


async def test_a_backup_of_a_ledger_whose_topics_have_more_partitions_is_whole(
    original: Original, tmp_path: Path
) -> None:
    """Its records are still where they were."""
    async with connect(_copy(original, tmp_path)) as bus:
        await add_partitions(bus, OLD, 3)
        assert (await save(bus, OLD, tmp_path / "b.gz")).registrations == 2 * len(HOSTS)
        await wanted.create(bus, NEW, partitions=3)
        done = await restore_backup(bus, NEW, tmp_path / "b.gz", history=True, origin=OLD)
        assert done.later == 0
        assert _workers(await ledger(bus, NEW)) == original.grants
        assert _misplaced(await ledger(bus, NEW), 3) == []


async def test_a_worker_that_has_registered_anew_meanwhile_is_not_ended_by_what_it_said_before(
    original: Original, tmp_path: Path
) -> None:
    async with connect(_copy(original, tmp_path)) as bus:
        for host in HOSTS:
            await _say(bus, host, deregister("w4", None, host=host))
        await save(bus, OLD, tmp_path / "b.gz")
        await wanted.create(bus, NEW, partitions=1)
        await _say(bus, HOSTS[0], _asked(HOSTS[0], "w4") | {"incarnation": "2"}, cluster=NEW)
        await _say(bus, HOSTS[1], _asked(HOSTS[1], "too-late"))
        done = await restore_backup(bus, NEW, tmp_path / "b.gz", history=True, origin=OLD)
        assert (done.registrations, done.later) == (3 * len(HOSTS) - 2, 1)
        async with _manager(bus, tmp_path, original.scope, HOSTS[0], 1, cluster=NEW, adopt=True) as manager:
            records = await _until(manager, HOSTS[0], w1="ended", w3="allocated")
            assert records[f"{HOSTS[0]}/w4/2"]["state"] == "pending"
            assert f"{HOSTS[0]}/w4/1" not in records


@pytest.mark.parametrize("incarnation", ["1", None])
async def test_a_worker_that_has_deregistered_meanwhile_is_not_registered_again(
    original: Original, tmp_path: Path, incarnation: str | None
) -> None:
    file = await _saved(original, tmp_path)
    async with connect(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, NEW, partitions=1)
        await _say(bus, HOSTS[0], deregister("w4", incarnation, host=HOSTS[0]), cluster=NEW)
        done = await restore_backup(bus, NEW, file, history=True, origin=OLD)
        assert done.registrations == 2 * len(HOSTS) - 1
        async with _manager(bus, tmp_path, original.scope, HOSTS[0], 1, cluster=NEW, adopt=True) as manager:
            records = await _until(manager, HOSTS[0], w1="ended", w3="allocated")
            assert records.get(f"{HOSTS[0]}/w4/1", {"state": "ended"})["state"] == "ended"


@pytest.mark.slow
@pytest.mark.parametrize("partitions", NUMBERS)
async def test_killed_at_any_change_no_manager_starts_on_a_part_and_restoring_again_is_whole(
    original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitions: int
) -> None:
    """It goes on in the same topics, of which the ledger alone is made anew."""
    file = await _saved(original, tmp_path)
    monkeypatch.setattr(restoration, "MOST_BYTES", 0)  # each record is a commit of its own
    for point in range(1, 99):
        for old in tmp_path.glob("new.db*"):
            old.unlink()
        async with FaultyBus(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
            await wanted.create(bus, NEW, partitions=partitions)
            work = partial(restore_backup, bus, NEW, file, history=True, origin=OLD)
            changes = await bus.killed(work, point)
            if changes < point:
                return
            for host in HOSTS if point % 5 == 1 else HOSTS[:1]:
                await _is_refused_or_whole(bus, tmp_path, original, host, partitions)
            with pytest.raises(BackupError, match="holds records, and nothing was restored"):
                await work()
            forget(tmp_path / "new.db", topics(NEW).allocations)
            await work()
            assert _workers(await ledger(bus, NEW)) == original.grants
            asked = [each for number in range(partitions) for each in await _messages(bus, number)]
            assert len(asked) == 2 * len(HOSTS)
    raise AssertionError("it never came to its end")


async def _is_refused_or_whole(bus: Bus, folder: Path, original: Original, host: str, partitions: int) -> None:
    """A manager does not start, unless all is restored and only another manager's last mark is missing."""
    if _workers(await ledger(bus, NEW)) == original.grants:
        return
    async with _manager(bus, folder, original.scope, host, partitions, cluster=NEW, adopt=True, ready=False) as manager:
        assert "`outfitter restore` has not completed" in await manager.ended_by(TopicsChangedError)


async def _messages(bus: Bus, number: int) -> list[bytes | None]:
    topic = topics(NEW).registrations
    return [message.value for message in await committed(bus, topic, number)]


async def test_a_backup_of_a_ledger_that_was_restored_and_not_adopted_keeps_what_is_known_of_missing_grants(
    original: Original, tmp_path: Path
) -> None:
    file = await _saved(original, tmp_path)
    async with connect(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, OLD, partitions=TWO)
        await restore_backup(bus, OLD, file, history=True)
        ids = {each.ledger_id for each in _checkpoints(await ledger(bus, OLD))}
        await save(bus, OLD, tmp_path / "later.gz")
        later = _with_header(tmp_path / "later.gz", tmp_path / "much-later.gz", timedelta(days=2))
        await wanted.create(bus, NEW, partitions=1)
        done: Restoration = await restore_backup(bus, NEW, later, history=True, origin=OLD)
        assert {each.ledger_id for each in _checkpoints(await ledger(bus, NEW))} == ids
    assert {f"backup/{done.at:%Y-%m-%dT%H:%M:%SZ}"} == ids


async def test_a_backup_that_is_restored_twice_gives_no_number_twice(original: Original, tmp_path: Path) -> None:
    """The ledger that was restored first is lost, too, with what it granted."""
    file = await _saved(original, tmp_path)
    numbers = []
    for name in ("once", "twice"):
        async with connect(f"sqlite://{tmp_path}/{name}.db?synchronous=NORMAL") as bus:
            await wanted.create(bus, OLD, partitions=TWO)
            await restore_backup(bus, OLD, file, history=True)
            numbers.append({each.writer: each for each in _checkpoints(await ledger(bus, OLD))})
    once, twice = numbers
    for writer, first in once.items():
        assert twice[writer].commit > first.commit + 3
        assert twice[writer].token > first.token


def _checkpoints(records: Records) -> list[Checkpoint]:
    found = [decode_ledger(value) for each in records.values() for key, value in each.items() if writer_of(key)]
    return [each for each in found if isinstance(each, Checkpoint)]


def _with_header(file: Path, new: Path, later: timedelta = timedelta(0), **changes: Any) -> Path:
    """The same file with another header, as if it had been made later."""
    with archive.reading(file) as (header, records):
        changed = structs.replace(header, at=header.at + later, **changes)
        with archive.writing(new, changed) as writer:
            for record in records:
                if not (changed.version == 1 and isinstance(record, SavedRegistration)):
                    writer.add(record)
            writer.end()
    return new


@pytest.mark.parametrize("partitions", NUMBERS)
async def test_a_file_of_version_0_2_goes_into_any_number_of_partitions(
    original: Original, tmp_path: Path, partitions: int
) -> None:
    """It has no registrations."""
    file = _with_header(await _saved(original, tmp_path), tmp_path / "first.gz", version=1, outfitter="0.2.0")
    async with connect(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, OLD, partitions=partitions)
        done = await restore_backup(bus, OLD, file, history=True)
        assert done.registrations == 0
        records = await ledger(bus, OLD)
        assert (_workers(records), _misplaced(records, partitions)) == (original.grants, [])


# --- what version 0.2 has left ---------------------------------------------------------------------------------


async def test_a_ledger_that_version_0_2_has_not_moved_to_its_end_is_refused_by_all(
    original: Original, tmp_path: Path
) -> None:
    async with connect(_copy(original, tmp_path)) as bus:
        for record in _checkpoints(await ledger(bus, OLD)):
            moving = structs.replace(record, partitions=0, instance="topics-grow-1a2b3c4d")
            number = record.input.partition
            await bus.publish(topics(OLD).allocations, number, Entry(moving.key.encode(), encode(moving)))
        with pytest.raises(BackupError, match=r"version 0\.2 has not moved all records .*finish it with version 0.2"):
            await save(bus, OLD, tmp_path / "b.gz")
        assert [*tmp_path.glob("*b.gz*")] == []
        for adopt in (False, True):
            async with _manager(
                bus, tmp_path, original.scope, HOSTS[0], TWO, cluster=OLD, adopt=adopt, ready=False
            ) as manager:
                assert "finish it with version 0.2 (`outfitter topics grow`" in await manager.ended_by(
                    TopicsChangedError
                )
        file = await _written(bus, tmp_path / "moving.gz")
        await wanted.create(bus, NEW, partitions=TWO)
        with pytest.raises(BackupError, match=r"was made while partitions were added .* Use another backup"):
            await restore_backup(bus, NEW, file, history=True, origin=OLD)
        assert await bus.offsets(topics(NEW).allocations, 0) == (0, 0)


async def _written(bus: Bus, file: Path) -> Path:
    """What version 0.2 saved, whatever the ledger said."""
    topic = topics(OLD).allocations
    header = archive.Header(
        version=1, at=datetime.now(UTC), cluster=OLD, partitions=TWO, ledger_id="x", outfitter="0.2.0"
    )
    with archive.writing(file, header) as writer:
        for number in range(TWO):
            for each in await committed(bus, topic, number):
                writer.add(
                    SavedRecord(
                        partition=number, offset=each.offset, timestamp_ms=each.timestamp_ms,
                        key=each.key or b"", value=each.value,
                    )
                )  # fmt: skip
        writer.end()
    return file


async def test_a_host_with_records_in_two_partitions_is_neither_saved_nor_restored(
    original: Original, tmp_path: Path
) -> None:
    """As a backup brought them that version 0.2 had made while partitions were added."""
    async with connect(_copy(original, tmp_path)) as bus:
        for number, records in (await ledger(bus, OLD)).items():
            for key, value in records.items():
                if host_of(key) == HOSTS[0]:
                    await bus.publish(topics(OLD).allocations, 1 - number, Entry(key, value))
        with pytest.raises(BackupError, match=rf"host '{HOSTS[0]}' has records in partitions . and .*end all workers"):
            await save(bus, OLD, tmp_path / "b.gz")
        file = await _written(bus, tmp_path / "twice.gz")
        await wanted.create(bus, NEW, partitions=5)
        with pytest.raises(BackupError, match=f"host '{HOSTS[0]}' has records in partitions"):
            await restore_backup(bus, NEW, file, history=True, origin=OLD)


# --- any ledger ------------------------------------------------------------------------------------------------

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,3}", fullmatch=True), min_size=1, max_size=6, unique=True)


@st.composite
def backups(draw: st.DrawFn) -> tuple[int, list[Checkpoint], list[SavedRecord]]:
    """A number of partitions, and a ledger of hosts or of owners, in which each host has records and registrations."""
    partitions = draw(st.integers(1, 4))
    hosts, scope = draw(NAMES), draw(st.sampled_from(["host", "cluster"]))
    owners = {partition_writer(number): number for number in range(partitions)}
    writers = {host_writer(host): partition_of(host, partitions) for host in hosts} if scope == "host" else owners
    checkpoints = [
        structs.replace(
            checkpoint(writer),
            scope=scope,
            commit=CommitNumber(draw(st.integers(1, 10**6))),
            token=Token(draw(st.integers(0, 10**6))),
            input=InputPosition(
                topic_id="before", partition=number, from_=0, to=draw(st.integers(0, 1000)),
                base=draw(st.sampled_from([UNSET, 5, 10**6])),
            ),
        )
        for writer, number in writers.items()
    ]  # fmt: skip
    lines: list[SavedRecord] = []
    for host in hosts:
        place = {"partition": partition_of(host, partitions), "timestamp_ms": 0}
        keys = [f"{host}/w{number}/1".encode() for number in range(draw(st.integers(1, 4)))]
        lines += [SavedRecord(offset=0, key=key, value=key if draw(st.booleans()) else None, **place) for key in keys]
        asked = [Register(host=host, worker=f"w{number}", incarnation="1") for number in range(draw(st.integers(0, 2)))]
        lines += [SavedRegistration(offset=0, key=host.encode(), value=encode(each), **place) for each in asked]
    return partitions, checkpoints, sorted(lines, key=lambda line: isinstance(line, SavedRegistration))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(backup=backups(), partitions=st.integers(1, 5))
def test_any_backup_in_any_number_of_partitions_is_whole_and_continues_above_all_numbers(
    tmp_path: Path, backup: tuple[int, list[Checkpoint], list[SavedRecord]], partitions: int
) -> None:
    before, checkpoints, lines = backup
    for file in (*tmp_path.glob("new.db*"), *tmp_path.glob("b.gz")):
        file.unlink()
    header = archive.Header(at=datetime.now(UTC), cluster=OLD, partitions=before, ledger_id="before", outfitter="0.3.0")
    with archive.writing(tmp_path / "b.gz", header) as writer:
        for each in checkpoints:
            record = SavedRecord(
                partition=each.input.partition, offset=1, timestamp_ms=0, key=each.key.encode(), value=encode(each)
            )
            writer.add(record)
        for line in lines:
            writer.add(line)
        writer.end()

    async def restored() -> tuple[Records, dict[int, list[bytes]]]:
        async with connect(f"sqlite://{tmp_path}/new.db?synchronous=NORMAL") as bus:
            await wanted.create(bus, NEW, partitions=partitions)
            await restore_backup(bus, NEW, tmp_path / "b.gz", history=True, origin=OLD)
            asked = {number: [value or b"" for value in await _messages(bus, number)] for number in range(partitions)}
            return await ledger(bus, NEW), asked

    records, asked = anyio.run(restored)
    last = {line.key: line.value for line in lines if not isinstance(line, SavedRegistration)}
    assert _workers(records) == {key: value for key, value in last.items() if value is not None}
    assert _misplaced(records, partitions) == []
    for number in range(partitions):
        mine = [line for line in lines if partition_of((line.key.split(b"/")[0]).decode(), partitions) == number]
        assert asked[number] == [line.value for line in mine if isinstance(line, SavedRegistration)]
        sources = {partition_writer(line.partition) for line in mine}
        for each in _checkpoints({number: records[number]}):
            former = [old for old in checkpoints if old.writer == each.writer or old.writer in sources]
            assert each.partitions == partitions
            assert each.cluster == NEW
            for old in former:
                assert (each.commit, each.token) > (old.commit + SKIPPED, old.token + SKIPPED - 1)
                assert each.token >= old.token + SKIPPED
                assert (each.input.base or 0) + each.input.to >= (old.input.base or 0) + old.input.to
    owners = {each.writer for each in _checkpoints(records) if each.scope == "cluster"}
    assert owners in ({partition_writer(number) for number in range(partitions)}, set())
