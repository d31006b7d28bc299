"""Growth and backups of one ledger: a backup is whole or refused, and a restored ledger grows or is left as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from msgspec import structs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.runtime.changelog.backup import archive
from outfitter_service.runtime.changelog.backup.archive import BackupError, SavedRecord
from outfitter_service.runtime.changelog.backup.restoration import Restoration, restore_backup
from outfitter_service.runtime.changelog.backup.save import save
from outfitter_service.runtime.changelog.growth import growing_ledger
from outfitter_service.runtime.changelog.growth.grow import grow
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError
from outfitter_service.runtime.changelog.shape import TopicsChangedError
from outfitter_service.runtime.identity import Identity, host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.limits import Limits
from support.bus.committed import committed
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import add_partitions, ledger
from support.managers.in_process import InProcessManager, register, serving, static

CLUSTER = "outfitter"
ONE, THREE = 1, 3
MOVES, STAYS = "h3", "h1"
Records = dict[int, Mapping[bytes, bytes]]
Grants = dict[str, Any]


def test_one_of_the_hosts_moves_and_one_stays() -> None:
    assert (partition_of(MOVES, THREE), partition_of(STAYS, THREE)) == (2, 0)


class Original(NamedTuple):
    """The bus of a cluster with one partition, whose managers are stopped. `grants`: the records of its workers."""

    bus: Path
    grants: Grants


async def _always() -> bool:
    return True


def _manager(
    bus: Bus, folder: Path, scope: str, host: str, partitions: int, *, adopt: bool = False, ready: bool = True,
    limits: Limits | None = None, identity: Identity | None = None,
) -> AbstractAsyncContextManager[InProcessManager]:  # fmt: skip
    """The manager that serves `host`."""
    number = partition_of(host, partitions)
    limits, identity = limits or Limits(adopt=adopt), identity or host_identity(CLUSTER, host)
    options: dict[str, Any] = {"partition": number, "identity": identity, "limits": limits}
    if scope == "cluster":
        identity = of_partition(replica_identity(CLUSTER), number)
        mine = PartitionScope(number, partitions, identity.writer)
        options |= {"identity": identity, "scope": mine, "owns_partition": _always}
    return serving(bus, static(count=2), folder, cluster=CLUSTER, ready=ready, **options)


async def _lend(manager: InProcessManager, bus: Bus, host: str, *workers: str, partition: int = 0) -> None:
    for worker in workers:
        message = register(worker, gpu=1, lease_s=None, host=host)
        await bus.publish(topics(CLUSTER).registrations, partition, Entry(host.encode(), json.dumps(message).encode()))
    keys = {f"{host}/{worker}/1" for worker in workers}
    await manager.until(lambda records: all(records.get(key, {}).get("state") == "allocated" for key in keys))


@pytest.fixture(scope="module", params=["host", "cluster"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    """One worker has a device of each host, and another one the second device of the host that moves."""
    return anyio.run(_lent, tmp_path_factory.mktemp(request.param), request.param)


async def _lent(folder: Path, scope: str) -> Original:
    async with connect(f"sqlite://{folder}/bus.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=ONE)
        for host, workers in ((MOVES, ("w1", "w2")), (STAYS, ("w1",))):
            async with _manager(bus, folder, scope, host, ONE) as manager:
                await _lend(manager, bus, host, *workers)
                await manager.stop()
        return Original(folder / "bus.db", _grants(await ledger(bus, CLUSTER)))


def _grants(records: Records) -> Grants:
    """The records of all workers, by key and partition; the partition is that of three."""
    return {
        f"{partition_of(key.decode().split('/')[0], THREE)} {key.decode()}": json.loads(value)
        for each in records.values()
        for key, value in each.items()
        if not key.startswith(b"@")
    }


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each record is a commit of its own."""
    monkeypatch.setattr(growing_ledger, "FILL", 0.0)


