"""Growing on purpose: more partitions for all topics of a cluster, and each host's records where they belong then.

No manager may serve meanwhile, and none can start: while a host's records lie in two places, or on their way, its
checkpoint says so (`shape.MOVING`). Each step is written down before the next one begins, and may be done twice: who
was killed is run again. What was registered and not yet read by a host's manager is sent again to the new partition.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from msgspec import UNSET, Struct, UnsetType, structs

from outfitter_proto.bus import Bus, Entry, UnknownTopicError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.codec import WireError, decode_ledger, decode_registration, encode
from outfitter_proto.keys import (
    CHECKPOINT,
    HOST,
    checkpoint_key,
    host_of,
    host_writer,
    is_sweeper,
    partition_writer,
    sweeper_writer,
    writer_names,
    writer_of,
)
from outfitter_proto.names import InvalidNameError, Topics, check_name, topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Checkpoint, Era, Growth, Heartbeat, Host, InputPosition
from outfitter_service.runtime.changelog.shape import MOVING

INSTANCE = "topics-grow"
"""What the managers begin with that checkpoints name which were written here: each run is one."""
FILL = 0.8
"""How full of the largest possible ledger batch a commit is made."""


class CannotGrowError(RuntimeError):
    """The topics cannot be given more partitions as things are. The message says what to do."""


class Grown(Struct, frozen=True, kw_only=True):
    """What was done: how many partitions there were (0: not known) and are, the hosts that were moved, how many of
    their records, and how many registrations were sent again."""

    before: int
    partitions: int
    hosts: list[str]
    records: int
    registrations: int


class Stock(Struct, kw_only=True):
    """One partition of the ledger: the checkpoints there by writer, the managers that have not said that they stopped,
    and what lies there of hosts that belong elsewhere, as it is on the wire, by host and key."""

    checkpoints: dict[str, Checkpoint] = {}
    at_work: list[str] = []
    strays: dict[str, dict[bytes, bytes]] = {}


async def stock(bus: Bus, topic: str, partition: int, partitions: int) -> Stock:
    """What is committed in one partition of the ledger, as far as it matters for growing to `partitions`.

    Raises:
        CannotGrowError: a checkpoint that cannot be read.
        BusError: the ledger cannot be read.
    """
    last: dict[bytes, bytes] = {}
    places: dict[str, int] = {}
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                key = message.key or b""
                if message.value is None:
                    last.pop(key, None)
                elif key.startswith((CHECKPOINT, HOST)) or _strays(key, partition, partitions, places):
                    last[key] = message.value
    return _sorted(last, partition, partitions, f"{topic}/{partition}")


def _strays(key: bytes, partition: int, partitions: int, places: dict[str, int]) -> bool:
    host = _whose(key)
    if host is None:
        return False
    if host not in places:
        places[host] = partition_of(host, partitions)
    return places[host] != partition


def _whose(key: bytes) -> str | None:
    """The host whose record this is, its manager's checkpoint included."""
    writer = writer_of(key)
    return host_of(key) if writer is None else writer_names(writer).host


def _sorted(last: Mapping[bytes, bytes], partition: int, partitions: int, place: str) -> Stock:
    found = Stock()
    places: dict[str, int] = {}
    for key, value in last.items():
        if key.startswith((CHECKPOINT, HOST)):
            try:
                record = decode_ledger(value, key=key)
            except WireError as error:
                if key.startswith(HOST):
                    record = None
                else:
                    raise CannotGrowError(f"{error}. The ledger in {place} is damaged there: mend it first") from error
            if isinstance(record, Checkpoint):
                found.checkpoints[record.writer] = record
            elif isinstance(record, Host) and record.manager.stopped_at is None:
                found.at_work.append(record.host)
        host = _whose(key)
        if host is not None and _strays(key, partition, partitions, places):
            found.strays.setdefault(host, {})[key] = value
    return found


def _unfinished(found: Stock, partitions: int) -> list[str]:
    """The writers there that do not know of all partitions. A sweeper knows of none."""
    return [
        writer for writer, each in found.checkpoints.items() if not is_sweeper(writer) and each.partitions != partitions
    ]


