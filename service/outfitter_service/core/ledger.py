"""The ledger in memory: all records of one writer, and the indexes that decisions look at.

The ledger is a function of its records and of the drivers' last reports; `apply` is the only thing that
changes it, index by index. What was applied since the last commit can be taken back (`rollback`): records
are decided on the state as it will be, and that state becomes the truth only when the commit returns.
It decides nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

from msgspec import Struct

from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Device,
    Health,
    Host,
    ReasonCode,
)
from outfitter_service.core.model import DriverFailure, KnownDevice


class Inventory(Struct, frozen=True, kw_only=True):
    """What a driver last said of one resource of one host.

    `reported`: it has said something at all. `asked` is the amount an on-demand driver was last asked for and
    `asking` the amount it is being asked for now (0: it is not). `healthy` counts the healthy devices.
    """

    devices: tuple[KnownDevice, ...] = ()
    failure: DriverFailure | None = None
    reported: bool = False
    asked: int = 0
    asking: int = 0
    healthy: int = 0

    @classmethod
    def of(cls, devices: tuple[KnownDevice, ...], *, asked: int = 0) -> Inventory:
        """The inventory that a driver's report amounts to."""
        healthy = sum(device.health == Health.HEALTHY for device in devices)
        return cls(devices=devices, reported=True, asked=asked, healthy=healthy)


NOT_REPORTED = Inventory()

QueueEntry = tuple[int, int, str]
"""(-priority, offset of the first registration, allocation key): the queue's order."""


def queue_entry(record: Allocation) -> QueueEntry:
    return (-record.request.priority, record.source.offset, record.key)


def exclusive_ids(record: Allocation) -> Iterator[str]:
    """The canonical ids of the devices that a record has to itself."""
    for resource, infos in record.resources.items():
        if resource not in record.shared:
            for info in infos:
                yield info["id"]


# --- changes -------------------------------------------------------------------------------------------


class PutAllocation(Struct, frozen=True):
    record: Allocation


class DropAllocation(Struct, frozen=True):
    key: str


class PutHost(Struct, frozen=True):
    record: Host


class DropHost(Struct, frozen=True):
    host: str


class SetInventory(Struct, frozen=True):
    host: str
    resource: str
    inventory: Inventory


class SetToken(Struct, frozen=True):
    token: int


Change = PutAllocation | DropAllocation | PutHost | DropHost | SetInventory | SetToken


# --- one host -------------------------------------------------------------------------------------------


class HostBook:
    """One host's part of the ledger. Read it freely; only `Ledger.apply` changes it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.record: Host | None = None
        self.inventories: dict[str, Inventory] = {}
        self.held: dict[str, str] = {}
        self.queue: list[QueueEntry] = []
        self.current: dict[str, str] = {}
        self.incarnations: dict[str, set[str]] = {}
        self.finals: dict[str, None] = {}
        self.busy: dict[str, int] = {}
        self.free: dict[str, list[int]] = {}
        self._places: dict[str, list[tuple[str, int]]] = {}

    def inventory(self, resource: str) -> Inventory:
        return self.inventories.get(resource, NOT_REPORTED)

    def held_of(self, resource: str) -> int:
        """How many of a resource's known devices are held."""
        return sum(self._is_held(device) for device in self.inventory(resource).devices)

    def positions(self, name: str, resource: str) -> list[int]:
        """Where the device called `name` (id or alias) stands in a resource's inventory."""
        return [position for where, position in self._places.get(name, ()) if where == resource]

    def _is_held(self, device: KnownDevice) -> bool:
        return device.id in self.held or any(alias in self.held for alias in device.aliases)

    # free positions are kept in descending order, so that the device a driver prefers is the last item

    def set_inventory(self, resource: str, inventory: Inventory) -> None:
        before = self.inventories.get(resource)
        self.inventories[resource] = inventory
        if before is not None and before.devices is inventory.devices and before.failure == inventory.failure:
            return
        for places in self._places.values():
            places[:] = [place for place in places if place[0] != resource]
        for position, device in enumerate(inventory.devices):
            for name in (device.id, *device.aliases):
                self._places.setdefault(name, []).append((resource, position))
        self.free[resource] = [
            position
            for position in range(len(inventory.devices) - 1, -1, -1)
            if inventory.devices[position].health == Health.HEALTHY and not self._is_held(inventory.devices[position])
        ]

    def hold(self, device_id: str, key: str) -> None:
        self.held[device_id] = key
        for resource, position in self._places.get(device_id, ()):
            free = self.free[resource]
            at = bisect.bisect_left(free, -position, key=lambda item: -item)
            if at < len(free) and free[at] == position:
                del free[at]

    def let_go(self, device_id: str) -> None:
        del self.held[device_id]
        for resource, position in self._places.get(device_id, ()):
            device = self.inventories[resource].devices[position]
            if device.health == Health.HEALTHY and not self._is_held(device):
                free = self.free[resource]
                at = bisect.bisect_left(free, -position, key=lambda item: -item)
                if at == len(free) or free[at] != position:
                    free.insert(at, position)