def _copy(original: Original, folder: Path) -> str:
    for file in folder.glob("*.db*"):
        file.unlink()
    for file in original.bus.parent.glob("bus.db*"):
        shutil.copy(file, folder / file.name)
    return f"sqlite://{folder}/bus.db?synchronous=NORMAL"


async def _restored(folder: Path, file: Path) -> tuple[Records, int]:
    """What `file` makes of new topics, and their number of partitions."""
    for old in folder.glob("new.db*"):
        old.unlink()
    with archive.reading(file) as (header, _):
        partitions = header.partitions
    async with connect(f"sqlite://{folder}/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=partitions)
        await restore_backup(bus, CLUSTER, file, history=True)
        return await ledger(bus, CLUSTER), partitions


async def _is_whole(folder: Path, file: Path, original: Original) -> None:
    """Restored, the file has each grant once, where the managers look for it."""
    records, partitions = await _restored(folder, file)
    for partition, keys in records.items():
        for key in keys:
            if not key.startswith(b"@"):
                assert partition_of(key.decode().split("/")[0], partitions) == partition, key
    assert _grants(records) == original.grants
    assert sum(not key.startswith(b"@") for each in records.values() for key in each) == len(original.grants)


async def _save_or_refuse(bus: Bus, file: Path) -> bool:
    """Back up; whether that was done."""
    file.unlink(missing_ok=True)
    refusal = await _refusal(save(bus, CLUSTER, file))
    if refusal is None:
        return True
    assert "outfitter topics grow --partitions 3" in refusal or "has grown meanwhile" in refusal
    assert [path for path in file.parent.iterdir() if file.name in path.name] == []
    return False


async def _refusal(work: Awaitable[object]) -> str | None:
    try:
        await work
    except BackupError as error:
        return str(error)
    return None


async def test_a_backup_of_a_growth_that_was_killed_at_any_point_is_whole_or_refused(
    original: Original, tmp_path: Path
) -> None:
    refused = 0
    for point in range(1, 99):
        async with FaultyBus(_copy(original, tmp_path)) as bus:
            changes = await bus.killed(partial(grow, bus, CLUSTER, THREE), point)
            if await _save_or_refuse(bus, tmp_path / "b.gz"):
                await _is_whole(tmp_path, tmp_path / "b.gz", original)
            else:
                refused += 1
        if changes < point:
            assert refused > 5
            return
    raise AssertionError("it never came to its end")


async def test_a_backup_that_growth_begins_or_ends_under_is_whole_or_refused(
    original: Original, tmp_path: Path
) -> None:
    """Growth is killed at each point before, and runs to its end between any two readings of the backup."""
    saved = 0
    for point in range(1, 99):
        changes = point
        for reading in range(1, 99):
            async with FaultyBus(_copy(original, tmp_path)) as bus, connect(bus.url) as another:
                changes = await bus.killed(partial(grow, bus, CLUSTER, THREE), point)
                readings = 0

                async def go_on(name: str, reading: int = reading, another: Bus = another) -> None:
                    nonlocal readings
                    readings += name == "stable_end:before"
                    if name == "stable_end:before" and readings == reading:
                        await grow(another, CLUSTER, THREE)

                bus.script = go_on
                done = await _save_or_refuse(bus, tmp_path / "b.gz")
                if done:
                    await _is_whole(tmp_path, tmp_path / "b.gz", original)
                    saved += 1
            if readings < reading:
                break
        if changes < point:
            assert saved
            return
    raise AssertionError("it never came to its end")


async def _save_anyhow(bus: Bus, file: Path) -> None:
    """What an earlier version saved, whatever the ledger said."""
    file.unlink(missing_ok=True)
    topic = topics(CLUSTER).allocations
    before = await bus.topic(topic)
    header = archive.Header(
        at=datetime.now(UTC), cluster=CLUSTER, partitions=before.partitions, ledger_id=before.id, outfitter="0.2.0"
    )
    with archive.writing(file, header) as writer:
        for number in range(before.partitions):
            for each in await committed(bus, topic, number):
                writer.add(
                    SavedRecord(
                        partition=number, offset=each.offset, timestamp_ms=each.timestamp_ms,
                        key=each.key or b"", value=each.value,
                    )
                )  # fmt: skip
        writer.end()


async def test_an_earlier_versions_backup_of_a_growth_under_way_is_whole_or_refused(
    original: Original, tmp_path: Path
) -> None:
    refused = 0
    for point in range(1, 99):
        async with FaultyBus(_copy(original, tmp_path)) as bus:
            changes = await bus.killed(partial(grow, bus, CLUSTER, THREE), point)
            await _save_anyhow(bus, tmp_path / "b.gz")
        refusal = await _refusal(_is_whole(tmp_path, tmp_path / "b.gz", original))
        if refusal is not None:
            assert "was made while partitions were added" in refusal
            refused += 1
        if changes < point:
            assert refused > 5
            return
    raise AssertionError("it never came to its end")


# --- what was restored, and grows -----------------------------------------------------------------------------


async def _ends(bus: Bus) -> dict[str, list[tuple[int, int]]]:
    """The first and last offsets of all topics."""
    shapes = await bus.shapes([*topics(CLUSTER)])
    return {name: [await bus.offsets(name, n) for n in range(shape.partitions)] for name, shape in shapes.items()}


async def _refuses(bus: Bus, partitions: int, words: str) -> None:
    """Growth says why it cannot be done, by force or not, and changes nothing."""
    before = await _ends(bus)
    for force in (False, True):
        with pytest.raises(CannotGrowError, match=words):
            await grow(bus, CLUSTER, partitions, force=force)
    assert await _ends(bus) == before


def _scope(records: Records) -> str:
    return (
        "cluster"
        if any(key.startswith(b"@checkpoint/partition") for each in records.values() for key in each)
        else "host"
    )


async def _restore_all(original: Original, folder: Path) -> str:
    """Restore a backup of the original: the bus on which that was done."""
    url = _copy(original, folder)
    file = folder / "b.gz"
    async with connect(url) as bus:
        await save(bus, CLUSTER, file)
    await _restored(folder, file)
    return f"sqlite://{folder}/new.db?synchronous=NORMAL"


async def test_a_restored_ledger_that_is_not_adopted_by_all_does_not_grow_until_it_is(
    original: Original, tmp_path: Path
) -> None:
    async with connect(await _restore_all(original, tmp_path)) as bus:
        scope = _scope(await ledger(bus, CLUSTER))
        hosts = (STAYS, MOVES) if scope == "host" else (MOVES,)
        for number, host in enumerate(hosts):
            who = "1 manager has" if len(hosts) - number == 1 else f"{len(hosts) - number} managers have"
            words = f"{who} not adopted .*start each once with --adopt-ledger"
            await _refuses(bus, THREE, words)
            assert (await grow(bus, CLUSTER, ONE)).hosts == []
            async with _manager(bus, tmp_path, scope, host, ONE, adopt=True) as manager:
                await manager.ready()
                await manager.stop()
        await grow(bus, CLUSTER, THREE)
        assert _grants(await ledger(bus, CLUSTER)) == original.grants


async def test_the_restored_ledger_of_a_machine_that_is_gone_is_adopted_on_another_one_and_grows(
    original: Original, tmp_path: Path
) -> None:
    async with connect(await _restore_all(original, tmp_path)) as bus:
        scope = _scope(await ledger(bus, CLUSTER))
        for host in (STAYS, MOVES):
            identity = structs.replace(host_identity(CLUSTER, host), machine_id="another")
            limits = Limits(adopt=True, take_over=True)
            async with _manager(bus, tmp_path, scope, host, ONE, limits=limits, identity=identity) as manager:
                await manager.stop()
        await grow(bus, CLUSTER, THREE)
        assert _grants(await ledger(bus, CLUSTER)) == original.grants


async def test_a_restored_ledger_whose_topics_got_more_partitions_by_hand_grows_and_is_adopted_then(
    original: Original, tmp_path: Path
) -> None:
    """Nobody can adopt it before."""
    async with FaultyBus(await _restore_all(original, tmp_path)) as bus:
        scope = _scope(await ledger(bus, CLUSTER))
        await add_partitions(bus, CLUSTER, THREE)
        await bus.killed(partial(grow, bus, CLUSTER, THREE), 12)
        await grow(bus, CLUSTER, THREE)
        assert _grants(await ledger(bus, CLUSTER)) == original.grants
        async with _manager(bus, tmp_path, scope, MOVES, THREE, ready=False) as manager:
            refusal = await manager.ended_by(TopicsChangedError)
        assert "was restored from a backup" in refusal
        assert "--adopt-ledger" in refusal
        async with _manager(bus, tmp_path, scope, MOVES, THREE, adopt=True) as manager:
            assert (await manager.records())[f"{MOVES}/w1/1"]["state"] == "allocated"
            await manager.stop()


async def test_copies_that_an_earlier_versions_restore_brought_are_named_and_nothing_is_moved(
    original: Original, tmp_path: Path
) -> None:
    """An old copy is not taken for newer than what the host's new partition has."""
    async with FaultyBus(_copy(original, tmp_path)) as bus:

        async def copied() -> None:
            await grow(bus, CLUSTER, THREE, say=until_copied)

        def until_copied(line: str) -> None:
            if "copied to the new partition" in line:
                raise _CopiedError

        with pytest.raises(_CopiedError):
            await copied()
        topic = topics(CLUSTER).allocations
        for number, records in (await ledger(bus, CLUSTER)).items():  # it called each checkpoint complete
            for key, value in records.items():
                if key.startswith((b"@checkpoint/host", b"@checkpoint/partition")):
                    whole = json.loads(value) | {"partitions": THREE}
                    await bus.publish(topic, number, Entry(key, json.dumps(whole).encode()))
        for partitions in (THREE, THREE * 2):
            await _refuses(bus, partitions, f"has records of {MOVES} in partition 0 .*End all workers of these hosts")
        assert not await _save_or_refuse(bus, tmp_path / "b.gz")


class _CopiedError(Exception):
    """Growth has copied the records of a partition, and deleted none."""


async def test_a_backup_of_a_ledger_that_was_restored_and_not_adopted_keeps_what_is_known_of_missing_grants(
    original: Original, tmp_path: Path
) -> None:
    async with connect(await _restore_all(original, tmp_path)) as bus:
        ids = {key: json.loads(value)["ledger_id"] for key, value in _checkpoints(await ledger(bus, CLUSTER)).items()}
        await save(bus, CLUSTER, tmp_path / "later.gz")
    later = _with_header(tmp_path / "later.gz", tmp_path / "much-later.gz", timedelta(days=2))
    async with connect(f"sqlite://{tmp_path}/third.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=ONE)
        done: Restoration = await restore_backup(bus, CLUSTER, later, history=True)
        again = _checkpoints(await ledger(bus, CLUSTER))
    assert {key: json.loads(value)["ledger_id"] for key, value in again.items()} == ids
    assert {f"backup/{done.at:%Y-%m-%dT%H:%M:%SZ}"} == set(ids.values())


def _checkpoints(records: Records) -> dict[bytes, bytes]:
    found = {key: value for each in records.values() for key, value in each.items()}
    return {key: value for key, value in found.items() if key.startswith(b"@checkpoint/")}


def _with_header(file: Path, new: Path, later: timedelta) -> Path:
    """The same file, as if it had been made later."""
    with (
        archive.reading(file) as (header, records),
        archive.writing(new, structs.replace(header, at=header.at + later)) as writer,
    ):
        for record in records:
            writer.add(record)
        writer.end()
    return new