def _is_begun(found: Stock, partitions: int) -> bool:
    """Whether growing to so many was announced there, and not all is carried over that was not read."""
    grown = [each.grown for each in found.checkpoints.values() if each.grown is not UNSET]
    return any(each.until is UNSET and each.partitions < partitions for each in grown)


async def grow(
    bus: Bus, cluster: str, partitions: int, *, history: bool = True, force: bool = False,
    say: Callable[[str], object] = lambda _: None,
) -> Grown:  # fmt: skip
    """Give the topics of `cluster` so many partitions, or finish what was begun; `say` is told of each step. With
    `force` hosts whose manager has not said that it stopped are moved all the same.

    Raises:
        CannotGrowError: see there.
        UnknownTopicError: there are no such topics.
        FencedError: a manager is at work after all.
        BusError: the bus failed: run it again.
    """
    return await _Growth(bus, cluster, partitions, history, say).run(force=force)


def _eras(grown: Growth | UnsetType) -> list[Era]:
    """The times before partitions were added, the newest first."""
    if grown is UNSET:
        return []
    newest = [Era(partitions=grown.partitions, until=grown.until)] if grown.until is not UNSET else []
    return [*newest, *(grown.earlier or [])]


class _Growth:
    """One run of it."""

    def __init__(self, bus: Bus, cluster: str, partitions: int, history: bool, say: Callable[[str], object]) -> None:
        self._bus = bus
        self._cluster = cluster
        self._topics: Topics = topics(cluster)
        self._partitions = partitions
        self._history = history
        self._say = say
        self._instance = f"{INSTANCE}-{secrets.token_hex(4)}"
        self._input_id = ""
        self._ledger_id = ""
        self._before = 0
        self._input_partitions = 0
        self._checkpoints: dict[tuple[int, str], Checkpoint] = {}
        self._copied: set[tuple[int, str]] = set()
        self._commits: dict[tuple[int, str], int] = {}
        """By partition and writer: the last commit that is known, of what was copied there or was written here."""
        self._hosts: set[str] = set()
        self._records = 0
        self._registrations = 0

    async def run(self, *, force: bool) -> Grown:
        if not await self._prepare(force=force):
            return Grown(before=self._partitions, partitions=self._partitions, hosts=[], records=0, registrations=0)
        numbers, former = range(self._partitions), range(self._before or self._partitions)
        for partition in former:
            await self._announce(partition)
        await self._add_partitions(self._topics.registrations, self._topics.history, self._topics.dead_letters)
        for partition in former:
            await self._carry(partition)
        await self._add_partitions(self._topics.allocations)  # by its number workers find their host's place
        self._say(f"all topics have {self._partitions} partitions")
        for partition in former:
            await self._carry(partition)
        for partition in numbers:
            await self._copy(partition)
        for partition in numbers:
            await self._delete(partition)
        for partition in numbers:
            await self._finish(partition)
        await self._check()
        return Grown(
            before=self._before,
            partitions=self._partitions,
            hosts=sorted(self._hosts),
            records=self._records,
            registrations=self._registrations,
        )

    # --- before anything is changed --------------------------------------------------------------------------

    async def _prepare(self, *, force: bool) -> bool:
        """Look at what there is; refuse where it cannot be moved. False: there is nothing to do."""
        wanted = [name for name in self._topics if self._history or name != self._topics.history]
        shapes = await self._bus.shapes(wanted)
        missing = [name for name in wanted if name not in shapes]
        if missing:
            raise UnknownTopicError(f"{self._bus.url}: there is no topic {missing[0]!r}: `outfitter topics create`")
        counts = {shape.partitions for shape in shapes.values()}
        most = max(counts)
        if most > self._partitions:
            raise CannotGrowError(f"there are {most} partitions already, and no way back to {self._partitions}")
        self._input_id = shapes[self._topics.registrations].id
        self._ledger_id = shapes[self._topics.allocations].id
        at_work: list[str] = []
        complete = len(counts) == 1
        for partition in range(shapes[self._topics.allocations].partitions):
            found = await self._look(partition, most)
            at_work += found.at_work
            complete = complete and not found.strays and not _unfinished(found, most) and not _is_begun(found, most)
        if complete and most == self._partitions:
            return False
        if not complete and most < self._partitions:
            raise CannotGrowError(
                f"partitions were added before, and not all records are where they belong among {most}: with all "
                f"managers stopped run `outfitter topics grow --partitions {most}` first, then this again"
            )
        self._input_partitions = shapes[self._topics.registrations].partitions
        self._before = most if complete else self._former(shapes[self._topics.allocations].partitions)
        if at_work and not force:
            shown = ", ".join(sorted(at_work)[:5]) + (" …" if len(at_work) > 5 else "")
            raise CannotGrowError(
                f"the managers of {len(at_work)} hosts have not said that they stopped ({shown}): stop all managers of "
                f"cluster {self._cluster!r}. Of those that were killed make sure that they do not run, and give --force"
            )
        return True

    def _former(self, now: int) -> int:
        """How many partitions there were, where growing was begun: as checkpoints say, else as the ledger has `now`;
        0: that is not known."""
        told = {each.partitions for each in self._checkpoints.values()}
        told |= {each.grown.partitions for each in self._checkpoints.values() if each.grown is not UNSET}
        return max((each for each in (*told, now) if each is not UNSET and each != self._partitions), default=0)

    async def _look(self, partition: int, partitions: int | None = None) -> Stock:
        """What lies there that belongs elsewhere among `partitions` (left out: as many as there are to be)."""
        found = await stock(self._bus, self._topics.allocations, partition, partitions or self._partitions)
        for writer, checkpoint in found.checkpoints.items():
            self._checkpoints[partition, writer] = checkpoint
        return found

    async def _add_partitions(self, *names: str) -> None:
        for name in names:
            if self._history or name != self._topics.history:
                await self._bus.add_partitions(name, self._partitions)

    # --- what was registered and not read --------------------------------------------------------------------

    def _keeper(self, partition: int) -> Checkpoint | None:
        """The checkpoint of whoever answers there for what is nobody's."""
        owner = self._checkpoints.get((partition, partition_writer(partition)))
        return owner or self._checkpoints.get((partition, sweeper_writer(partition)))

    async def _announce(self, partition: int) -> None:
        """Say that partitions are being added, and up to where nobody can have known of them. Whoever works there as
        the owner of the partition is fenced off."""
        first, end = await self._bus.offsets(self._topics.registrations, partition)
        keeper = self._keeper(partition) or self._new_sweeper(partition, first)
        mark = keeper.grown
        if mark is UNSET or mark.partitions != self._before:
            mark = Growth(partitions=self._before, since=self._unread(keeper), earlier=_eras(mark) or UNSET)
        if self._input_partitions == self._before:
            mark = structs.replace(mark, since=end)
        await self._put(partition, structs.replace(keeper, grown=mark))

    async def _carry(self, partition: int) -> None:
        """Send again what nobody has read of hosts that are moved, as far as that was not done, then say so."""
        keeper = self._keeper(partition)
        if keeper is None or keeper.grown is UNSET:
            return
        first, end = await self._bus.offsets(self._topics.registrations, partition)
        start = keeper.grown.until
        if start is UNSET:
            writers = {host_writer(host) for host in self._moving(partition)}
            known = [self._checkpoints[partition, writer] for writer in writers]
            start = min(self._unread(each) for each in [keeper, *known])
        start = max(first, start)
        async with await self._bus.open_reader(
            self._topics.registrations, partition, start=start, committed=False
        ) as reader:
            async for messages in read_to(reader, end):
                for message in messages:
                    if message.offset < end and self._is_owed(message.key, message.offset, message.value, partition):
                        host = (message.key or b"").decode()
                        entry = Entry(message.key, message.value)
                        await self._bus.publish(self._topics.registrations, partition_of(host, self._partitions), entry)
                        self._registrations += 1
        await self._put(partition, structs.replace(keeper, grown=structs.replace(keeper.grown, until=end)))

    def _moving(self, partition: int) -> Iterable[str]:
        """The hosts with a manager's checkpoint in this partition that belong elsewhere."""
        for number, writer in self._checkpoints:
            host = writer_names(writer).host
            if number == partition and host is not None and partition_of(host, self._partitions) != partition:
                yield host

    def _unread(self, checkpoint: Checkpoint) -> int:
        """Where its writer would go on reading the input."""
        return checkpoint.input.to if checkpoint.input.topic_id == self._input_id else 0

    def _is_owed(self, key: bytes | None, offset: int, value: bytes | None, partition: int) -> bool:
        """Whether a message was right here, belongs elsewhere now, and was not answered: heartbeats want no answer."""
        try:
            host = check_name((key or b"").decode(), "host")
        except (UnicodeDecodeError, InvalidNameError):
            return False
        if partition_of(host, self._partitions) == partition:
            return False
        if self._before and partition_of(host, self._before) != partition:
            return False
        try:
            if isinstance(decode_registration(value, key=key), Heartbeat):
                return False
        except WireError:
            pass  # what cannot be understood is a dead letter there
        for writer in (host_writer(host), partition_writer(partition), sweeper_writer(partition)):
            checkpoint = self._checkpoints.get((partition, writer))
            if checkpoint is not None:
                ahead = (checkpoint.input.ahead or {}).get(host, 0)
                return offset >= max(self._unread(checkpoint), ahead)
        return True

    def _new_sweeper(self, partition: int, first: int) -> Checkpoint:
        """For a partition that was never swept."""
        place = InputPosition(topic_id=self._input_id, partition=partition, from_=first, to=first)
        return self._new(sweeper_writer(partition), "sweeper", place)

    def _new(self, writer: str, scope: str, place: InputPosition) -> Checkpoint:
        return Checkpoint(
            writer=writer, instance=self._instance, cluster=self._cluster, scope=scope, commit=0, token=0, input=place,
            at=datetime.now(UTC),
        )  # fmt: skip

    # --- the records -----------------------------------------------------------------------------------------

    async def _copy(self, partition: int) -> None:
        """Write what lies here of other partitions' hosts to where it belongs."""
        found = await self._look(partition)
        for writer, checkpoint in found.checkpoints.items():
            self._commits[partition, writer] = checkpoint.commit
        owner = found.checkpoints.get(partition_writer(partition))
        for host, records in found.strays.items():
            place = partition_of(host, self._partitions)
            own = found.checkpoints.get(host_writer(host))
            mark = self._marked(own or owner, place, host, of_host=own is not None or owner is None)
            entries = [Entry(key, value) for key, value in records.items() if not key.startswith(CHECKPOINT)]
            await self._put(place, mark, entries)
            self._copied.add((partition, host))
            self._hosts.add(host)
            self._records += len(records)
        if found.strays:
            self._say(f"partition {partition}: {len(found.strays)} hosts copied to where they belong")

    def _marked(self, known: Checkpoint | None, place: int, host: str, *, of_host: bool) -> Checkpoint:
        """The checkpoint of whoever writes in the new place, saying that it is being moved there. Its tokens, commits
        and numbers of registrations go on from the higher ones."""
        writer = host_writer(host) if of_host else partition_writer(place)
        there = self._checkpoints.get((place, writer))
        position = there.input if there is not None else self._beginning(place, of_host=of_host)
        before = known or self._new(writer, "host", position)
        base = before.input.base or 0
        base = max(position.base or 0, base + before.input.reach if known is not None else base)
        return structs.replace(
            before,
            writer=writer,
            commit=max(there.commit if there is not None else 0, before.commit if of_host else 0),
            token=max(there.token if there is not None else 0, before.token),
            input=structs.replace(position, base=base or UNSET),
            snapshot=UNSET,
            partitions=MOVING,
            ledger_id=before.ledger_id if before.ledger_id is not UNSET else self._ledger_id,
            ledger_start=self._ledger_start(place),
            grown=UNSET if of_host else self._grown(place, there),
        )

    def _ledger_start(self, place: int) -> int | UnsetType:
        """Where the ledger's partition began when its writers last looked."""
        told = [each.ledger_start or 0 for (number, _), each in self._checkpoints.items() if number == place]
        return max(told, default=0) or UNSET

    def _grown(self, place: int, there: Checkpoint | None) -> Growth | UnsetType:
        """What `there` says of the growth, or whoever kept that partition before, if this is a partition's first."""
        keeper = there or self._keeper(place)
        return keeper.grown if keeper is not None else UNSET

    def _beginning(self, place: int, *, of_host: bool) -> InputPosition:
        """Where the input of somebody who is new in a partition begins: behind what its sweeper has answered, and a
        host's behind all that was said there before it could be the host's place."""
        swept = self._checkpoints.get((place, sweeper_writer(place)))
        at = 0
        if swept is not None and swept.input.topic_id == self._input_id:
            at = swept.input.claimed or swept.input.to
        keeper = self._keeper(place)
        if of_host and keeper is not None and keeper.grown is not UNSET:
            at = max(at, keeper.grown.since or 0)
        begin: int | UnsetType = at or UNSET
        return InputPosition(topic_id=self._input_id, partition=place, from_=at, to=at, begin=begin)

    async def _delete(self, partition: int) -> None:
        """Delete here what was copied to where it belongs."""
        found = await self._look(partition)
        owner = found.checkpoints.get(partition_writer(partition))
        for host in found.strays:
            writer = found.checkpoints.get(host_writer(host)) or owner
            written = writer is not None and self._commits.get((partition, writer.writer)) != writer.commit
            if written or (partition, host) not in self._copied:
                raise CannotGrowError(f"a manager writes for host {host!r} all the time: stop it, and run this again")
        for host, records in found.strays.items():
            own = found.checkpoints.get(host_writer(host))
            deleted = [Entry(key, None) for key in records if not key.startswith(CHECKPOINT)]
            if own is None and owner is not None:
                await self._put(partition, structs.replace(owner, commit=self._commit(partition, owner)), deleted)
                continue
            deleted += [Entry(checkpoint_key(host_writer(host)).encode(), None)]
            await self._write(partition, host_writer(host), deleted)
            self._checkpoints.pop((partition, host_writer(host)), None)

    def _commit(self, partition: int, checkpoint: Checkpoint) -> int:
        return self._checkpoints.get((partition, checkpoint.writer), checkpoint).commit

    async def _finish(self, partition: int) -> None:
        """Say of each writer whose records are all here that they are: from now on its manager may start."""
        found = await self._look(partition)
        for writer in _unfinished(found, self._partitions):
            await self._put(partition, structs.replace(found.checkpoints[writer], partitions=self._partitions))

    async def _check(self) -> None:
        """Whether all is where it belongs."""
        for partition in range(self._partitions):
            found = await self._look(partition)
            wrong = _unfinished(found, self._partitions)
            if found.strays or wrong:
                raise CannotGrowError(
                    f"partition {partition} still has records of {', '.join([*found.strays, *wrong][:5])} that belong "
                    "elsewhere: a manager is at work. Stop it, and run this again"
                )

    # --- writing ---------------------------------------------------------------------------------------------

    async def _put(self, partition: int, checkpoint: Checkpoint, entries: Iterable[Entry] = ()) -> None:
        """Commit these records as the checkpoint's writer, and the checkpoint behind them with the next number."""
        number = checkpoint.commit
        nothing_read = structs.replace(checkpoint.input, from_=checkpoint.input.to)

        def end() -> Entry:
            nonlocal number
            number += 1
            told = structs.replace(
                checkpoint, commit=number, instance=self._instance, input=nothing_read, at=datetime.now(UTC)
            )
            self._checkpoints[partition, checkpoint.writer] = told
            self._commits[partition, checkpoint.writer] = number
            return Entry(told.key.encode(), encode(told))

        await self._write(partition, checkpoint.writer, [*entries], end)

    async def _write(
        self, partition: int, writer: str, entries: list[Entry], end: Callable[[], Entry] | None = None
    ) -> None:
        """Commit these in as many batches as it takes, each with an `end`."""
        written = self._topics.written(history=self._history)
        async with await self._bus.open_writer(
            transactional_id(self._cluster, writer), partition, topics=written
        ) as held:
            while True:
                batch: list[Entry] = []
                size = 0
                while entries and (not batch or size < held.max_batch_bytes * FILL):
                    entry = entries[0]
                    size += len(entry.key or b"") + len(entry.value or b"") + 32
                    if batch and size >= held.max_batch_bytes * FILL:
                        break
                    batch.append(entries.pop(0))
                if end is not None:
                    batch.append(end())
                await held.commit([(self._topics.allocations, batch)])
                if not entries:
                    return