class Ledger:
    """All records of one writer, with the changes since the last commit."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostBook] = {}
        self.allocations: dict[str, Allocation] = {}
        self.devices: dict[str, Device] = {}
        self.token = 0
        self.commits = 0
        self._undo: list[Change] = []
        self._touched: dict[str, None] = {}

    def book(self, host: str) -> HostBook:
        """The book of `host`, made empty if it is new."""
        book = self.hosts.get(host)
        if book is None:
            book = self.hosts[host] = HostBook(host)
        return book

    # --- changing ---

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes; `rollback` takes them back until `settle` makes them the truth."""
        for change in changes:
            self._undo.append(self._apply(change))

    def restore(self, change: Change) -> None:
        """Apply a change that is already committed."""
        self._apply(change)

    def touched(self) -> list[tuple[str, Allocation | Host | None]]:
        """The keys changed since the last commit, with what is under them now (None: a tombstone)."""
        return [(key, self._under(key)) for key in self._touched]

    @property
    def dirty(self) -> bool:
        return bool(self._undo)

    def settle(self) -> None:
        """What was applied is committed."""
        self._undo.clear()
        self._touched.clear()

    def rollback(self) -> None:
        """Take back everything that was applied since the last commit."""
        undo, self._undo = self._undo, []
        for change in reversed(undo):
            self._apply(change)
        self._touched.clear()

    def committed(self) -> Iterator[Allocation]:
        """The allocations as last committed, whatever is being decided (for metrics and status)."""
        before: dict[str, Allocation | None] = {}
        for change in self._undo:
            if isinstance(change, PutAllocation):
                before.setdefault(change.record.key, change.record)
            elif isinstance(change, DropAllocation):
                before.setdefault(change.key, None)
        for key, record in self.allocations.items():
            if key not in before:
                yield record
        for old in before.values():
            if old is not None:
                yield old

    def _under(self, key: str) -> Allocation | Host | None:
        if key.startswith("@host/"):
            book = self.hosts.get(key.removeprefix("@host/"))
            return book.record if book else None
        return self.allocations.get(key)

    def _apply(self, change: Change) -> Change:
        """Apply one change and return the one that takes it back."""
        if isinstance(change, PutAllocation):
            return self._put(change.record)
        if isinstance(change, DropAllocation):
            return self._drop(change.key)
        if isinstance(change, SetInventory):
            book = self.book(change.host)
            before = book.inventory(change.resource)
            book.set_inventory(change.resource, change.inventory)
            return SetInventory(change.host, change.resource, before)
        if isinstance(change, SetToken):
            token, self.token = self.token, change.token
            return SetToken(token)
        host = change.host if isinstance(change, DropHost) else change.record.host
        book = self.book(host)
        old, book.record = book.record, None if isinstance(change, DropHost) else change.record
        self._touched[f"@host/{host}"] = None
        return DropHost(host) if old is None else PutHost(old)

    def _put(self, record: Allocation) -> Change:
        key = record.key
        book = self.book(record.host)
        old = self.allocations.get(key)
        if old is not None:
            self._unindex(book, key, old)
        self.allocations[key] = record
        self._index(book, key, record)
        self._touched[key] = None
        return DropAllocation(key) if old is None else PutAllocation(old)

    def _drop(self, key: str) -> Change:
        old = self.allocations.pop(key)
        book = self.hosts[old.host]
        self._unindex(book, key, old)
        incarnations = book.incarnations[old.worker]
        incarnations.discard(key)
        if book.current.get(old.worker) == key:
            newest = max(incarnations, key=lambda k: self.allocations[k].source.offset, default=None)
            if newest is None:
                del book.current[old.worker]
            else:
                book.current[old.worker] = newest
        if not incarnations:
            del book.incarnations[old.worker]
        self._touched[key] = None
        return PutAllocation(old)

    def _index(self, book: HostBook, key: str, record: Allocation) -> None:
        state = record.state
        book.incarnations.setdefault(record.worker, set()).add(key)
        newest = book.current.get(record.worker)
        if newest is None or self.allocations[newest].source.offset <= record.source.offset:
            book.current[record.worker] = key
        if state in HOLDING_STATES:
            for device_id in exclusive_ids(record):
                book.hold(device_id, key)
        elif state == AllocationState.PENDING:
            bisect.insort(book.queue, queue_entry(record))
            if record.reason_code == ReasonCode.BUSY:
                for resource in record.request.amounts:
                    book.busy[resource] = book.busy.get(resource, 0) + 1
        elif state in FINAL_STATES:
            book.finals[key] = None

    @staticmethod
    def _unindex(book: HostBook, key: str, record: Allocation) -> None:
        state = record.state
        if state in HOLDING_STATES:
            for device_id in exclusive_ids(record):
                if book.held.get(device_id) == key:
                    book.let_go(device_id)
        elif state == AllocationState.PENDING:
            entry = queue_entry(record)
            at = bisect.bisect_left(book.queue, entry)
            if at < len(book.queue) and book.queue[at] == entry:
                del book.queue[at]
            if record.reason_code == ReasonCode.BUSY:
                for resource in record.request.amounts:
                    book.busy[resource] -= 1
        elif state in FINAL_STATES:
            book.finals.pop(key, None)
