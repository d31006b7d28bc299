"""Writes a backup into new topics, so that nobody takes it for the ledger of now.

The topics may have another number of partitions, and another cluster's name. Each record goes to the partition of its
host, and so does each registration that nobody had answered.

A manager must not continue an old ledger by itself: what was granted since would be lent again. So every checkpoint is
written with two changes:

- `ledger_id` names the backup. No topic has that id, so managers start only with `--adopt-ledger`, whatever version
  they are.
- `commit` and `token` go on behind all that were used: see `numbers`. So no fencing token, and no number in history,
  comes a second time, even if one backup is restored twice.

While it is under way, all checkpoints say that the ledger is incomplete. No manager starts then, adopted or not. Each
checkpoint is written as its writer, which fences a manager that still runs.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import UNSET, Struct, structs

from outfitter_proto.bus import Bus, Entry, UnknownTopicError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_registration, encode
from outfitter_proto.keys import CHECKPOINT, host_of, is_sweeper, sweeper_writer
from outfitter_proto.names import topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NO_TOKEN, Checkpoint, CommitNumber, Deregister, Register, Token
from outfitter_service.runtime.changelog.backup.answered import Answered
from outfitter_service.runtime.changelog.backup.archive import (
    BackupError,
    Header,
    SavedRecord,
    SavedRegistration,
    reading,
)
from outfitter_service.runtime.changelog.backup.placing import placed
from outfitter_service.runtime.changelog.backup.save import host_of_registration, unanswered
from outfitter_service.runtime.changelog.ledger_format import refusal
from outfitter_service.runtime.changelog.numbers import beyond
from outfitter_service.runtime.changelog.places import Places
from outfitter_service.runtime.changelog.topic_layout import INCOMPLETE, backup_id, is_restored, restored_of

MOST_BYTES = 700_000
"""Most bytes of one commit of several records. The ledger takes a mebibyte."""
MOST_OF_CHECKPOINTS = 64 * 1024 * 1024
"""Most bytes of all writers' last checkpoints. One has less than a kibibyte, and a writer has one."""
ENTRY_BYTES = 32
"""More than a record takes in a batch besides its key and value."""
MOST_BUFFERED = 64 * 1024 * 1024
"""Most bytes of records that wait for the commit of their partition."""


class Restoration(Struct, frozen=True, kw_only=True):
    """What was restored: how many partitions, records, checkpoints and registrations. `at`: later grants are missing.
    That is the backup's moment, or that of an earlier backup that a manager had not adopted yet. `later`: how many
    messages the backup's own cluster has got since, which nobody will answer."""

    at: datetime
    partitions: int
    records: int
    writers: int
    registrations: int
    later: int = 0


class _Contents(Struct, kw_only=True):
    """A file that was read whole. `records`, `registrations`: how many others it has."""

    header: Header
    checkpoints: list[Checkpoint] = []
    """The last ones, of all writers."""
    records: int = 0
    registrations: int = 0
    asking: set[str] = set()
    """The hosts with registrations."""

    @property
    def managers(self) -> list[Checkpoint]:
        """The managers' checkpoints."""
        return [each for each in self.checkpoints if not is_sweeper(each.writer)]

    @property
    def restored(self) -> list[datetime]:
        """The moments of earlier backups that managers had not adopted yet."""
        moments = [restored_of(each) for each in self.managers]
        return [each for each in moments if each is not None]


async def restore_backup(
    bus: Bus, cluster: str, path: Path, *, history: bool, origin: str | None = None
) -> Restoration:
    """Write a backup into the topics of a cluster, whose ledger must be empty. `origin`: the cluster of the backup;
    None: the same.

    Raises:
        BackupError: the file is damaged, of a later version or of another cluster; or the topics hold something, or
            are written to by somebody else. Nothing was restored, or no manager can start.
        UnknownTopicError: a topic does not exist.
        BusError: the bus failed.
        OSError: the file cannot be read.
    """
    contents = _read_whole(path)
    restoring = _Restoring(bus, cluster, path, contents, history=history)
    await restoring.check_topics(origin or cluster)
    await restoring.check_empty()
    await restoring.put_checkpoints(INCOMPLETE)
    await restoring.put_records()
    registrations = await restoring.put_registrations()
    await restoring.check_alone()
    await restoring.put_checkpoints(INCOMPLETE, restoring.partitions)
    return Restoration(
        at=min([contents.header.at, *contents.restored]),
        partitions=restoring.partitions,
        records=contents.records,
        writers=len(contents.managers),
        registrations=registrations,
        later=await _later(bus, origin, contents) if origin is not None and origin != cluster else 0,
    )


