"""The ledger in memory: all records of one writer, and the changes since its last commit.

The ledger is a function of its records and of the drivers' last reports; `apply` and, for plain grants, `grant` are all
that changes it. Records are decided on the state as it will be: what was applied is sealed into a commit, and becomes
the truth when that has returned (`settle`); while it is under way the next one is decided on top of it. Until then
all of it can be taken back (`rollback`). It decides nothing.
"""

from __future__ import annotations

from msgspec import Struct

from outfitter_proto.keys import StateKey, host_of
from outfitter_proto.records import Allocation, StateRecord
from outfitter_service.core.state.host_state import HostState, Inventory, QueueEntry, exclusive_ids
from outfitter_service.core.state.record_kinds import KINDS

__all__ = [
    "Change",
    "DropAllocation",
    "DropRecord",
    "HostState",
    "Inventory",
    "Ledger",
    "PutAllocation",
    "PutRecord",
    "SetInventory",
    "SetScan",
    "exclusive_ids",
]


class PutAllocation(Struct, frozen=True, gc=False):
    """`key` is the record's own, which takes a third of a microsecond to spell each time, and `value` the record as it
    is written, where somebody has encoded it already."""

    key: str
    record: Allocation
    value: bytes | None = None


class DropAllocation(Struct, frozen=True, gc=False):
    key: str


class PutRecord(Struct, frozen=True, gc=False):
    """Put a record of one of `KINDS` under its own key."""

    record: StateRecord

    @property
    def key(self) -> StateKey:
        return self.record.key

    @property
    def host(self) -> str:
        return self.record.host


class DropRecord(Struct, frozen=True, gc=False):
    """Delete the record of one of `KINDS`."""

    key: StateKey

    @property
    def host(self) -> str:
        return host_of(self.key.encode()) or ""


class SetInventory(Struct, frozen=True, gc=False):
    host: str
    resource: str
    inventory: Inventory


class SetScan(Struct, frozen=True, gc=False):
    """From where on a host's waiters are to be looked at anew; None: nowhere."""

    host: str
    start: QueueEntry | None


Change = PutAllocation | DropAllocation | PutRecord | DropRecord | SetInventory | SetScan


