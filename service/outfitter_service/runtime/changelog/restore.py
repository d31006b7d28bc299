"""Restores the ledger from the compacted topic when a manager starts.

It reads one partition up to its committed end, keeps the last record of each key in scope, and builds the core's ledger
from them. It repairs nothing: the host of an unreadable record is refused.
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
from outfitter_proto.keys import CHECKPOINT, HOST, AllocationKey, checkpoint_key, host_of, sweeper_writer, writer_of
from outfitter_proto.records import (
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Checkpoint,
    Host,
    LedgerRecord,
    ResolvedRequest,
    StateRecord,
)
from outfitter_service.core.model import NO_ITEMS, NO_NAMES
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from outfitter_service.runtime.changelog.ledger_format import refusal
from outfitter_service.runtime.input.scope import Scope

log = structlog.get_logger("outfitter.restore")

_KNOWN_STATES = frozenset(AllocationState)

NAMED_HOLDERS = 8
"""Most holders that a refusal names."""

SLICE = 500
"""Records between two pauses: some 10 ms, decoding included."""

MOST_INTERNED = 1000
"""Most requests, labels and names that are kept so that records share equal ones."""


class LedgerRefusedError(RuntimeError):
    """The ledger has a record of this writer that this version must not work on."""


class Restored(Struct, frozen=True, kw_only=True):
    """A ledger that was restored, and what else its partition says."""

    ledger: Ledger
    checkpoint: Checkpoint | None
    """The newest one of this writer. None: the writer is new."""
    rivals: list[str]
    """Writers of the other scope that have written about this scope's hosts."""
    end: int
    """The offset up to which the topic was read."""
    neighbours: dict[bytes, bytes]
    """Other hosts' records and checkpoints by key, encoded."""
    swept: Checkpoint | None
    """The checkpoint of the partition's sweeper."""
    records: int
    """How many were read."""
    seconds: float
    """How long that took."""