def _read_whole(path: Path) -> _Contents:
    """Read a file up to its end, before anything is written.

    Raises:
        BackupError: it is damaged, or a later version wrote it.
    """
    with reading(path) as (header, lines):
        contents = _Contents(header=header)
        places = Places(header.partitions)
        for line in lines:
            if isinstance(line, SavedRegistration):
                contents.registrations += 1
                if (host := host_of_registration(line.key)) is not None:
                    contents.asking.add(host)
                continue
            if not 0 <= line.partition < header.partitions:
                raise BackupError(f"{path} is damaged: it has no partition {line.partition}")
            places.see(line.partition, line)
            contents.records += not line.key.startswith(CHECKPOINT)
            if places.checkpoint_bytes > MOST_OF_CHECKPOINTS:
                raise BackupError(
                    f"{path} is damaged: its checkpoints have more than {MOST_OF_CHECKPOINTS // 2**20} MiB together"
                )
    if (damaged := places.damaged()) is not None:
        raise BackupError(f"{path} has a damaged checkpoint: {damaged}. Use an older backup")
    contents.checkpoints += [_known(path, checkpoint) for checkpoint in places.readable_checkpoints()]
    problem = places.problem() or _mixed(contents)
    if problem is not None:
        raise BackupError(
            f"{path} was made while partitions were added or a backup was restored, so that grants are missing from "
            f"it: {problem}. Use another backup"
        )
    return contents


async def _later(bus: Bus, origin: str, contents: _Contents) -> int:
    """How many messages came to the backup's own cluster after it, if the topics of that one are on this bus."""
    topic = topics(origin).registrations
    layout = (await bus.layouts([topic])).get(topic)
    if layout is None or contents.header.version == 1:
        return 0
    answered, found = Answered(contents.checkpoints, layout.id), 0
    for partition in range(layout.partitions):
        async for _ in unanswered(bus, topic, partition, answered):
            found += 1
    return max(0, found - contents.registrations)


def _mixed(contents: _Contents) -> str | None:
    """Why a file of version 0.2 may lack records that were moved while it was made, or None. Later versions make no
    such file, and move no records."""
    partitions = contents.header.partitions
    if contents.header.version > 1:
        return None
    for each in contents.managers:
        if each.partitions not in (UNSET, partitions):
            return f"{each.key} says that its records are among {each.partitions} partitions"
    return None


