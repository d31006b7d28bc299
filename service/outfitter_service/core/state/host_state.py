"""One host's part of the ledger in memory: its records, and the indexes that decisions read.

The indexes are a function of the host's records and of its drivers' last reports, in whatever order they came. Only
`Ledger` changes a `HostState`, and a `HostState` decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Allocation, Host, ReasonCode
from outfitter_service.core.model import KnownDevice, SpecState
from outfitter_service.core.state.device_names import NO_CLASSES, CanonicalName, Classes, one_name_each
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.matching import ResourceSet, counts
from outfitter_service.core.state.resource_state import NOT_REPORTED, ResourceState
from outfitter_service.core.state.sizes import items, shared_devices
from outfitter_service.core.states import PENDING

CLOCK_SLACK = timedelta(seconds=2)
"""If a record began further in the future than this, it was written before the clock was set back."""

QueueEntry = tuple[int, int, AllocationKey]
"""(-priority, offset of the first registration, allocation key): the queue's order."""

Run = tuple[int, AllocationKey]
"""(offset of the first registration, allocation key) of one incarnation. The last in order is the newest."""

Ending = tuple[datetime, AllocationKey]
"""(when it ended or failed, allocation key). The first in order is deleted first."""


_NOT_IN_EFFECT = frozenset(SpecState) - {SpecState.OK}


def queue_entry(record: Allocation) -> QueueEntry:
    return (-record.request.priority, record.source.offset, record.key)


