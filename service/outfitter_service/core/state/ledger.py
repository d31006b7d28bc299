"""The ledger in memory: all records of one writer, and the changes since its last commit.

The ledger is a function of its records and of the drivers' last reports. Only `change` and, for fast grants, `grant`
change it. `begin_commit` puts the applied changes into a commit, and `end_commit` makes them final when it has
returned. The next changes are decided and applied meanwhile. `rollback` undoes everything that is not final. The ledger
decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Struct

from outfitter_proto.keys import AllocationKey, StateKey, host_of
from outfitter_proto.records import NO_COMMIT, NO_TOKEN, Allocation, CommitNumber, StateRecord, Token
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.host_state import HostState, QueueEntry
from outfitter_service.core.state.record_kinds import CHOICES, KINDS, PARTS
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.states import PENDING


class PutAllocation(Struct, frozen=True, gc=False):
    """Put an allocation. `key`: the record's own key, given because making it takes a third of a microsecond. `value`:
    the encoded record, if it is encoded already."""

    key: AllocationKey
    record: Allocation
    value: bytes | None = None


class DropAllocation(Struct, frozen=True, gc=False):
    """Delete the allocation under `key`."""

    key: AllocationKey


class PutRecord(Struct, frozen=True, gc=False):
    """Put a record of one of `KINDS` under its own key. `value`: the encoded record, if it is encoded already."""

    record: StateRecord
    value: bytes | None = None

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
    """Replace the inventory of one `resource` on `host`. It is no record, so nothing is written."""

    host: str
    resource: str
    inventory: ResourceState


class SetScan(Struct, frozen=True, gc=False):
    """Have a host's queue evaluated again from the waiter `start` on (None: no evaluation is due). It is no record, so
    nothing is written."""

    host: str
    start: QueueEntry | None


LedgerChange = PutAllocation | DropAllocation | PutRecord | DropRecord | SetInventory | SetScan


class Ledger:
    """All records of one writer, with the changes since the last commit."""

    def __init__(self) -> None:
        self.hosts: dict[str, HostState] = {}
        self.allocations: dict[AllocationKey, Allocation] = {}
        self.records: dict[str, StateRecord] = {}
        """The other records, those of `KINDS`, by key."""
        self.changed_inventories: set[str] = set()
        """Hosts whose inventories may have changed since the last `take_changed_inventories`."""
        self.token = NO_TOKEN
        """The last fencing token."""
        self.commits = NO_COMMIT
        """The number of the last commit that has begun."""
        self.needs: frozenset[str] = frozenset()
        """What a manager must know to work on these records, and those before them; see `Checkpoint.needs`."""
        self._undo: list[LedgerChange] = []
        self._in_commit: list[LedgerChange] = []
        self._is_committing = False
        self._token_in_commit = NO_TOKEN
        self._committed_token = NO_TOKEN
        self._needs_in_commit = self._committed_needs = self.needs

    def host_state(self, host: str) -> HostState:
        """The state of `host`, made empty if it is new."""
        host_state = self.hosts.get(host)
        if host_state is None:
            host_state = self.hosts[host] = HostState(host)
        return host_state

    def forget(self, host: str) -> None:
        """Drop the state of a host without any record."""
        host_state = self.hosts.get(host)
        if host_state is None or host_state.record is not None:
            return
        if not host_state.runs.incarnations and not host_state.cordons:
            del self.hosts[host]
            self.changed_inventories.add(host)

    def take_changed_inventories(self) -> set[str]:
        """Remove and return the hosts whose inventories may have changed since the last call."""
        hosts, self.changed_inventories = self.changed_inventories, set()
        return hosts

    # --- changing ---

    def change(self, change: LedgerChange) -> str:
        """Apply one change, which `rollback` undoes until `end_commit` makes it final. Returns the key of the record
        that it puts or drops, or an empty text."""
        # `type is`: a class pattern costs a microsecond where the answer is no
        if type(change) is not PutAllocation:
            self._undo.append(self._apply(change))
            return _key(change)
        key, record = change.key, change.record
        if record.token is not None and record.token > self.token:
            self.token = record.token
        self._undo.append(self._put(key, record))
        return key

    def grant(self, key: AllocationKey, record: Allocation, names: list[CanonicalName]) -> None:
        """Put a new worker's record, with the next token. It holds exclusively the free devices with these canonical
        `names`. The result is that of `change`, in less time."""
        self.token += 1  # type: ignore[assignment]  # calling a NewType takes longer than the sum
        self.allocations[key] = record
        self.hosts[record.host].grant(key, record, names)
        self._undo.append(DropAllocation(key))

    def restore(self, change: LedgerChange) -> None:
        """Apply a change that is committed already."""
        if type(change) is PutAllocation:
            self._put(change.key, change.record)
        else:
            self._apply(change)

    def resume(self, *, commit: CommitNumber, token: Token, needs: Iterable[str] = ()) -> None:
        """Continue after the commit with that number, whose last fencing token was `token`. `needs`: as its checkpoint
        has them."""
        self.needs |= frozenset(needs)
        self._needs_in_commit = self._committed_needs = self.needs
        self.commits = commit
        self.token = self._token_in_commit = self._committed_token = token

    def clear(self) -> None:
        """Drop everything."""
        self.hosts.clear()
        self.allocations.clear()
        self.records.clear()
        self.changed_inventories.clear()
        self._undo, self._in_commit = [], []

    def keys(self) -> list[str]:
        """The keys of all records."""
        return [*self.records, *self.allocations]

    def record(self, key: str) -> Allocation | StateRecord | None:
        """The record under a key."""
        return self.allocations.get(key) or self.records.get(key)  # type: ignore[call-overload]  # a key of any kind

    def begin_commit(self) -> None:
        """Put the applied changes into this writer's next commit. Later changes go into the one after it. Only one
        commit is under way at a time."""
        self._in_commit, self._undo = self._undo, []
        self._token_in_commit, self._needs_in_commit = self.token, self.needs
        self._is_committing = True
        self.commits = CommitNumber(self.commits + 1)

    def end_commit(self) -> None:
        """The commit has returned."""
        self._in_commit = []
        self._committed_token, self._committed_needs = self._token_in_commit, self._needs_in_commit
        self._is_committing = False

    def discard_undo(self) -> None:
        """The changes since `begin_commit` are in no record, and need no commit."""
        self._undo.clear()

    def rollback(self) -> None:
        """Undo everything since the last finished commit, one under way included."""
        for changes in (self._undo, self._in_commit):
            while changes:
                self._apply(changes.pop())
        self.token = self._token_in_commit = self._committed_token
        self.needs = self._needs_in_commit = self._committed_needs
        if self._is_committing:
            self._is_committing = False
            self.commits = CommitNumber(self.commits - 1)

    def _apply(self, change: LedgerChange) -> LedgerChange:
        """Apply one change and return the one that undoes it."""
        match change:
            case PutAllocation(key=key, record=record):
                return self._put(key, record)
            case DropAllocation(key=key):
                return self._drop(key)
            case SetInventory(host=host, resource=resource, inventory=inventory):
                host_state = self.host_state(host)
                before = host_state.devices.inventory(resource)
                host_state.set_inventory(resource, inventory)
                self.changed_inventories.add(host)
                return SetInventory(host, resource, before)
            case SetScan(host=host, start=start):
                return SetScan(host, self.host_state(host).waiters.set_scan(start))
            case PutRecord(record=state_record):
                return self._put_record(state_record)
            case DropRecord(key=key):
                return self._drop_record(key)

    def _put(self, key: AllocationKey, record: Allocation) -> LedgerChange:
        host_state = self.hosts.get(record.host) or self.host_state(record.host)
        old = self.allocations.get(key)
        self.allocations[key] = record
        if record.uses is not UNSET:
            self.needs |= {PARTS}
        host_state.change(key, old, record)
        if record.request.choices is not UNSET and record.state == PENDING:
            self.needs |= {CHOICES}
        return DropAllocation(key) if old is None else PutAllocation(key, old)

    def _drop(self, key: AllocationKey) -> LedgerChange:
        old = self.allocations.pop(key)
        self.hosts[old.host].change(key, old, None)
        return PutAllocation(key, old)

    def _put_record(self, record: StateRecord) -> LedgerChange:
        key, needs = record.key, KINDS[type(record)].needs(record)
        if needs is not None:
            self.needs |= {needs}
        old = self.records.get(key)
        self.records[key] = record
        self._index(record, old, record)
        return DropRecord(key) if old is None else PutRecord(old)

    def _drop_record(self, key: StateKey) -> LedgerChange:
        old = self.records.pop(key)
        self._index(old, old, None)
        return PutRecord(old)

    def _index(self, record: StateRecord, before: StateRecord | None, after: StateRecord | None) -> None:
        """Update the indexes of the host of `record`, which is one of the records before and after a change."""
        index = KINDS[type(record)].index
        if index is not None:
            index(self.host_state(record.host), before, after)


def _key(change: LedgerChange) -> str:
    """The key of the record that a change puts or drops; an empty text for other changes."""
    match change:
        case PutAllocation() | DropAllocation() | PutRecord() | DropRecord():
            return change.key
        case _:
            return ""