class Ledger:
    """All records of one writer, with the changes since the last commit; `token` is the last fencing token of them."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostState] = {}
        self.allocations: dict[str, Allocation] = {}
        self.records: dict[str, StateRecord] = {}
        """Those of `KINDS`, by key."""
        self.reported: set[str] = set()
        """Hosts whose inventories may be others than when somebody emptied this."""
        self.token = 0
        self.commits = 0
        self._undo: list[Change] = []
        self._sealed: list[Change] = []
        self._sealing = False
        self._sealed_token = 0
        self._settled_token = 0

    def host_state(self, host: str) -> HostState:
        """The state of `host`, made empty if it is new."""
        host_state = self.hosts.get(host)
        if host_state is None:
            host_state = self.hosts[host] = HostState(host)
        return host_state

    def forget(self, host: str) -> None:
        """Drop the state of a host without any record."""
        host_state = self.hosts.get(host)
        if host_state is not None and host_state.record is None and not host_state.incarnations:
            del self.hosts[host]
            self.reported.add(host)

    # --- changing ---

    def change(self, change: Change) -> str:
        """Apply one change; `rollback` takes it back until `settle` makes it the truth. Returns the key of the record
        that it puts or drops, or nothing."""
        # `type is`: a class pattern costs a microsecond where the answer is no
        if type(change) is not PutAllocation:
            self._undo.append(self._apply(change))
            return _key(change)
        key, record = change.key, change.record
        if record.token is not None and record.token > self.token:
            self.token = record.token
        self._undo.append(self._put(key, record))
        return key

    def grant(self, key: str, record: Allocation, names: list[str]) -> None:
        """Put the record of a worker that is new, with the next token, which has devices to itself that nobody had,
        by their canonical names. It comes to what `change` does, which would ask for all that is known here."""
        self.token += 1
        self.allocations[key] = record
        self.hosts[record.host].grant(key, record, names)
        self._undo.append(DropAllocation(key))

    def restore(self, change: Change) -> None:
        """Apply a change that is already committed."""
        if type(change) is PutAllocation:
            self._put(change.key, change.record)
        else:
            self._apply(change)

    def resume(self, *, commit: int, token: int) -> None:
        """Go on after the commit of that number, whose last fencing token was `token`."""
        self.commits = commit
        self.token = self._sealed_token = self._settled_token = token

    def clear(self) -> None:
        """Hold nothing any more."""
        self.hosts.clear()
        self.allocations.clear()
        self.records.clear()
        self.reported.clear()
        self._undo, self._sealed = [], []

    def keys(self) -> list[str]:
        """The keys of all records."""
        return [*self.records, *self.allocations]

    def record(self, key: str) -> Allocation | StateRecord | None:
        """What stands under a key."""
        return self.allocations.get(key) or self.records.get(key)

    @property
    def dirty(self) -> bool:
        return bool(self._undo or self._sealed)

    def seal(self) -> None:
        """What was applied goes into a commit, the next of this writer; what is applied from now on, into the one after
        it. One commit at a time."""
        self._sealed, self._undo = self._undo, []
        self._sealed_token = self.token
        self._sealing = True
        self.commits += 1

    def settle(self) -> None:
        """What was sealed is committed."""
        self._sealed = []
        self._settled_token = self._sealed_token
        self._sealing = False

    def keep(self) -> None:
        """What was applied since needs no commit: it is in no record."""
        self._undo.clear()

    def rollback(self) -> None:
        """Take back everything that was applied since the last commit, the sealed one under way included."""
        for changes in (self._undo, self._sealed):
            while changes:
                self._apply(changes.pop())
        self.token = self._sealed_token = self._settled_token
        if self._sealing:
            self._sealing = False
            self.commits -= 1

    def _apply(self, change: Change) -> Change:
        """Apply one change and return the one that takes it back."""
        match change:
            case PutAllocation(key=key, record=record):
                return self._put(key, record)
            case DropAllocation(key=key):
                return self._drop(key)
            case SetInventory(host=host, resource=resource, inventory=inventory):
                host_state = self.host_state(host)
                before = host_state.inventory(resource)
                host_state.set_inventory(resource, inventory)
                self.reported.add(host)
                return SetInventory(host, resource, before)
            case SetScan(host=host, start=start):
                host_state = self.host_state(host)
                first, host_state.scan_from = host_state.scan_from, start
                return SetScan(host, first)
            case PutRecord(record=other):
                return self._put_record(other)
            case DropRecord(key=key):
                return self._drop_record(key)

    def _put(self, key: str, record: Allocation) -> Change:
        host_state = self.hosts.get(record.host) or self.host_state(record.host)
        old = self.allocations.get(key)
        if old is not None:
            host_state.unindex(key, old)
        self.allocations[key] = record
        host_state.index(key, record)
        return DropAllocation(key) if old is None else PutAllocation(key, old)

    def _drop(self, key: str) -> Change:
        old = self.allocations.pop(key)
        host_state = self.hosts[old.host]
        host_state.unindex(key, old)
        host_state.forget(key, old)
        return PutAllocation(key, old)

    def _put_record(self, record: StateRecord) -> Change:
        key = record.key
        old = self.records.get(key)
        self.records[key] = record
        self._index(record, old, record)
        return DropRecord(key) if old is None else PutRecord(old)

    def _drop_record(self, key: StateKey) -> Change:
        old = self.records.pop(key)
        self._index(old, old, None)
        return PutRecord(old)

    def _index(self, of: StateRecord, before: StateRecord | None, after: StateRecord | None) -> None:
        index = KINDS[type(of)].index
        if index is not None:
            index(self.host_state(of.host), before, after)


def _key(change: Change) -> str:
    """The key of the record that a change puts or drops; empty for all else."""
    match change:
        case PutAllocation() | DropAllocation() | PutRecord() | DropRecord():
            return change.key
        case _:
            return ""
