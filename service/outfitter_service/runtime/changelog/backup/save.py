"""Copies the committed ledger into a file, while managers serve."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from outfitter_proto import __version__
from outfitter_proto.bus import Bus, Message, TopicInfo
from outfitter_proto.bus.reading import read_to
from outfitter_proto.names import topics
from outfitter_service.runtime.changelog.backup.archive import BackupError, Header, SavedRecord, writing
from outfitter_service.runtime.changelog.growth.places import Places
from outfitter_service.runtime.changelog.shape import HALF_RESTORED, growing


class Saved(Struct, frozen=True, kw_only=True):
    """What was saved: the moment, how many partitions and records, and their checksum."""

    at: datetime
    partitions: int
    records: int
    sha256: str


async def save(bus: Bus, cluster: str, path: Path) -> Saved:
    """Copy all records of the ledger that are committed now. Each partition ends between two commits, and each host is
    in one partition, so no host's record is of another moment than its neighbours.

    It first looks whether all records are where they belong. While they are, and while the number of partitions stays,
    nobody moves any.

    Raises:
        BackupError: the file exists, or the ledger cannot be copied whole: its records are being moved, for example.
        UnknownTopicError: there is no ledger.
        BusError: the bus failed.
        OSError: the file cannot be written.
    """
    names = topics(cluster)
    topic = names.allocations
    before = await bus.topic(topic)
    counts = {before.partitions, *(shape.partitions for shape in (await bus.shapes([*names])).values())}
    if len(counts) > 1:
        raise BackupError(f"{_LACKING}: the topics have different numbers of partitions. {growing(max(counts))}")
    places = Places(before.partitions)
    for partition in range(before.partitions):
        await _read(bus, topic, partition, places.see)
    await _check(bus, before, places)
    header = Header(
        at=datetime.now(UTC), cluster=cluster, partitions=before.partitions, ledger_id=before.id, outfitter=__version__
    )
    places = Places(before.partitions)
    with writing(path, header) as archive:

        def take(partition: int, message: Message) -> None:
            places.see(partition, message)
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

        for partition in range(before.partitions):
            await _read(bus, topic, partition, take)
        await _check(bus, before, places)
        end = archive.end()
    return Saved(at=header.at, partitions=header.partitions, records=end.records, sha256=end.sha256)


_LACKING = "nothing was saved, because grants would be missing"


async def _check(bus: Bus, before: TopicInfo, places: Places) -> None:
    """Refuse a ledger whose records are not all in their partition, or whose topic is not as it was `before`."""
    now = await bus.topic(before.name)
    if (now.id, now.partitions) != (before.id, before.partitions):
        raise BackupError(f"topic {before.name} was recreated or has grown meanwhile: start again")
    problem = places.problem()
    if problem is not None:
        remedy = HALF_RESTORED if places.half_restored else f"{growing(before.partitions)}, and make the backup"
        raise BackupError(f"{_LACKING}: {problem}. {remedy}")


async def _read(bus: Bus, topic: str, partition: int, take: Callable[[int, Message], None]) -> None:
    """Have all that is committed in a partition now taken, one by one."""
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                if message.offset < end:
                    take(partition, message)
