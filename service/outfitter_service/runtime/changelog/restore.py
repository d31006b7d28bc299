"""Replaying the ledger: what a manager knows when it starts is what the compacted topic says.

Reads one partition up to what was committed when it was called, keeps the last record of each key of its
own, and builds the core's ledger from it. It repairs nothing: a record it cannot read refuses its host.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio.lowlevel
import structlog
from msgspec import Struct, structs

from outfitter_proto.bus import Bus, Message, OffsetOutOfRangeError
from outfitter_proto.bus.reading import MARKERS_WAIT_S, read_to
from outfitter_proto.codec import UnknownTypeError, WireError, decode_ledger, encode
from outfitter_proto.keys import CHECKPOINT, HOST, checkpoint_key, host_of, sweeper_writer
from outfitter_proto.records import Allocation, AllocationState, Checkpoint, LedgerRecord, ResolvedRequest, StateRecord
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from outfitter_service.runtime.input.scope import Scope

log = structlog.get_logger("outfitter.restore")

_KNOWN_STATES = frozenset(AllocationState)

LEDGER_FORMAT = 1
"""The newest `Checkpoint.format` that this version can work on."""

STRETCH = 500
"""Records taken in at a stretch: some 10 ms, decoding them included."""

MOST_ALIKE = 1000
"""Requests, labels and names that are remembered at most, to find those that are alike."""


class LedgerRefusedError(RuntimeError):
    """The ledger holds something of this writer that this version must not work on."""


class Restored(Struct, frozen=True, kw_only=True):
    """A replayed ledger: the state, the newest checkpoint of this writer (None: it is new here), and figures. `rivals`
    are the writers of the other scope that wrote about this one's hosts, `neighbours` other hosts' records and
    checkpoints, by key, as they are on the wire, `swept` the checkpoint of the partition's sweeper, `end` is the offset
    up to which was read. It has read so many `records` in so many `seconds`."""

    ledger: Ledger
    checkpoint: Checkpoint | None
    rivals: list[str]
    end: int
    neighbours: dict[bytes, bytes]
    swept: Checkpoint | None
    records: int
    seconds: float


async def restore(bus: Bus, topic: str, partition: int, scope: Scope, *, end: int | None = None) -> Restored:
    """Replay what of the ledger is `scope`'s, up to `end`: all that is there now, if that is not given.

    Raises:
        LedgerRefusedError: a damaged record, or one of a later version, that is not about one of many hosts (then
            that host alone is refused, see `Scope.refuse`); says which and what to do.
        BusError: the bus could not be read.
    """
    begun = time.monotonic()
    if end is None:
        end = await bus.stable_end(topic, partition)
    with _nothing_collected():
        read = await _read_log(bus, topic, partition, scope, end)
        with _emptied_by_failure(read.last, read.others):
            ledger, checkpoint = await _build(read, scope, f"{topic}/{partition}")
    return Restored(
        ledger=ledger,
        checkpoint=checkpoint,
        rivals=_rivals(read.others, scope),
        neighbours=read.others,
        swept=_swept(read.others, partition),
        records=read.records,
        end=read.end,
        seconds=time.monotonic() - begun,
    )


async def unchanged(bus: Bus, topic: str, partition: int, scope: Scope, seen: Restored) -> Restored | None:
    """What was restored a moment ago, with others' records as they are now; None if something of the scope's was
    written since, or the log is another one. A moment only: others' tombstones may be gone again after
    `delete.retention.ms` (what the scope's writer does, its checkpoint tells, which is never one).

    Raises:
        BusError: the bus could not be read.
    """
    others = dict(seen.neighbours)
    with _emptied_by_failure(seen.ledger, seen.neighbours, others):
        end = await bus.stable_end(topic, partition)
        if end < seen.end:
            return None
        async with await bus.open_reader(topic, partition, start=seen.end, committed=True) as reader:
            while reader.position < end:
                try:
                    messages = await reader.fetch(max_records=10_000, timeout=MARKERS_WAIT_S)
                except OffsetOutOfRangeError:
                    return None
                for message in messages:
                    if message.key is not None and scope.owns(message.key):
                        return None
                    _keep(message, others)
    return structs.replace(
        seen, neighbours=others, rivals=_rivals(others, scope), swept=_swept(others, partition), end=end
    )


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Collect no garbage while a ledger is built, and count the ledger as old afterwards: one look at a million records
    takes a second, and young objects are looked at twice. If several ledgers are built at once, the first one that is
    complete ends this for all."""
    collects = gc.isenabled()
    if collects:
        gc.collect(1)  # garbage must not become old with the ledger
    gc.disable()
    try:
        yield
        gc.freeze()
        gc.unfreeze()  # this puts what is frozen among the oldest objects
    finally:
        if collects:
            gc.enable()


@contextmanager
def _emptied_by_failure(*read: dict[bytes, Any] | Ledger | _Alike) -> Iterator[None]:
    """An error that somebody keeps, as a bus does its last one, has a traceback, and that the frames that had these."""
    try:
        yield
    except BaseException:
        for each in read:
            each.clear()
        raise


async def discard(ledger: Ledger) -> None:
    """Empty a ledger that nobody works with any more. It pauses now and then: freeing a million records takes 1.6 s."""
    while ledger.hosts:
        ledger.hosts.popitem()
        await anyio.lowlevel.checkpoint()
    while ledger.allocations:
        for _ in range(min(STRETCH, len(ledger.allocations))):
            ledger.allocations.popitem()
        await anyio.lowlevel.checkpoint()
    ledger.clear()


async def _build(read: _Log, scope: Scope, place: str) -> tuple[Ledger, Checkpoint | None]:
    """The ledger of a log. It pauses now and then: who replays a million records must not seem dead meanwhile."""
    ledger = Ledger()
    checkpoint: Checkpoint | None = None
    allocations: list[Allocation] = []
    others: list[StateRecord] = []
    scope.admit_all()
    for number, (key, found) in enumerate(read.last.items()):
        if number % STRETCH == 0:
            await anyio.lowlevel.checkpoint()
        try:
            record = _understood(key, found, place)
        except LedgerRefusedError as error:
            host = host_of(key)
            if host is None or not scope.refuse(host, str(error)):
                raise
            log.critical("a host is not served: its ledger is refused", host=host, error=str(error))
            continue
        match record:
            case Allocation():
                allocations.append(record)
            case Checkpoint():
                checkpoint = record
            case _:
                others.append(record)
    allocations.sort(key=lambda record: (record.since, record.source.offset))
    for other in others:
        if other.host not in scope.refused:
            ledger.restore(PutRecord(other))
    for number, allocation in enumerate(allocations):
        if number % STRETCH == 0:
            await anyio.lowlevel.checkpoint()
        if allocation.host not in scope.refused:
            ledger.restore(PutAllocation(allocation.key, allocation))
    if checkpoint is not None:
        ledger.resume(commit=checkpoint.commit, token=checkpoint.token)
    return ledger, checkpoint


def _rivals(others: dict[bytes, bytes], scope: Scope) -> list[str]:
    return [rival for key in others if (rival := scope.rival(key)) is not None]


def _swept(others: dict[bytes, bytes], partition: int) -> Checkpoint | None:
    """The sweeper's checkpoint, as far as this version understands it: it is not this writer's to refuse."""
    value = others.get(checkpoint_key(sweeper_writer(partition)).encode())
    try:
        record = decode_ledger(value) if value is not None else None
    except WireError:
        return None
    return record if isinstance(record, Checkpoint) else None


def _understood(key: bytes, found: LedgerRecord | bytes, place: str) -> LedgerRecord:
    """What stands under `key` at the end of the log, if this version can work on it."""
    try:
        record = decode_ledger(found, key=key) if isinstance(found, bytes) else found
    except UnknownTypeError as error:
        raise LedgerRefusedError(
            f"{error}. A later version of Outfitter wrote it: run that version, or a newer one, here"
        ) from error
    except WireError as error:
        raise LedgerRefusedError(
            f"{error}. The ledger in {place} is damaged there; to go on without this record, stop the manager, say "
            f"`outfitter ledger forget {key.decode('utf-8', 'backslashreplace')}`, and start again"
        ) from error
    if isinstance(record, Allocation) and record.state not in _KNOWN_STATES:
        raise LedgerRefusedError(
            f"allocation {record.key} is in state {record.state!r}, which this version does not know: run the version "
            "of Outfitter that wrote it, or a newer one, here"
        )
    if isinstance(record, Checkpoint) and record.format > LEDGER_FORMAT:
        raise LedgerRefusedError(
            f"{record.key} is of format {record.format} and this version knows {LEDGER_FORMAT}: run the version of "
            "Outfitter that wrote it, or a newer one, here"
        )
    return record


async def rivals_since(bus: Bus, topic: str, partition: int, scope: Scope, start: int) -> list[str]:
    """The writers of the other scope that have written since `start`."""
    end = await bus.stable_end(topic, partition)
    found: dict[str, None] = {}
    async with await bus.open_reader(topic, partition, start=start, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                rival = scope.rival(message.key or b"")
                if rival is not None and message.value is not None:
                    found[rival] = None
    return list(found)


class _Log(NamedTuple):
    """What was read. `last`: the last record of each key that is the scope's (the bytes of one that cannot be decoded);
    `others`: the last value of others' hosts and checkpoints. `records`: how many; `end`: the offset after them."""

    last: dict[bytes, LedgerRecord | bytes]
    others: dict[bytes, bytes]
    records: int
    end: int


async def _read_log(bus: Bus, topic: str, partition: int, scope: Scope, end: int) -> _Log:
    last: dict[bytes, LedgerRecord | bytes] = {}
    others: dict[bytes, bytes] = {}
    alike = _Alike()
    count = 0
    with _emptied_by_failure(last, others, alike):
        async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                count += len(messages)
                await _take_in(messages, scope, last, others, alike)
    return _Log(last, others, count, end)


async def _take_in(
    messages: list[Message],
    scope: Scope,
    last: dict[bytes, LedgerRecord | bytes],
    others: dict[bytes, bytes],
    alike: _Alike,
) -> None:
    """Keep what one fetch brought, as far as nothing of the same fetch supersedes it. It pauses now and then."""
    newest: dict[bytes, bytes | None] = {}
    for message in messages:
        key = message.key
        if key is None:
            continue
        if scope.owns(key):
            newest[key] = message.value
        else:
            _keep(message, others)
    await anyio.lowlevel.checkpoint()
    for number, (key, value) in enumerate(newest.items(), start=1):
        if number % STRETCH == 0:
            await anyio.lowlevel.checkpoint()
        if value is None:
            last.pop(key, None)
        else:
            last[key] = _decoded(key, value, alike)


def _decoded(key: bytes, value: bytes, alike: _Alike) -> LedgerRecord | bytes:
    """A record, decoded at once, so that bytes and records are never all in memory together. What cannot be decoded
    stays as it is: something later may supersede it."""
    try:
        record = decode_ledger(value, key=key)
    except WireError:
        return value
    if isinstance(record, Allocation):
        alike.share(record)
    return record


class _Alike:
    """Has records share what they say alike, which is about a third of what they take in memory."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._requests: dict[bytes, ResolvedRequest] = {}
        self._labels: dict[bytes, dict[str, str]] = {}

    def share(self, record: Allocation) -> None:
        """Change the record, which nobody else may have yet, in place: to what is equal."""
        names, requests, labels, request = self._names, self._requests, self._labels, record.request
        if len(names) >= MOST_ALIKE or len(requests) >= MOST_ALIKE or len(labels) >= MOST_ALIKE:
            self.clear()
        known = requests.setdefault(encode((request.amounts, request.resources, request.operators)), request)
        # one by one: a loop over the fields takes a third of a microsecond more
        put = structs.force_setattr
        put(request, "amounts", known.amounts)
        put(request, "resources", known.resources)
        put(request, "operators", known.operators)
        put(request, "labels", labels.setdefault(encode(request.labels), request.labels))
        put(record, "host", names.setdefault(record.host, record.host))
        put(record, "state", names.setdefault(record.state, record.state))
        put(record, "writer", names.setdefault(record.writer, record.writer))
        if (owner := request.owner) is not None:
            put(owner, "boot_id", names.setdefault(owner.boot_id, owner.boot_id))

    def clear(self) -> None:
        self._names.clear()
        self._requests.clear()
        self._labels.clear()


def _keep(message: Message, others: dict[bytes, bytes]) -> None:
    """Keep what is not the scope's own, as far as it tells of other hosts and writers."""
    key = message.key
    if key is None or not key.startswith((HOST, CHECKPOINT)):
        return
    if message.value is None:
        others.pop(key, None)
    else:
        others[key] = message.value