def _known(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    if (reason := refusal(checkpoint)) is not None:
        raise BackupError(f"{path} is of a later version of Outfitter: {reason}")
    return checkpoint


class _Restoring:
    """One restoration under way. It counts what it has written. `partitions`: the topics' number."""

    def __init__(self, bus: Bus, cluster: str, path: Path, contents: _Contents, *, history: bool) -> None:
        """`history`: whether the cluster has that topic."""
        self._bus = bus
        self._cluster = cluster
        self._path = path
        self._contents = contents
        self._topics = topics(cluster)
        self._names = [name for name in self._topics if history or name != self._topics.history]
        self._written = self._topics.written(history=history)
        self._instance = f"restore-{secrets.token_hex(4)}"
        self._counts: dict[int, int] = {}
        self._input_id = ""
        self._checkpoints: dict[int, list[Checkpoint]] = {}
        self._commits = 0
        self._begun = datetime.now(UTC)
        self.partitions = 0

    async def check_topics(self, origin: str) -> None:
        """Look at the topics, and find the place of each checkpoint. `origin`: the backup's cluster, as it was said."""
        header = self._contents.header
        if header.cluster != origin:
            raise BackupError(
                f"{self._path} is of cluster {header.cluster!r}: restore it with --cluster {header.cluster}, or into "
                f"the topics of another cluster with --from {header.cluster}"
            )
        layouts = await self._bus.layouts(self._names)
        make = f"outfitter topics create --cluster {self._cluster} --partitions {header.partitions}"
        for name in self._names:
            if name not in layouts:
                with suppress(UnknownTopicError):
                    await self._bus.topic(name)  # says so if it is only hidden from this principal
                raise UnknownTopicError(
                    f"{self._bus.url}: there is no topic {name!r}; make it with `{make}`, or with another number"
                )
        counts = {name: layout.partitions for name, layout in layouts.items()}
        self.partitions = counts[self._topics.allocations]
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise BackupError(f"the topics have different numbers of partitions ({shown}), and all need the same")
        self._input_id = layouts[self._topics.registrations].id
        firsts = [(await self._bus.offsets(self._topics.registrations, each))[0] for each in range(self.partitions)]
        self._checkpoints = placed(self._contents.checkpoints, firsts, self._input_id)

    async def check_empty(self) -> None:
        for partition in range(self.partitions):
            if await self._count(partition):
                raise BackupError(
                    f"{self._topics.allocations}/{partition} holds records, and nothing was restored: a backup goes "
                    "into a new ledger only. Stop all managers, delete this topic and create it again"
                )

    async def check_alone(self) -> None:
        for partition in range(self.partitions):
            if await self._count(partition) > self._counts.get(partition, 0):  # fewer: compaction has begun
                raise BackupError(
                    f"somebody else has written to {self._topics.allocations}/{partition} meanwhile: a manager runs. "
                    "Stop all managers, delete this topic, create it again, and restore again"
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

    async def put_checkpoints(self, *partitions: int) -> None:
        """Commit each checkpoint as its writer, once with each of these numbers of partitions."""
        for partition, checkpoints in self._checkpoints.items():
            for checkpoint in checkpoints:
                entries = [
                    self._entry(checkpoint, self._commits + number, count) for number, count in enumerate(partitions)
                ]
                await self._commit(partition, checkpoint.writer, entries)
        self._commits += len(partitions)

    def _entry(self, checkpoint: Checkpoint, number: int, partitions: int) -> Entry:
        """`number`: how many commits of this writer were restored before."""
        sweeps = is_sweeper(checkpoint.writer)  # it has no tokens, and adopts nothing
        unadopted = checkpoint.ledger_id if is_restored(checkpoint) else backup_id(self._contents.header.at)
        record = structs.replace(
            checkpoint,
            instance=self._instance,
            cluster=self._cluster,
            commit=CommitNumber(beyond(checkpoint.commit, self._begun) + number),
            token=NO_TOKEN if sweeps else Token(beyond(checkpoint.token, self._begun)),
            input=structs.replace(checkpoint.input, from_=checkpoint.input.to),
            at=datetime.now(UTC),
            partitions=partitions,
            ledger_id=UNSET if sweeps else unadopted,
            ledger_start=UNSET,
            grown=UNSET,
            beat_s=UNSET,
            snapshot=UNSET,  # the first commit begins one: history does not lead to this state
        )
        return Entry(record.key.encode(), encode(record))

    async def put_records(self) -> None:
        """Commit all records but checkpoints to their hosts' partitions. Those of a host stay in their order."""
        waiting: dict[int, list[Entry]] = {}
        sizes: dict[int, int] = {}
        with reading(self._path) as (_, lines):
            for line in lines:
                if isinstance(line, SavedRegistration) or line.key.startswith(CHECKPOINT):
                    continue
                host = host_of(line.key)
                partition = partition_of(host, self.partitions) if host is not None else 0
                size = len(line.key) + len(line.value or b"") + ENTRY_BYTES
                if sizes.get(partition, 0) + size > MOST_BYTES or sum(sizes.values()) > MOST_BUFFERED:
                    await self._put(waiting, sizes)
                waiting.setdefault(partition, []).append(Entry(line.key, line.value))
                sizes[partition] = sizes.get(partition, 0) + size
        await self._put(waiting, sizes)

    async def _put(self, waiting: dict[int, list[Entry]], sizes: dict[int, int]) -> None:
        for partition, entries in waiting.items():
            await self._commit(partition, sweeper_writer(partition), entries)
        waiting.clear()
        sizes.clear()

    async def _commit(self, partition: int, writer: str, entries: list[Entry]) -> None:
        identity = transactional_id(self._cluster, writer)
        async with await self._bus.open_writer(identity, partition, topics=self._written) as opened:
            await opened.commit([(self._topics.allocations, entries)])
        self._counts[partition] = self._counts.get(partition, 0) + len(entries)

    async def put_registrations(self) -> int:
        """Publish the registrations that the topic does not hold where their hosts belong now. Returns their number."""
        published = 0
        in_topic = await self._in_topic()
        left = in_topic.copy()
        with reading(self._path) as (_, lines):
            for line in lines:
                if isinstance(line, SavedRegistration) and (line.key, line.value) in left:
                    left[line.key, line.value] -= 1
        newer, ended = _newest(+left), _ended(+left)
        with reading(self._path) as (_, lines):
            for line in lines:
                host = host_of_registration(line.key) if isinstance(line, SavedRegistration) else None
                if host is None:
                    continue
                if in_topic[line.key, line.value] > 0:
                    in_topic[line.key, line.value] -= 1
                elif not _is_outdated(line, newer, ended):
                    entry = Entry(line.key, line.value)
                    await self._bus.publish(self._topics.registrations, partition_of(host, self.partitions), entry)
                    published += 1
        return published

    async def _in_topic(self) -> Counter[tuple[bytes, bytes | None]]:
        """The unanswered messages that the topic holds where their hosts belong, if these have saved registrations."""
        topic = self._topics.registrations
        found: Counter[tuple[bytes, bytes | None]] = Counter()
        answered = Answered(self._contents.checkpoints, self._input_id)
        homes = {host: partition_of(host, self.partitions) for host in self._contents.asking}
        for partition in sorted(set(homes.values())):
            _, end = await self._bus.offsets(topic, partition)
            async with await self._bus.open_reader(topic, partition, start=None, committed=False) as reader:
                async for messages in read_to(reader, end):
                    for message in messages:
                        host = host_of_registration(message.key)
                        if host is None or homes.get(host) != partition:
                            continue
                        if message.offset >= answered.until(host, partition):
                            found[message.key or b"", message.value] += 1
        return found


def _newest(messages: Iterable[tuple[bytes, bytes | None]]) -> dict[tuple[str, str], str]:
    """The incarnations of these registrations by host and worker."""
    found: dict[tuple[str, str], str] = {}
    for key, value in messages:
        with suppress(WireError):
            message = decode_registration(value, key=key)
            if isinstance(message, Register):
                found[message.host, message.worker] = message.incarnation
    return found


def _ended(messages: Iterable[tuple[bytes, bytes | None]]) -> set[tuple[str, str, str | None]]:
    """What these deregistrations end: host, worker, incarnation (None: any)."""
    found: set[tuple[str, str, str | None]] = set()
    for key, value in messages:
        with suppress(WireError):
            message = decode_registration(value, key=key)
            if isinstance(message, Deregister):
                found.add((message.host, message.worker, message.incarnation))
    return found


def _is_outdated(
    line: SavedRecord, newer: Mapping[tuple[str, str], str], ended: Set[tuple[str, str, str | None]]
) -> bool:
    """Whether a worker has registered anew or deregistered since it sent this message, which must not be read then."""
    try:
        message = decode_registration(line.value, key=line.key)
    except WireError:
        return False
    if ended & {(message.host, message.worker, None), (message.host, message.worker, message.incarnation)}:
        return True
    incarnation = newer.get((message.host, message.worker))
    if incarnation is None:
        return False
    return message.incarnation is None if isinstance(message, Deregister) else message.incarnation != incarnation
