"""Writes a backup into new topics, so that nobody takes it for the ledger of now.

A manager must not continue an old ledger by itself: what was granted since would be lent again. So every checkpoint is
written with two changes:

- `ledger_id` names the backup. No topic has that id, so managers start only with `--adopt-ledger`, whatever version
  they are.
- `commit` and `token` are `SKIPPED` higher. So no fencing token, and no number in history, comes a second time.

While it is under way, all checkpoints say that their records are being moved. No manager starts then, adopted or not.
Each checkpoint is written as its writer, which fences a manager that still runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from msgspec import UNSET, Struct, structs

from outfitter_proto.bus import Bus, Entry, UnknownTopicError, Writer
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger, encode
from outfitter_proto.keys import CHECKPOINT, is_sweeper, sweeper_writer
from outfitter_proto.names import topics, transactional_id
from outfitter_proto.records import Checkpoint, CommitNumber, Token
from outfitter_service.runtime.changelog.backup.archive import BackupError, Header, SavedRecord, reading
from outfitter_service.runtime.changelog.growth.places import Places
from outfitter_service.runtime.changelog.ledger_format import refusal
from outfitter_service.runtime.changelog.shape import MOVING, backup_id, is_restored, restored_of

SKIPPED = 2**32
"""How many commits and tokens of each writer are left out: more than a writer can have used since the backup. At 1,000
a second they last for 49 days."""
FILL = 0.8
"""A commit fills this part of the largest possible ledger batch."""
MOST_OF_CHECKPOINTS = 64 * 1024 * 1024
"""Most bytes of all writers' last checkpoints. One has less than a kibibyte, and a writer has one."""
ENTRY_BYTES = 32
"""More than a record takes in a batch besides its key and value."""


class Restoration(Struct, frozen=True, kw_only=True):
    """What was restored: how many partitions, records and checkpoints. `at`: later grants are missing. That is the
    backup's moment, or that of an earlier backup that a manager had not adopted yet."""

    at: datetime
    partitions: int
    records: int
    writers: int


class _Contents(Struct, kw_only=True):
    """A file that was read whole. `checkpoints`: the last ones of managers, by partition and key. `records`: how many
    others each partition has."""

    header: Header
    checkpoints: dict[int, dict[bytes, Checkpoint]]
    records: dict[int, int]

    def restored(self) -> list[datetime]:
        """The moments of earlier backups that managers had not adopted yet."""
        moments = [restored_of(each) for checkpoints in self.checkpoints.values() for each in checkpoints.values()]
        return [each for each in moments if each is not None]


async def restore_backup(bus: Bus, cluster: str, path: Path, *, history: bool) -> Restoration:
    """Write a backup's records into the cluster's ledger, which must be empty.

    Raises:
        BackupError: the file is damaged, of a later version or of another cluster; or the topics do not fit, hold
            something, or are written to by somebody else. Nothing was restored, or no manager can start.
        UnknownTopicError: a topic does not exist.
        BusError: the bus failed.
        OSError: the file cannot be read.
    """
    contents = _read_whole(path)
    header = contents.header
    restoring = _Restoring(bus, cluster, contents, history=history)
    await restoring.check_topics(path)
    for partition in range(header.partitions):
        await restoring.check_empty(partition)
    await restoring.put_checkpoints({0: MOVING})
    await restoring.put_records(path)
    for partition in range(header.partitions):
        await restoring.check_alone(partition)
    await restoring.put_checkpoints({1: MOVING, 2: header.partitions})
    return Restoration(
        at=min([header.at, *contents.restored()]),
        partitions=header.partitions,
        records=sum(contents.records.values()),
        writers=sum(map(len, contents.checkpoints.values())),
    )


def _read_whole(path: Path) -> _Contents:
    """Read a file up to its end, before anything is written.

    Raises:
        BackupError: it is damaged, or a later version wrote it.
    """
    last: dict[tuple[int, bytes], bytes] = {}
    held = 0
    with reading(path) as (header, lines):
        contents = _Contents(header=header, checkpoints={}, records={})
        places = Places(header.partitions)
        for line in lines:
            if not 0 <= line.partition < header.partitions:
                raise BackupError(f"{path} is damaged: it has no partition {line.partition}")
            places.see(line.partition, line)
            if not line.key.startswith(CHECKPOINT):
                contents.records[line.partition] = contents.records.get(line.partition, 0) + 1
            else:
                if (earlier := last.pop((line.partition, line.key), None)) is not None:
                    held -= len(line.key) + len(earlier)
                if line.value is not None:
                    last[line.partition, line.key] = line.value
                    held += len(line.key) + len(line.value)
                if held > MOST_OF_CHECKPOINTS:
                    raise BackupError(
                        f"{path} is damaged: its checkpoints have more than {MOST_OF_CHECKPOINTS // 2**20} MiB together"
                    )
    if (problem := places.problem()) is not None:
        raise BackupError(
            f"{path} was made while partitions were added or a backup was restored, so that grants are missing from "
            f"it: {problem}. Use another backup"
        )
    for (partition, key), value in last.items():
        checkpoint = _checkpoint(path, key, value)
        if not is_sweeper(checkpoint.writer):  # it begins anew with another ledger
            contents.checkpoints.setdefault(partition, {})[key] = checkpoint
    return contents


