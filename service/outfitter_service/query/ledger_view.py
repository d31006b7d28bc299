"""Reads the ledger for commands that show it: all records committed up to a moment, or its changes.

It writes nothing, and ignores records that it cannot decode.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeVar

import anyio
import msgspec

from outfitter_proto import bus as buses
from outfitter_proto import codec, keys, names
from outfitter_proto.bus import Bus, Create, Message
from outfitter_proto.bus.reading import read_to
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Checkpoint,
    Health,
    Host,
    LedgerRecord,
    StateRecord,
)
from outfitter_proto.support.causes import side_by_side
from outfitter_service.config import BusConnection
from outfitter_service.core import delays
from outfitter_service.query.errors import OutfitterCliError
from outfitter_service.query.held_devices import HeldDevices

log = logging.getLogger("outfitter.query")

READ_WITHIN = 120.0
"""Seconds without a record of a partition that is being read. A quota may make a long one take longer in all."""

_AT_ONCE = 8
"""Partitions that are read at the same time."""

R = TypeVar("R", bound=StateRecord)


class StoredAllocation(NamedTuple):
    """A record, and its bytes on the wire (with fields of later versions)."""

    record: Allocation
    wire: bytes


class RecordChange(NamedTuple):
    """A change of a key of the ledger. `record` None: the key was deleted, or its type is unknown."""

    message: Message
    record: LedgerRecord | None

    @property
    def key(self) -> str:
        return (self.message.key or b"").decode("utf-8", "replace")


class _HostRecords:
    """The newest records of one host by key: `allocations`, and `others`. `held`: the devices of the allocations."""

    def __init__(self) -> None:
        self.allocations: dict[str, StoredAllocation] = {}
        self.others: dict[str, StateRecord] = {}
        self.held = HeldDevices()

    def remove(self, key: str) -> None:
        self.allocations.pop(key, None)
        self.others.pop(key, None)


class LedgerView:
    """The newest record of every key, by host."""

    def __init__(self) -> None:
        self._by_host: dict[str, _HostRecords] = {}
        self.checkpoints: dict[str, Checkpoint] = {}
        """The newest checkpoint of each writer."""

    def __contains__(self, host: str) -> bool:
        """Whether there is a record of the host."""
        return host in self._by_host

    def put(self, change: RecordChange) -> None:
        """Replace an earlier record of the key."""
        if isinstance(change.record, Checkpoint):
            self.checkpoints[change.record.writer] = change.record
            return
        host = keys.host_of(change.message.key or b"")
        if host is None:
            return
        records = self._by_host.setdefault(host, _HostRecords())
        records.remove(change.key)
        match change.record:
            case Allocation():
                records.allocations[change.key] = StoredAllocation(change.record, change.message.value or b"")
                records.held.put(change.key, change.record)
                return
            case None:
                if not records.allocations and not records.others:
                    del self._by_host[host]
            case _:
                records.others[change.key] = change.record
        records.held.put(change.key, None)

    def of(self, kind: type[R], host: str | None = None) -> list[R]:
        """The records of one kind, which is not `Allocation`, of all hosts or of one."""
        chosen = self._by_host.values() if host is None else self._of_host(host)
        return [record for records in chosen for record in records.others.values() if isinstance(record, kind)]

    @property
    def hosts(self) -> dict[str, Host]:
        """The hosts' records by their names."""
        return {record.host: record for record in self.of(Host)}

    def hosts_record(self, host: str) -> Host | None:
        """The record of one host."""
        return next(iter(self.of(Host, host)), None)

    @property
    def names(self) -> list[str]:
        """The names of all hosts of which there is a record, also of hosts without a record of their own."""
        return list(self._by_host)

    @property
    def allocations(self) -> list[StoredAllocation]:
        """All allocations, also ended ones, by host and then in the order of their registrations."""
        return [stored for host in sorted(self._by_host) for stored in self.allocations_of(host)]

    def allocations_of(self, host: str) -> list[StoredAllocation]:
        """The allocations of one host, also ended ones, in the order of their registrations."""
        allocations = [stored for records in self._of_host(host) for stored in records.allocations.values()]
        return sorted(allocations, key=_order)

    def of_worker(self, worker: str, incarnation: str | None = None) -> list[Allocation]:
        """The newest allocation of workers with this name on each host, or that of one incarnation."""
        by_host = {
            stored.record.host: stored.record
            for stored in self.allocations
            if stored.record.worker == worker and incarnation in {None, stored.record.incarnation}
        }
        return list(by_host.values())

    def held(self, host: str) -> HeldDevices:
        """The held devices of a host, by each of their names."""
        records = self._by_host.get(host)
        return HeldDevices() if records is None else records.held

    def live(self, host: str) -> Iterator[Allocation]:
        """The allocations of a host that are not over."""
        return (stored.record for stored in self.allocations_of(host) if stored.record.state not in FINAL_STATES)

    def _of_host(self, host: str) -> list[_HostRecords]:
        records = self._by_host.get(host)
        return [] if records is None else [records]