async def restore(bus: Bus, topic: str, partition: int, scope: Scope, *, end: int | None = None) -> Restored:
    """Restore the ledger of `scope`, up to `end` (default: the current stable end).

    Raises:
        LedgerRefusedError: a record is damaged, or of a later version; the message says which, and what to do. If it
            is about one of many hosts, only that host is refused (`Scope.refuse`).
        BusError: the bus could not be read.
    """
    begun = time.monotonic()
    if end is None:
        end = await bus.stable_end(topic, partition)
    with _gc_paused():
        read = await _read_log(bus, topic, partition, scope, end)
        with _cleared_on_error(read.last, read.others):
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
    """The recent restore `seen`, with the current records of others; None if the scope's own records have changed
    since, or the topic was replaced. The restore must be recent: tombstones of others disappear after
    `delete.retention.ms`. (The scope's own writer always writes a checkpoint.)

    Raises:
        BusError: the bus could not be read.
    """
    others = dict(seen.neighbours)
    with _cleared_on_error(seen.ledger, seen.neighbours, others):
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
                    _keep_other(message, others)
    return structs.replace(
        seen, neighbours=others, rivals=_rivals(others, scope), swept=_swept(others, partition), end=end
    )


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection while a ledger is built, and count the ledger as old afterwards. One pass over a million
    records takes a second, and young objects get two passes. If several ledgers are built at once, the first complete
    one ends the pause for all."""
    is_enabled = gc.isenabled()
    if is_enabled:
        gc.collect(1)  # garbage must not become old with the ledger
    gc.disable()
    try:
        yield
        gc.freeze()
        gc.unfreeze()  # puts frozen objects among the oldest ones
    finally:
        if is_enabled:
            gc.enable()


@contextmanager
def _cleared_on_error(*read: dict[bytes, Any] | Ledger | _Interner) -> Iterator[None]:
    """A context that clears these after an error. A bus keeps its last error, whose traceback would keep them alive."""
    try:
        yield
    except BaseException:
        for each in read:
            each.clear()
        raise


async def discard(ledger: Ledger) -> None:
    """Empty a ledger that is no longer used. This pauses now and then: to free a million records takes 1.6 s."""
    while ledger.hosts:
        ledger.hosts.popitem()
        await anyio.lowlevel.checkpoint()
    while ledger.allocations:
        for _ in range(min(SLICE, len(ledger.allocations))):
            ledger.allocations.popitem()
        await anyio.lowlevel.checkpoint()
    ledger.clear()


async def _build(read: _ReadPartition, scope: Scope, topic_partition: str) -> tuple[Ledger, Checkpoint | None]:
    """The ledger of a partition that was read. This pauses now and then, so that the manager does not seem dead while
    it builds a million records."""
    ledger = Ledger()
    checkpoint: Checkpoint | None = None
    allocations: list[tuple[AllocationKey, Allocation]] = []
    others: list[StateRecord] = []
    scope.admit_all()
    for number, (key, value) in enumerate(read.last.items()):
        if number % SLICE == 0:
            await anyio.lowlevel.checkpoint()
        try:
            record = _checked_record(key, value, topic_partition)
        except LedgerRefusedError as error:
            host = host_of(key)
            if host is None or not scope.refuse(host, str(error)):
                raise
            log.critical("a host is not served: its ledger is refused", host=host, error=str(error))
            continue
        match record:
            case Allocation():
                # `record.key` would make the key again, which takes three times as long
                allocations.append((AllocationKey(key.decode()), record))
            case Checkpoint():
                checkpoint = record
            case _:
                others.append(record)
    for host, reason in _without_names(others, allocations).items():
        if not scope.refuse(host, reason):
            raise LedgerRefusedError(reason)
        log.critical("a host is not served: its ledger is refused", host=host, error=reason)
    allocations.sort(key=lambda keyed: (keyed[1].since, keyed[1].source.offset))
    for other in others:
        if other.host not in scope.refused:
            ledger.restore(PutRecord(other))
    for number, (allocation_key, allocation) in enumerate(allocations):
        if number % SLICE == 0:
            await anyio.lowlevel.checkpoint()
        if allocation.host not in scope.refused:
            ledger.restore(PutAllocation(allocation_key, allocation))
    if checkpoint is not None:
        ledger.resume(commit=checkpoint.commit, token=checkpoint.token, needs=checkpoint.needs or ())
    return ledger, checkpoint


def _without_names(records: list[StateRecord], allocations: list[tuple[AllocationKey, Allocation]]) -> dict[str, str]:
    """The hosts whose records an earlier version wrote without some names of devices while somebody held one, and why
    each cannot be served: a held device may have any of these names."""
    crowded = {
        record.host: [name for name, inventory in record.resources.items() if inventory.names_left_out]
        for record in records
        if isinstance(record, Host)
    }
    holders: dict[str, list[AllocationKey]] = {}
    for key, allocation in allocations:
        if allocation.state in HOLDING_STATES and crowded.get(allocation.host):
            holders.setdefault(allocation.host, []).append(key)
    return {
        host: f"the record of host {host} lacks names of devices of {', '.join(crowded[host])}, because version 0.2 "
        f"had no room for them, and a held device may have one of these names. End these holders first: {_named(keys)}."
        " Run version 0.2 until they have ended; or, if their processes are gone, run `outfitter ledger forget KEY` for"
        " each, and start again"
        for host, keys in holders.items()
    }


def _named(keys: list[AllocationKey]) -> str:
    more = f" and {len(keys) - NAMED_HOLDERS} more" if len(keys) > NAMED_HOLDERS else ""
    return ", ".join(keys[:NAMED_HOLDERS]) + more


def _rivals(others: dict[bytes, bytes], scope: Scope) -> list[str]:
    return [rival for key in others if (rival := scope.rival(key)) is not None]


def _swept(others: dict[bytes, bytes], partition: int) -> Checkpoint | None:
    """The sweeper's checkpoint; None if there is none or this version cannot read it. It is no reason to refuse the
    ledger."""
    value = others.get(checkpoint_key(sweeper_writer(partition)).encode())
    try:
        record = decode_ledger(value) if value is not None else None
    except WireError:
        return None
    return record if isinstance(record, Checkpoint) else None


def _checked_record(key: bytes, value: LedgerRecord | bytes, topic_partition: str) -> LedgerRecord:
    """The last record under `key`.

    Raises:
        LedgerRefusedError: this version must not work on it.
    """
    try:
        record = decode_ledger(value, key=key) if isinstance(value, bytes) else value
    except UnknownTypeError as error:
        raise LedgerRefusedError(
            f"{error}. A later version of Outfitter wrote it: run that version, or a newer one, here"
        ) from error
    except WireError as error:
        if writer_of(key) is not None:
            raise LedgerRefusedError(
                f"{error}. The ledger in {topic_partition} is damaged there, and without a checkpoint no manager can "
                'continue: restore a backup (service/recover.md, "One damaged record")'
            ) from error
        raise LedgerRefusedError(
            f"{error}. The ledger in {topic_partition} is damaged there; to continue without this record, stop the "
            f"manager, run `outfitter ledger forget {key.decode('utf-8', 'backslashreplace')}`, and start again"
        ) from error
    # `type is`: isinstance costs more where the answer is no
    if type(record) is Allocation:
        if record.state not in _KNOWN_STATES:
            raise LedgerRefusedError(
                f"allocation {record.key} is in state {record.state!r}, which this version does not know: run the "
                "version of Outfitter that wrote it, or a newer one, here"
            )
    elif type(record) is Checkpoint and (reason := refusal(record)) is not None:
        raise LedgerRefusedError(reason)
    return record


async def rivals_since(bus: Bus, topic: str, partition: int, scope: Scope, start: int) -> list[str]:
    """The writers of the other scope that have written since `start`."""
    end = await bus.stable_end(topic, partition)
    rivals: dict[str, None] = {}
    async with await bus.open_reader(topic, partition, start=start, committed=True) as reader:
        async for messages in read_to(reader, end):
            for message in messages:
                rival = scope.rival(message.key or b"")
                if rival is not None and message.value is not None:
                    rivals[rival] = None
    return list(rivals)


class _ReadPartition(NamedTuple):
    """A partition that was read."""

    last: dict[bytes, LedgerRecord | bytes]
    """The last record of each key in scope (bytes, if it cannot be decoded)."""
    others: dict[bytes, bytes]
    """The last values of other hosts and checkpoints."""
    records: int
    """How many were read, up to `end`."""
    end: int


async def _read_log(bus: Bus, topic: str, partition: int, scope: Scope, end: int) -> _ReadPartition:
    last: dict[bytes, LedgerRecord | bytes] = {}
    others: dict[bytes, bytes] = {}
    interner = _Interner()
    count = 0
    with _cleared_on_error(last, others, interner):
        async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
            async for messages in read_to(reader, end):
                count += len(messages)
                await _add_batch(messages, scope, last, others, interner)
    return _ReadPartition(last, others, count, end)


async def _add_batch(
    messages: list[Message],
    scope: Scope,
    last: dict[bytes, LedgerRecord | bytes],
    others: dict[bytes, bytes],
    interner: _Interner,
) -> None:
    """Keep the last record of each key in one fetch. This pauses now and then."""
    newest: dict[bytes, bytes | None] = {}
    for message in messages:
        key = message.key
        if key is None:
            continue
        if scope.owns(key):
            newest[key] = message.value
        else:
            _keep_other(message, others)
    await anyio.lowlevel.checkpoint()
    for number, (key, value) in enumerate(newest.items(), start=1):
        if number % SLICE == 0:
            await anyio.lowlevel.checkpoint()
        if value is None:
            last.pop(key, None)
        else:
            last[key] = _decoded(key, value, interner)


def _decoded(key: bytes, value: bytes, interner: _Interner) -> LedgerRecord | bytes:
    """A record, decoded at once: so memory never has all bytes and all records together. A value that cannot be decoded
    stays as it is, because a later one may supersede it."""
    try:
        record = decode_ledger(value, key=key)
    except WireError:
        return value
    if isinstance(record, Allocation):
        interner.share(record)
    return record


class _Interner:
    """Makes records share equal parts, which are about a third of their memory."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._requests: dict[bytes, ResolvedRequest] = {}
        self._labels: dict[bytes, dict[str, str]] = {}
        self._infos: dict[bytes, list[dict[str, str]]] = {}

    def share(self, record: Allocation) -> None:
        """Replace parts of the record by equal shared ones, in place. Nobody else may have the record yet."""
        names, requests, labels, request = self._names, self._requests, self._labels, record.request
        sizes = len(names), len(requests), len(labels), len(self._infos)
        if max(sizes) >= MOST_INTERNED:
            self.clear()
        shared = requests.setdefault(encode((request.amounts, request.resources, request.operators)), request)
        # one by one: a loop over the fields takes a third of a microsecond more
        put = structs.force_setattr
        put(request, "amounts", shared.amounts)
        put(request, "resources", shared.resources)
        put(request, "operators", shared.operators)
        put(request, "labels", labels.setdefault(encode(request.labels), request.labels))
        for resource in record.shared:
            infos = record.resources.get(resource)
            if infos:  # most sharers have the same devices, and a thousand of them may have 500 each
                record.resources[resource] = self._infos.setdefault(encode(infos), infos)
        if not record.operators:
            put(record, "operators", NO_ITEMS)
        if not record.env:
            put(record, "env", NO_ITEMS)
        if not record.cdi:
            put(record, "cdi", NO_NAMES)
        if not record.shared:
            put(record, "shared", NO_NAMES)
        if not record.unavailable:
            put(record, "unavailable", NO_ITEMS)
        put(record, "host", names.setdefault(record.host, record.host))
        put(record, "state", names.setdefault(record.state, record.state))
        put(record, "writer", names.setdefault(record.writer, record.writer))
        if (owner := request.owner) is not None:
            put(owner, "boot_id", names.setdefault(owner.boot_id, owner.boot_id))

    def clear(self) -> None:
        self._names.clear()
        self._requests.clear()
        self._labels.clear()
        self._infos.clear()


def _keep_other(message: Message, others: dict[bytes, bytes]) -> None:
    """Keep another scope's record if it is a host or a checkpoint."""
    key = message.key
    if key is None or not key.startswith((HOST, CHECKPOINT)):
        return
    if message.value is None:
        others.pop(key, None)
    else:
        others[key] = message.value
