"""Copies the committed ledger into a file, while managers serve."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from outfitter_proto import __version__
from outfitter_proto.bus import Bus
from outfitter_proto.bus.reading import read_to
from outfitter_proto.names import topics
from outfitter_service.runtime.changelog.backup.archive import ArchiveWriter, BackupError, Header, SavedRecord, writing


class Saved(Struct, frozen=True, kw_only=True):
    """What was saved: the moment, how many partitions and records, and their checksum."""

    at: datetime
    partitions: int
    records: int
    sha256: str


async def save(bus: Bus, cluster: str, path: Path) -> Saved:
    """Copy all records of the ledger that are committed now. Each partition ends between two commits, and each host is
    in one partition, so no host's record is of another moment than its neighbours.

    Raises:
        BackupError: the file exists, or the ledger cannot be copied whole.
        UnknownTopicError: there is no ledger.
        BusError: the bus failed.
        OSError: the file cannot be written.
    """
    topic = topics(cluster).allocations
    before = await bus.topic(topic)
    header = Header(
        at=datetime.now(UTC), cluster=cluster, partitions=before.partitions, ledger_id=before.id, outfitter=__version__
    )
    with writing(path, header) as archive:
        for partition in range(before.partitions):
            await _copy(bus, topic, partition, archive)
        now = await bus.topic(topic)
        if (now.id, now.partitions) != (before.id, before.partitions):
            raise BackupError(f"topic {topic} was recreated or has grown meanwhile: start again")
        end = archive.end()
    return Saved(at=header.at, partitions=header.partitions, records=end.records, sha256=end.sha256)


async def _copy(bus: Bus, topic: str, partition: int, archive: ArchiveWriter) -> None:
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                if message.offset >= end:
                    break
                if message.unreadable is not None:
                    raise BackupError(f"{topic}/{partition} cannot be read at {message.offset}: {message.unreadable}")
                if message.key is not None:  # nobody reads a record without one
                    archive.add(
                        SavedRecord(
                            partition=partition,
                            offset=message.offset,
                            timestamp_ms=message.timestamp_ms,
                            key=message.key,
                            value=message.value,
                        )
                    )
