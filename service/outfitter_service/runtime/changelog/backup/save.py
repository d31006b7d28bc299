"""Copies the committed ledger, and the registrations that are not answered yet, into a file while managers serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from outfitter_proto import __version__
from outfitter_proto.bus import Bus, Message
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_registration
from outfitter_proto.names import InvalidNameError, check_name, topics
from outfitter_proto.records import Heartbeat
from outfitter_service.runtime.changelog.backup.answered import Answered
from outfitter_service.runtime.changelog.backup.archive import (
    BackupError,
    Header,
    SavedRecord,
    SavedRegistration,
    writing,
)
from outfitter_service.runtime.changelog.places import Places


class Saved(Struct, frozen=True, kw_only=True):
    """What was saved: the moment, how many partitions, records and registrations, and their checksum."""

    at: datetime
    partitions: int
    records: int
    registrations: int
    sha256: str


async def save(bus: Bus, cluster: str, path: Path) -> Saved:
    """Copy all records of the ledger that are committed now, and the registrations behind its positions. Each partition
    ends between two commits, and each host is in one partition, so no host's record is of another moment than its
    neighbours.

    Raises:
        BackupError: the file exists, or the ledger cannot be copied whole: it is being restored, for example.
        UnknownTopicError: there is no ledger.
        BusError: the bus failed.
        OSError: the file cannot be written.
    """
    names = topics(cluster)
    ledger = await bus.topic(names.allocations)
    before = await bus.layouts([names.allocations, names.registrations])
    header = Header(
        at=datetime.now(UTC), cluster=cluster, partitions=ledger.partitions, ledger_id=ledger.id, outfitter=__version__
    )
    places, registrations = Places(ledger.partitions), 0
    with writing(path, header) as archive:
        for partition in range(ledger.partitions):
            async for message in _committed(bus, names.allocations, partition):
                places.see(partition, message)
                if message.key is not None:  # nobody reads a record without one
                    archive.add(_saved(SavedRecord, message))
        if (problem := places.problem()) is not None:
            raise BackupError(f"nothing was saved, because grants would be missing: {problem}")
        if (damaged := places.damaged()) is not None:
            raise BackupError(f"nothing was saved, because nobody could restore it: {damaged}")
        if (inputs := before.get(names.registrations)) is not None:
            answered = Answered(places.readable_checkpoints(), inputs.id)
            for partition in range(inputs.partitions):
                async for message in unanswered(bus, names.registrations, partition, answered):
                    archive.add(_saved(SavedRegistration, message))
                    registrations += 1
        if await bus.layouts([*before]) != before:
            raise BackupError("a topic was recreated or has more partitions meanwhile: start again")
        end = archive.end()
    return Saved(
        at=header.at,
        partitions=header.partitions,
        records=end.records - registrations,
        registrations=registrations,
        sha256=end.sha256,
    )


def _saved(kind: type[SavedRecord], message: Message) -> SavedRecord:
    return kind(
        partition=message.partition,
        offset=message.offset,
        timestamp_ms=message.timestamp_ms,
        key=message.key or b"",
        value=message.value,
    )


async def _committed(bus: Bus, topic: str, partition: int) -> AsyncIterator[Message]:
    """All that is committed in a partition now."""
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                if message.unreadable is not None:
                    raise BackupError(f"{topic}/{partition} cannot be read at {message.offset}: {message.unreadable}")
                if message.offset < end:
                    yield message


async def unanswered(bus: Bus, topic: str, partition: int, answered: Answered) -> AsyncIterator[Message]:
    """The messages of a partition, until now, that need an answer and have none. Heartbeats need none."""
    first, end = await bus.offsets(topic, partition)
    start = max(first, answered.start(partition))
    async with await bus.open_reader(topic, partition, start=start, committed=False) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                host = host_of_registration(message.key)
                if host is None or not answered.until(host, partition) <= message.offset < end:
                    continue
                try:
                    if isinstance(decode_registration(message.value, key=message.key), Heartbeat):
                        continue
                except WireError:
                    pass  # it becomes a dead letter
                yield message


def host_of_registration(key: bytes | None) -> str | None:
    """The host that a message's key names, or None."""
    try:
        return check_name((key or b"").decode(), "host")
    except (UnicodeDecodeError, InvalidNameError):
        return None