def _order(stored: StoredAllocation) -> tuple[int, str]:
    """The order of registrations, as managers have it."""
    return stored.record.source.offset, stored.record.key


def held_by_resource(record: Allocation) -> dict[str, list[str]]:
    """The ids of the devices that count as held by this allocation."""
    is_holding = record.state in HOLDING_STATES
    return {
        name: [device["id"] for device in devices if is_holding and "id" in device]
        for name, devices in record.resources.items()
    }


def devices_in_words(record: Allocation) -> str:
    """The devices of an allocation, else its request: `gpu: 0, 1` or `gpu=2`."""
    if record.resources:
        return "; ".join(
            f"{name}: {', '.join(device.get('index', '?') for device in devices)}"
            for name, devices in record.resources.items()
        )
    return ", ".join(f"{name}={amount}" for name, amount in record.request.amounts.items())


def illness_in_words(record: Allocation) -> str | None:
    """Which of the devices that a worker holds are not healthy, by the record's last infos; None: all are."""
    return ill_in_words(record.resources) if record.state in HOLDING_STATES else None


def ill_in_words(resources: Mapping[str, Iterable[Mapping[str, str]]]) -> str | None:
    """Which of these infos' devices are not healthy; None: all are."""
    ill = [
        f"{name} {device.get('index', '?')} is {device['health']}"
        + (f" ({device['health.reason']})" if "health.reason" in device else "")
        for name, devices in resources.items()
        for device in devices
        if device.get("health", Health.HEALTHY) != Health.HEALTHY
    ]
    return "; ".join(ill) or None


def waiting_in_words(record: Allocation) -> str:
    """Why a worker waits: its state, its request, the reason, and its position in the queue."""
    position = "" if record.queue_position is None else f" (position {record.queue_position} in the queue)"
    request = ", ".join(f"{name}={amount}" for name, amount in record.request.amounts.items())
    default = "its driver prepares the devices" if record.state == AllocationState.PREPARING else "no reason"
    return f"{record.worker}: {record.state}, {request}: {record.reason or default}{position}"


def awaited_owner(record: Allocation, host: Host | None) -> str | None:
    """Why the manager waits for the end of a process that it cannot see, for people; None: it does not. `host`: the
    record of the allocation's host."""
    owner = record.request.owner
    if owner is None or not record.request.waits_for_owner or record.state not in HOLDING_STATES:
        return None
    if host is None or (host.manager.watches(owner) and not record.unwatched):
        return None
    return (
        f"its process {owner.pid} is out of the manager's sight, and nobody sends heartbeats for it: it keeps its "
        "devices until a manager sees its end, the machine restarts, or somebody deregisters it"
    )


def awaits_unseen_survivors(record: Allocation, host: Host | None) -> bool:
    """Whether the devices stay held for processes that the worker left behind, and that the manager cannot see. `host`:
    the record of the allocation's host."""
    return host is not None and delays.is_out_of_sight(record, (host.manager.boot_id, host.manager.pid_ns or None))