def exclusive_ids(record: Allocation) -> list[str]:
    """The ids of the devices that a record holds exclusively."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each grant
    return ids


def shared_ids(record: Allocation) -> list[str]:
    """The ids of the devices that a record shares with others."""
    return [info["id"] for resource in record.shared for info in record.resources.get(resource, ())]


class Tally(dict[CanonicalName, int]):
    """Counts by device, without devices that count zero."""

    __slots__ = ()

    def add(self, name: CanonicalName, count: int) -> int:
        total = self.get(name, 0) + count
        if total:
            self[name] = total
        else:
            self.pop(name, None)
        return total


class HostState:
    """One host's records and indexes.

    Devices: `free_lists` by resource, and in `shown` by device. `distinct`: no device is in two of them; `overlapping`
    has the resources for which that is not so. `classes` says which names mean one device. `has_refused`: the names of
    some resource have no room in the record. `has_old_names`: the record has names of resources that are not in effect
    any more; it has them while somebody holds a device.

    Holders: `live` records hold devices; `without_exclusive` counts those with no exclusive device. `locks` and
    `sharers` count by canonical name the live records that hold a device exclusively or share it. `suspects`: keys of
    records because of which an inventory holds back devices.

    Waiters: `queue` has every pending record in order, `waiting` the same by requested resource. `claims`: those whose
    devices are busy; later workers leave these devices to them. `unanswered`: those that wait for a driver's answer.
    `scan_from`: the first waiter whose evaluation is due (None: no evaluation is due). `deadlines`: when waiters with a
    `wait_s` fail, unless they wait for a driver's answer. `waiting_since`: since when waiters with a `wait_s` have
    waited.

    `items`: those of the requests of live and waiting records, see `sizes.items`, and their `sizes.shared_devices`.

    `incarnations`: all retained incarnations of each worker, the newest last. They are in a tuple: the garbage
    collector traverses a tuple of texts and numbers only once, but a list in each collection. `endings`: the final
    records, the oldest first, whatever the clock did; `past`: the same by worker.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self.record: Host | None = None
        self.inventories: dict[str, ResourceState] = {}
        self.suspects: frozenset[AllocationKey] = frozenset()
        self.free_lists: dict[str, FreeList] = {}
        self.shown: dict[CanonicalName, tuple[FreeList, ...]] = {}
        self.distinct = True
        self.overlapping: frozenset[str] = frozenset()
        self.live: dict[AllocationKey, Allocation] = {}
        self.without_exclusive = 0
        self.locks = Tally()
        self.sharers = Tally()
        self.queue: list[QueueEntry] = []
        self.waiting: dict[str, list[QueueEntry]] = {}
        self.claims: dict[str, list[QueueEntry]] = {}
        self.unanswered: dict[str, list[QueueEntry]] = {}
        self.scan_from: QueueEntry | None = None
        self.deadlines: list[tuple[datetime, AllocationKey]] = []
        self.waiting_since: list[tuple[datetime, AllocationKey]] = []
        self.items = 0
        self.incarnations: dict[str, tuple[Run, ...]] = {}
        self.past: dict[str, list[Ending]] = {}
        self.endings: list[Ending] = []
        self.classes: Classes = NO_CLASSES
        self.has_refused = False
        self.has_old_names = False
        self._same: dict[str, CanonicalName] = {}
        self._counts: dict[bool, dict[ResourceSet, int]] = {}

    def inventory(self, resource: str) -> ResourceState:
        return self.inventories.get(resource, NOT_REPORTED)

    def canonical(self, name: str) -> CanonicalName:
        """The one name that stands for all names of a device in the host's inventories."""
        return self._same.get(name, name)  # type: ignore[arg-type]  # without another name it stands for itself

    @property
    def synonyms(self) -> Mapping[str, CanonicalName]:
        """The names that `canonical` replaces. A change makes a new object."""
        return self._same

    @property
    def shows_what_is_held(self) -> bool:
        """Whether drivers report every held device."""
        shown = self.shown.keys()
        return self.locks.keys() <= shown and self.sharers.keys() <= shown

    def names(self, record: Allocation, ids: list[str]) -> list[CanonicalName]:
        """The canonical names of a record's devices; several for a device whose names no inventory connects (yet)."""
        same = self._same
        aliases = record.aliases
        if aliases is UNSET:
            if not same:
                return ids  # type: ignore[return-value]  # no device of the host has another name
            return [same.get(device_id, device_id) for device_id in ids]  # type: ignore[arg-type]  # as in `canonical`
        return [
            name
            for device_id in ids
            for name in {same.get(other, other) for other in (device_id, *aliases.get(device_id, ()))}
        ]

    def unused(self, name: CanonicalName) -> bool:
        """Whether nobody holds the device."""
        return name not in self.locks and name not in self.sharers

    def has_due(self, *, now: datetime, over_before: datetime, max_final: int) -> bool:
        """Whether a waiter's deadline has passed, a record ended before `over_before`, or more than `max_final` records
        are final."""
        if (
            self.final_count > max_final
            or (self.deadlines and self.deadlines[0][0] <= now)
            or self.scan_from is not None
        ):
            return True
        return (bool(self.endings) and self.endings[0][0] < over_before) or self.is_ahead(now)

    @property
    def final_count(self) -> int:
        """How many of the host's records are final."""
        return len(self.endings)

    def is_ahead(self, now: datetime) -> bool:
        """Whether a record began in the future. Then the clock has been set back."""
        limit = now + CLOCK_SLACK
        return (
            (bool(self.endings) and self.endings[-1][0] > limit)
            or (bool(self.waiting_since) and self.waiting_since[-1][0] > limit)
            or (self.record is not None and self.record.since > limit)
        )

    def ahead(self, now: datetime, most: int) -> list[AllocationKey]:
        """The keys of records that ended, or began to wait, in the future; at most `most`."""
        limit = now + CLOCK_SLACK
        keys: list[AllocationKey] = []
        for entries in (self.endings, self.waiting_since):
            for since, key in reversed(entries):
                if since <= limit or len(keys) >= most:
                    break
                keys.append(key)
        return keys

    def is_idle(self, *, since: datetime) -> bool:
        """Whether no allocation of the host is retained, and its record has not changed since then."""
        return not self.incarnations and self.record is not None and self.record.since < since

    def set_scan(self, start: QueueEntry | None) -> QueueEntry | None:
        """Have the queue evaluated again from the waiter `start` on (None: no evaluation is due). Returns the start
        before."""
        before, self.scan_from = self.scan_from, start
        return before

    # --- inventories ---

    def set_inventory(self, resource: str, inventory: ResourceState) -> None:
        """Replace the inventory of a resource, and update the indexes of devices."""
        before, connected = self.inventory(resource), self.connected(resource)
        if inventory == NOT_REPORTED:
            self.inventories.pop(resource, None)
        else:
            self.inventories[resource] = inventory
        self.has_refused = any(state.refused is not None for state in self.inventories.values())
        self.suspects = frozenset(
            [state.suspect.key for state in self.inventories.values() if state.suspect is not None]
        )
        if (
            inventory.devices is before.devices
            and inventory.linked == before.linked
            and (inventory.reported == before.reported)
        ):
            return
        if connected or self.connected(resource):
            self._rename()
            return
        if inventory.devices:
            self.free_lists[resource] = self._free_list(resource, inventory.devices)
        else:
            self.free_lists.pop(resource, None)
        self._show()

    def _free_list(self, resource: str, devices: tuple[KnownDevice, ...]) -> FreeList:
        names = [self.canonical(device.id) for device in devices]
        return FreeList(resource, devices, names=names, classes=self.classes, unused=self.unused)

    def connected(self, resource: str) -> Sequence[Sequence[str]]:
        """The names of each device in one resource: as its driver reports them or, until the first report, as the
        host's record has them."""
        inventory = self.inventory(resource)
        if inventory.reported or self.record is None:
            return inventory.names
        recorded = self.record.resources.get(resource)
        if recorded is None or recorded.names is UNSET:
            return inventory.linked
        return [*inventory.linked, *recorded.names]

    def set_record(self, record: Host | None) -> Host | None:
        """Replace the host's record. Returns the one before."""
        before, names = self.record, self._recorded_names()
        self.record = record
        self.has_old_names = record is not None and any(
            inventory.state in _NOT_IN_EFFECT and inventory.names is not UNSET
            for inventory in record.resources.values()
        )
        if self._recorded_names() != names:
            self._rename()
        return before

    def _recorded_names(self) -> list[list[list[str]]]:
        """The names in the host's record, of resources whose drivers have not reported yet."""
        resources = self.record.resources if self.record is not None else {}
        return [
            recorded.names
            for resource, recorded in resources.items()
            if recorded.names is not UNSET and not self.inventory(resource).reported
        ]

    def _rename(self) -> None:
        """The aliases in some resource have changed. Compute again which names mean one device."""
        resources = {**self.inventories, **(self.record.resources if self.record is not None else {})}
        groups = [names for resource in resources for names in self.connected(resource)]
        self._same, self.classes = one_name_each(groups)
        self.locks = Tally()
        self.sharers = Tally()
        for record in self.live.values():
            for name in self.names(record, exclusive_ids(record)):
                self.locks.add(name, 1)
            for name in self.names(record, shared_ids(record)):
                self.sharers.add(name, 1)
        self.free_lists = {
            resource: self._free_list(resource, inventory.devices)
            for resource, inventory in self.inventories.items()
            if inventory.devices
        }
        self._show()

    def _show(self) -> None:
        """Compute again which free lists have each device. Nearly every device is in only one."""
        self.shown = {}
        for free_list in self.free_lists.values():
            alone = (free_list,)
            for name in free_list.positions:
                others = self.shown.get(name)
                self.shown[name] = (*others, free_list) if others else alone
        self.distinct = len(self.shown) == sum(len(free_list.devices) for free_list in self.free_lists.values())
        self.overlapping = frozenset()
        self._counts = {}
        if not self.distinct:
            several = {
                free_list.resource
                for free_lists in self.shown.values()
                if len(free_lists) > 1
                for free_list in free_lists
            }
            self.overlapping = frozenset(
                several | {name for name, free_list in self.free_lists.items() if free_list.repeats}
            )

    def device_counts(self, *, healthy: bool) -> Mapping[ResourceSet, int]:
        """How many devices each set of resources has in common. `healthy`: count only healthy devices."""
        by_resources = self._counts.get(healthy)
        if by_resources is None:
            by_resources = self._counts[healthy] = counts(
                tuple([free_list.resource for free_list in free_lists if not healthy or free_list.serves(name)])
                for name, free_lists in self.shown.items()
            )
        return by_resources

    # --- records ---

    def newest(self, worker: str) -> AllocationKey | None:
        """The key of a worker's newest incarnation among the retained ones."""
        incarnations = self.incarnations.get(worker)
        return incarnations[-1][1] if incarnations else None

    def index(self, key: AllocationKey, record: Allocation) -> None:
        """Add a record that is new or was unindexed before."""
        run = (record.source.offset, key)
        runs = self.incarnations.get(record.worker)
        if runs is None:  # nearly always
            self.incarnations[record.worker] = (run,)
        elif runs[-1] < run:
            self.incarnations[record.worker] = runs + (run,)  # noqa: RUF005 - unpacking copies a thousand runs thrice
        elif runs[(position := bisect_left(runs, run)) : position + 1] != (run,):
            self.incarnations[record.worker] = (*runs[:position], run, *runs[position:])
        state = record.state
        if state not in FINAL_STATES:
            self.items += items(record.request) + shared_devices(record)
        if state in HOLDING_STATES:
            self.live[key] = record
            self._hold(record, 1)
        elif state == PENDING:
            entry = queue_entry(record)
            insort(self.queue, entry)
            for index in self._indexes_of(record):
                for resource in record.request.amounts:
                    insort(index.setdefault(resource, []), entry)
            if record.wait_until is not None:
                if record.reason_code != ReasonCode.NOT_REPORTED:
                    insort(self.deadlines, (record.wait_until, key))
                insort(self.waiting_since, (record.since, key))
        elif state in FINAL_STATES:
            ending = (record.since, key)
            insort(self.endings, ending)
            insort(self.past.setdefault(record.worker, []), ending)

    def grant(self, key: AllocationKey, record: Allocation, names: list[CanonicalName]) -> None:
        """Add the first record of a worker. It has few items, and holds exclusively the devices that its resource's
        free list has offered.

        `names`: the canonical names of these devices. A name stands there once for each position that has it.
        """
        self.incarnations[record.worker] = ((record.source.offset, key),)
        self.live[key] = record
        if not names:
            self.without_exclusive += 1
        locks, shown = self.locks, self.shown
        if self.distinct:
            # a free device is in no other index, and a search there would take longer with more devices
            for name in names:
                locks[name] = 1
            for resource in record.resources:
                self.free_lists[resource].pop(len(names))
            return
        for name in names:
            locks[name] = locks.get(name, 0) + 1
            for free_list in shown.get(name, ()):
                free_list.remove(name)

    def unindex(self, key: AllocationKey, record: Allocation) -> None:
        """Remove what `index` added, except the worker's incarnations: those stay until `forget`."""
        state = record.state
        if state not in FINAL_STATES:
            self.items -= items(record.request) + shared_devices(record)
        if state in HOLDING_STATES:
            del self.live[key]
            self._hold(record, -1)
        elif state == PENDING:
            entry = queue_entry(record)
            del self.queue[bisect_left(self.queue, entry)]
            for index in self._indexes_of(record):
                for resource in record.request.amounts:
                    entries = index[resource]
                    del entries[bisect_left(entries, entry)]
                    if not entries:
                        del index[resource]
            if record.wait_until is not None:
                if record.reason_code != ReasonCode.NOT_REPORTED:
                    del self.deadlines[bisect_left(self.deadlines, (record.wait_until, key))]
                del self.waiting_since[bisect_left(self.waiting_since, (record.since, key))]
        elif state in FINAL_STATES:
            ending = (record.since, key)
            del self.endings[bisect_left(self.endings, ending)]
            past = self.past[record.worker]
            del past[bisect_left(past, ending)]
            if not past:
                del self.past[record.worker]

    def _indexes_of(self, record: Allocation) -> Iterable[dict[str, list[QueueEntry]]]:
        """The indexes by resource that a pending record is in."""
        if record.reason_code == ReasonCode.BUSY:
            return self.waiting, self.claims
        return (self.waiting, self.unanswered) if record.reason_code == ReasonCode.NOT_REPORTED else (self.waiting,)

    def forget(self, key: AllocationKey, record: Allocation) -> None:
        """The record is deleted: remove it from its worker's incarnations."""
        runs = self.incarnations[record.worker]
        position = bisect_left(runs, (record.source.offset, key))
        runs = runs[:position] + runs[position + 1 :] if position else runs[1:]
        if runs:
            self.incarnations[record.worker] = runs
        else:
            del self.incarnations[record.worker]

    def _hold(self, record: Allocation, count: int) -> None:
        """From now on a record holds its devices (`count` 1), or no longer (-1)."""
        alone = exclusive_ids(record)
        if alone:
            self._count(self.locks, self.names(record, alone), count)
        else:
            self.without_exclusive += count
        if record.shared:
            self._count(self.sharers, self.names(record, shared_ids(record)), count)

    def _count(self, tally: Tally, names: list[CanonicalName], count: int) -> None:
        for name in names:
            used = tally.add(name, count) or name in self.locks or name in self.sharers
            for free_list in self.shown.get(name, ()):
                if used:
                    free_list.remove(name)
                else:
                    free_list.put_back(name)
