"""What `outfitter restore` keeps of a file before it writes anything."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Entry, connect
from outfitter_proto.keys import checkpoint_key
from outfitter_proto.names import topics
from outfitter_service.runtime.changelog.backup import archive, restoration
from outfitter_service.runtime.changelog.backup.archive import BackupError, Header, SavedRecord
from outfitter_service.runtime.changelog.backup.save import save

CLUSTER = "outfitter"
MOST = 100_000


def written(file: Path, values: dict[str, bytes], *, times: int = 1) -> Path:
    """A file with these checkpoints by their writers, each so many times."""
    at = datetime.now(UTC)
    header = Header(at=at, cluster=CLUSTER, partitions=1, ledger_id="x", outfitter="0")
    with archive.writing(file, header) as writer:
        for offset in range(times):
            for name, value in values.items():
                key = checkpoint_key(name).encode()
                writer.add(SavedRecord(partition=0, offset=offset, timestamp_ms=0, key=key, value=value))
        writer.end()
    return file


@pytest.mark.parametrize(
    "values", [{"host/a": b"x" * 2 * MOST}, {f"host/{number}": b"x" * 900 for number in range(200)}]
)
async def test_checkpoints_that_are_too_large_together_are_refused_and_nothing_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, bytes]
) -> None:
    monkeypatch.setattr(restoration, "MOST_OF_CHECKPOINTS", MOST)
    file = written(tmp_path / "backup", values)
    async with connect(f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=1)
        with pytest.raises(BackupError, match="is damaged: its checkpoints have more than"):
            await restoration.restore_backup(bus, CLUSTER, file, history=True)
        assert await bus.offsets(topics(CLUSTER).allocations, 0) == (0, 0)


async def test_only_the_last_checkpoint_of_a_writer_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoration, "MOST_OF_CHECKPOINTS", MOST)
    file = written(tmp_path / "backup", {"host/a": b"x" * 900}, times=1000)
    async with connect(f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL") as bus:
        with pytest.raises(BackupError, match="has a damaged checkpoint"):
            await restoration.restore_backup(bus, CLUSTER, file, history=True)


async def test_a_ledger_with_a_damaged_checkpoint_is_not_saved_and_a_sweepers_is_left_out(tmp_path: Path) -> None:
    ledger = topics(CLUSTER).allocations
    async with connect(f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=1)
        await bus.publish(ledger, 0, Entry(b"@checkpoint/sweeper/0", b"{"))
        await save(bus, CLUSTER, tmp_path / "whole")
        await bus.publish(ledger, 0, Entry(b"@checkpoint/host/a", b"{"))
        with pytest.raises(BackupError, match=r"nothing was saved, .* @checkpoint/host/a in partition 0"):
            await save(bus, CLUSTER, tmp_path / "lacking")
        assert not (tmp_path / "lacking").exists()
    async with connect(f"sqlite://{tmp_path}/bus/new.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=1)
        await restoration.restore_backup(bus, CLUSTER, tmp_path / "whole", history=True)
        assert await bus.offsets(ledger, 0) == (0, 0)


async def test_the_ledgers_records_are_not_kept_while_the_registrations_are_put(tmp_path: Path) -> None:
    """The archive promises that one line at a time is in memory."""
    size, count = 1_000, 20_000
    header = Header(at=datetime.now(UTC), cluster=CLUSTER, partitions=1, ledger_id="x", outfitter="0")
    with archive.writing(tmp_path / "backup", header) as writer:
        for offset in range(count):
            key, value = f"h/w/{offset}".encode(), f"{offset:0{size}}".encode()
            writer.add(SavedRecord(partition=0, offset=offset, timestamp_ms=0, key=key, value=value))
        writer.end()
    contents = restoration._Contents(header=header)
    async with connect(f"sqlite://{tmp_path}/bus/bus.db?synchronous=NORMAL") as bus:
        await wanted.create(bus, CLUSTER, partitions=1)
        restoring = restoration._Restoring(bus, CLUSTER, tmp_path / "backup", contents, history=True)
        tracemalloc.start()
        try:
            assert await restoring.put_registrations() == 0
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < size * count / 4