def warnings_of(record: Allocation) -> list[str]:
    """The manager's warnings about the registration."""
    return record.warnings or []


def decode(message: Message) -> RecordChange:
    """Decode a message of the allocations topic, as far as this version knows its type."""
    if message.value is None:
        return RecordChange(message, None)
    try:
        return RecordChange(message, codec.decode_ledger(message.value, key=message.key))
    except codec.UnknownTypeError:
        return RecordChange(message, None)
    except codec.WireError as error:
        log.warning("skipped a record that cannot be read: %s", error)
        return RecordChange(message, None)


async def read(bus: Bus, cluster: str, host: str | None = None) -> LedgerView:
    """The current committed ledger of all hosts, or of `host` only.

    Raises:
        BusError: see the bus port; UnknownTopicError if the cluster does not exist.
        OutfitterCliError: no record came within `READ_WITHIN`.
    """
    topic = names.topics(cluster).allocations
    changes: list[list[RecordChange]] = []
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def read_one(partition: int, into: list[RecordChange]) -> None:
        async with limiter:
            into += await read_partition(bus, topic, partition)

    async with side_by_side() as group:
        for partition in await partitions(bus, cluster, host):
            changes.append([])
            group.start_soon(read_one, partition, changes[-1])
    ledger = LedgerView()
    for change in (change for of_partition in changes for change in of_partition):
        if change.message.value is None:
            continue  # version 0.2 may have moved its host to another partition, which has its records
        if host is None or is_about(change, host) or isinstance(change.record, Checkpoint):
            ledger.put(change)
    return ledger


async def partitions(bus: Bus, cluster: str, host: str | None) -> Iterable[int]:
    """The partitions to read: that of `host`, or all."""
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    return range(count) if host is None else (partition_of(host, count),)


def is_about(change: RecordChange, host: str) -> bool:
    """Whether a record is about `host`."""
    return keys.host_of(change.message.key or b"") == host


async def read_partition(bus: Bus, topic: str, partition: int) -> list[RecordChange]:
    """The last message of each key, as of a moment between two commits.

    Raises:
        BusError: see the bus port.
        OutfitterCliError: no record came within `READ_WITHIN`.
    """
    newest: dict[bytes | None, Message] = {}
    async for message in messages_of(bus, topic, partition):
        newest.pop(message.key, None)
        newest[message.key] = message
    return [decode(message) for message in newest.values()]


async def messages_of(bus: Bus, topic: str, partition: int, *, committed: bool = True) -> AsyncIterator[Message]:
    """All messages of now in a partition, in their order. `committed`: see `Bus.open_reader`.

    Raises:
        BusError: see the bus port.
        OutfitterCliError: no record came within `READ_WITHIN`.
    """
    deadline = bus.patience.now() + READ_WITHIN
    end = await bus.stable_end(topic, partition) if committed else (await bus.offsets(topic, partition))[1]
    async with await bus.open_reader(topic, partition, start=None, committed=committed) as reader:
        async for messages in read_to(reader, end):
            if messages:
                deadline = bus.patience.now() + READ_WITHIN
            elif bus.patience.now() > deadline:
                raise OutfitterCliError(f"partition {partition} of {topic} gave no record within {READ_WITHIN:g} s")
            for message in messages:
                yield message


def opened(connection: BusConnection) -> AbstractAsyncContextManager[Bus]:
    """The bus of a connection, open during the block. It creates nothing."""
    return buses.connect(connection.bus, connection.login, create=Create.NOTHING)


async def read_from(connection: BusConnection, host: str | None) -> LedgerView:
    """Connect, and read the records of `host` or of all hosts; see `read`."""
    async with opened(connection) as bus:
        return await read(bus, connection.cluster, host)


def as_on_the_wire(records: Iterable[StoredAllocation]) -> list[msgspec.Raw]:
    """The records for `output.print_json`, byte for byte."""
    return [msgspec.Raw(stored.wire) for stored in records]