def _checkpoint(path: Path, key: bytes, value: bytes) -> Checkpoint:
    try:
        record = decode_ledger(value, key=key)
    except WireError as error:
        raise BackupError(f"{path} has a damaged checkpoint: {error}. Use an older backup") from error
    if not isinstance(record, Checkpoint):
        raise BackupError(f"{path} has {key!r} of a later version of Outfitter: run that version, or a newer one")
    if (reason := refusal(record)) is not None:
        raise BackupError(f"{path} is of a later version of Outfitter: {reason}")
    return record


class _Restoring:
    """One restoration under way. It counts what it has written."""

    def __init__(self, bus: Bus, cluster: str, contents: _Contents, *, history: bool) -> None:
        """`history`: whether the cluster has that topic."""
        self._bus = bus
        self._cluster = cluster
        self._contents = contents
        self._topics = topics(cluster)
        self._names = [name for name in self._topics if history or name != self._topics.history]
        self._written = self._topics.written(history=history)
        self._instance = f"restore-{secrets.token_hex(4)}"
        self._counts: dict[int, int] = {}

    async def check_topics(self, path: Path) -> None:
        header = self._contents.header
        if header.cluster != self._cluster:
            raise BackupError(f"{path} is of cluster {header.cluster!r}: restore it with --cluster {header.cluster}")
        shapes = await self._bus.shapes(self._names)
        make = f"outfitter topics create --partitions {header.partitions}"
        for name in self._names:
            if name not in shapes:
                with suppress(UnknownTopicError):
                    await self._bus.topic(name)  # says so if it is only hidden from this principal
                raise UnknownTopicError(f"{self._bus.url}: there is no topic {name!r}; make it with `{make}`")
        wrong = {name: shape.partitions for name, shape in shapes.items() if shape.partitions != header.partitions}
        if wrong:
            shown = ", ".join(f"{name}: {count}" for name, count in wrong.items())
            raise BackupError(
                f"{path} has {header.partitions} partitions, and a host's records must stay in theirs. Others have "
                f"another number ({shown}): delete all of them, and run `{make}`"
            )

    async def check_empty(self, partition: int) -> None:
        if await self._count(partition):
            raise BackupError(
                f"{self._topics.allocations}/{partition} holds records, and nothing was restored: a backup goes into a "
                "new ledger only. Stop all managers, delete this topic and create it again"
            )

    async def check_alone(self, partition: int) -> None:
        if await self._count(partition) > self._counts.get(partition, 0):  # fewer: compaction has begun
            raise BackupError(
                f"somebody else has written to {self._topics.allocations}/{partition} meanwhile: a manager runs. Stop "
                "all managers, delete this topic, create it again, and restore again"
            )

    async def _count(self, partition: int) -> int:
        """How many records are committed in a partition of the ledger."""
        topic = self._topics.allocations
        count = 0
        end = await self._bus.stable_end(topic, partition)
        async with await self._bus.open_reader(topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                count += len(messages)
        return count

    async def put_checkpoints(self, states: Mapping[int, int]) -> None:
        """Commit each manager's checkpoint as its writer. `states`: the commits, by their number from the first one on,
        and the number of partitions in each."""
        for partition, checkpoints in self._contents.checkpoints.items():
            for checkpoint in checkpoints.values():
                entries = [self._entry(checkpoint, number, state) for number, state in states.items()]
                async with await self._open(partition, checkpoint.writer) as writer:
                    await self._commit(writer, partition, entries)

    def _entry(self, checkpoint: Checkpoint, number: int, partitions: int) -> Entry:
        at = self._contents.header.at
        record = structs.replace(
            checkpoint,
            instance=self._instance,
            commit=CommitNumber(checkpoint.commit + SKIPPED + number),
            token=Token(checkpoint.token + SKIPPED),
            input=structs.replace(checkpoint.input, from_=checkpoint.input.to),
            at=datetime.now(UTC),
            partitions=partitions,
            ledger_id=checkpoint.ledger_id if is_restored(checkpoint) else backup_id(at),
            ledger_start=UNSET,
            beat_s=UNSET,
            snapshot=UNSET,  # the first commit begins one: history does not lead to this state
        )
        return Entry(record.key.encode(), encode(record))

    async def put_records(self, path: Path) -> None:
        """Commit all records but checkpoints, in their order."""
        with reading(path) as (_, lines):
            records = (line for line in lines if not line.key.startswith(CHECKPOINT))
            for partition, of_partition in groupby(records, key=lambda record: record.partition):
                async with await self._open(partition, sweeper_writer(partition)) as writer:
                    for batch in _batches(of_partition, int(writer.max_batch_bytes * FILL)):
                        await self._commit(writer, partition, batch)

    async def _open(self, partition: int, writer: str) -> Writer:
        identity = transactional_id(self._cluster, writer)
        return await self._bus.open_writer(identity, partition, topics=self._written)

    async def _commit(self, writer: Writer, partition: int, entries: list[Entry]) -> None:
        await writer.commit([(self._topics.allocations, entries)])
        self._counts[partition] = self._counts.get(partition, 0) + len(entries)


def _batches(records: Iterable[SavedRecord], most: int) -> Iterator[list[Entry]]:
    """The entries of these records, in batches of at most `most` bytes, or one record."""
    batch: list[Entry] = []
    size = 0
    for record in records:
        more = len(record.key) + len(record.value or b"") + ENTRY_BYTES
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(Entry(record.key, record.value))
        size += more
    if batch:
        yield batch
