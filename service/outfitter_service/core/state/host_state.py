"""One host's part of the ledger in memory: its record, and four indexes of its allocations that decisions read.

The indexes are a function of the host's records and of its drivers' last reports, in whatever order they came. Only
`Ledger` changes a `HostState`, and a `HostState` decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from datetime import datetime, timedelta
from typing import Any

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Allocation, Cordon, Host, ReasonCode
from outfitter_service.core.state.device_index import DeviceIndex
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.state.sizes import items, shared_devices
from outfitter_service.core.state.wants import MOST_WANTS, NO_WANTS, Want, wants_of
from outfitter_service.core.states import PENDING


def has_exclusive(record: Allocation) -> bool:
    """Whether a record holds a device exclusively."""
    shared = record.shared
    return any(infos and resource not in shared for resource, infos in record.resources.items())


class HolderIndex:
    """The holders of one host. It is a function of the live records."""

    def __init__(self) -> None:
        self.live: dict[AllocationKey, Allocation] = {}
        """All of them, by key."""
        self.without_exclusive = 0
        """How many hold no exclusive device."""
        self.items = 0
        """Those of their requests, and their shared devices; see `sizes.items` and `sizes.shared_devices`."""

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a live record by another one. None: there is none."""
        if before is not None:
            del self.live[key]
            self._count(before, -1)
        if after is not None:
            self.live[key] = after
            self._count(after, 1)

    def _count(self, record: Allocation, count: int) -> None:
        self.items += count * (items(record.request) + shared_devices(record))
        if not has_exclusive(record):
            self.without_exclusive += count


QueueEntry = tuple[int, int, AllocationKey]
"""(-priority, offset of the first registration, allocation key): the queue's order."""


def queue_entry(record: Allocation) -> QueueEntry:
    return (-record.request.priority, record.source.offset, record.key)


class WaiterIndex:
    """The waiters of one host. It is a function of the pending records, but for `scan_from`."""

    def __init__(self) -> None:
        self.queue: list[QueueEntry] = []
        """Every waiter, in order."""
        self.waiting: dict[str, list[QueueEntry]] = {}
        """The same by requested resource."""
        self.claims: dict[str, list[QueueEntry]] = {}
        """Those whose devices are busy, by resource. Later workers leave these devices to them."""
        self.unplaced: list[QueueEntry] = []
        """Those for which a search took too long. They claim nothing, and are looked at again when devices come free.
        """
        self.choosers: dict[str, list[QueueEntry]] = {}
        """Those of them that want certain devices of a resource. They are not in `claims`."""
        self.wants: dict[str, dict[Want, list[QueueEntry]]] = {}
        """The same by what they want."""
        self.choosing = 0
        """How many waiters want certain devices."""
        self.unanswered: dict[str, list[QueueEntry]] = {}
        """Those that wait for a driver's answer, by resource."""
        self.deadlines: list[tuple[datetime, AllocationKey]] = []
        """When waiters with a `wait_s` fail, unless they wait for a driver's answer."""
        self.waiting_since: list[tuple[datetime, AllocationKey]] = []
        """Since when waiters with a `wait_s` have waited."""
        self.items = 0
        """Those of their requests, see `sizes.items`."""
        self.scan_from: QueueEntry | None = None
        """The first waiter whose evaluation is due. None: no evaluation is due."""

    def set_scan(self, start: QueueEntry | None) -> QueueEntry | None:
        """Have the queue evaluated again from the waiter `start` on (None: no evaluation is due). Returns the start
        before."""
        before, self.scan_from = self.scan_from, start
        return before

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a pending record by another one. None: there is none."""
        if before is not None:
            self._remove(key, before)
        if after is not None:
            self._add(key, after)

    def _add(self, key: AllocationKey, record: Allocation) -> None:
        self.items += items(record.request)
        entry = queue_entry(record)
        insort(self.queue, entry)
        if record.reason_code == ReasonCode.PLACEMENT_NOT_FOUND:
            insort(self.unplaced, entry)
        self.choosing += record.request.choices is not UNSET
        for index, key_there in self._lists_of(record):
            insort(index.setdefault(key_there, []), entry)
        if record.wait_until is not None:
            if record.reason_code != ReasonCode.NOT_REPORTED:
                insort(self.deadlines, (record.wait_until, key))
            insort(self.waiting_since, (record.since, key))

    def _remove(self, key: AllocationKey, record: Allocation) -> None:
        self.items -= items(record.request)
        entry = queue_entry(record)
        del self.queue[bisect_left(self.queue, entry)]
        if record.reason_code == ReasonCode.PLACEMENT_NOT_FOUND:
            del self.unplaced[bisect_left(self.unplaced, entry)]
        self.choosing -= record.request.choices is not UNSET
        for index, key_there in self._lists_of(record):
            entries = index[key_there]
            del entries[bisect_left(entries, entry)]
            if not entries:
                del index[key_there]
        for resource in record.request.amounts if self.wants else ():
            if not self.wants.get(resource, True):
                del self.wants[resource]
        if record.wait_until is not None:
            if record.reason_code != ReasonCode.NOT_REPORTED:
                del self.deadlines[bisect_left(self.deadlines, (record.wait_until, key))]
            del self.waiting_since[bisect_left(self.waiting_since, (record.since, key))]

    def is_crowded(self, resource: str) -> bool:
        """Whether so many different things are wanted of a resource that they are not kept apart."""
        return len(self.wants.get(resource, ())) > MOST_WANTS

    def first_claim(self, resource: str) -> QueueEntry | None:
        """The first waiter whose devices of a resource are busy."""
        lists = (self.claims.get(resource), self.choosers.get(resource))
        return min([entries[0] for entries in lists if entries], default=None)

    def _lists_of(self, record: Allocation) -> Iterator[tuple[dict[Any, list[QueueEntry]], Hashable]]:
        """The lists of entries that a pending record is in: an index, and the list's key there."""
        code = record.reason_code
        wants = wants_of(record.request) if code == ReasonCode.BUSY else NO_WANTS
        for resource in record.request.amounts:
            yield self.waiting, resource
            if code == ReasonCode.NOT_REPORTED:
                yield self.unanswered, resource
            elif code == ReasonCode.BUSY:
                want = wants.get(resource)
                if want is None:
                    yield self.claims, resource
                else:
                    yield self.choosers, resource
                    yield self.wants.setdefault(resource, {}), want


Run = tuple[int, AllocationKey]
"""(offset of the first registration, allocation key) of one incarnation. The last in order is the newest."""

Ending = tuple[datetime, AllocationKey]
"""(when it ended or failed, allocation key). The first in order is deleted first."""


class RunIndex:
    """The retained runs of one host's workers. It is a function of all records."""

    def __init__(self) -> None:
        self.incarnations: dict[str, tuple[Run, ...]] = {}
        """All of each worker, the newest last. They are in a tuple: the garbage collector traverses a tuple of texts
        and numbers only once, but a list in each collection."""
        self.endings: list[Ending] = []
        """The final records, the oldest first, whatever the clock did."""
        self.past: dict[str, list[Ending]] = {}
        """The same by worker."""

    @property
    def final_count(self) -> int:
        """How many of the records are final."""
        return len(self.endings)

    def newest(self, worker: str) -> AllocationKey | None:
        """The key of a worker's newest incarnation."""
        incarnations = self.incarnations.get(worker)
        return incarnations[-1][1] if incarnations else None

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a record by another one. None: there is none."""
        if before is not None and before.state in FINAL_STATES:
            ending = (before.since, key)
            del self.endings[bisect_left(self.endings, ending)]
            past = self.past[before.worker]
            del past[bisect_left(past, ending)]
            if not past:
                del self.past[before.worker]
        if after is None:
            if before is not None:
                self._forget(key, before)
            return
        self._add(key, after)
        if after.state in FINAL_STATES:
            ending = (after.since, key)
            insort(self.endings, ending)
            insort(self.past.setdefault(after.worker, []), ending)

    def add_first(self, key: AllocationKey, record: Allocation) -> None:
        """Add the first record of a worker, which is not final."""
        self.incarnations[record.worker] = ((record.source.offset, key),)

    def _add(self, key: AllocationKey, record: Allocation) -> None:
        run = (record.source.offset, key)
        runs = self.incarnations.get(record.worker)
        if runs is None:  # nearly always
            self.incarnations[record.worker] = (run,)
        elif runs[-1] < run:
            self.incarnations[record.worker] = runs + (run,)  # noqa: RUF005 - unpacking copies a thousand runs thrice
        elif runs[(position := bisect_left(runs, run)) : position + 1] != (run,):
            self.incarnations[record.worker] = (*runs[:position], run, *runs[position:])

    def _forget(self, key: AllocationKey, record: Allocation) -> None:
        runs = self.incarnations[record.worker]
        position = bisect_left(runs, (record.source.offset, key))
        runs = runs[:position] + runs[position + 1 :] if position else runs[1:]
        if runs:
            self.incarnations[record.worker] = runs
        else:
            del self.incarnations[record.worker]


CLOCK_SLACK = timedelta(seconds=2)
"""If a record began further in the future than this, it was written before the clock was set back."""


class HostState:
    """One host's records and indexes."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.record: Host | None = None
        self.cordons: dict[str, Cordon] = {}
        """The orders of operators that are in effect, by their ids."""
        self.devices = DeviceIndex()
        self.holders = HolderIndex()
        self.waiters = WaiterIndex()
        self.runs = RunIndex()

    # --- changes ---

    def set_record(self, record: Host | None) -> Host | None:
        """Replace the host's record. Returns the one before."""
        before, self.record = self.record, record
        self.devices.set_recorded(record.resources if record is not None else None, self.holders.live.values())
        return before

    def set_cordon(self, before: Cordon | None, after: Cordon | None) -> None:
        """Replace an order in effect. None: there is none."""
        if before is not None:
            del self.cordons[before.order]
        if after is not None:
            self.cordons[after.order] = after

    def set_inventory(self, resource: str, inventory: ResourceState) -> None:
        """Replace the inventory of a resource."""
        self.devices.set_inventory(resource, inventory, self.holders.live.values())

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace the allocation under a key. None: there is none."""
        held = before if before is not None and before.state in HOLDING_STATES else None
        holds = after if after is not None and after.state in HOLDING_STATES else None
        if held is not None or holds is not None:
            self.holders.change(key, held, holds)
            self.devices.change(held, holds)
        waited = before if before is not None and before.state == PENDING else None
        waits = after if after is not None and after.state == PENDING else None
        if waited is not None or waits is not None:
            self.waiters.change(key, waited, waits)
        self.runs.change(key, before, after)

    def grant(self, key: AllocationKey, record: Allocation, names: list[CanonicalName]) -> None:
        """Add the first record of a worker. It has few items, and holds exclusively the devices with these canonical
        `names`, which its resource's free list has offered. The result is that of `change`, in less time."""
        self.runs.add_first(key, record)
        self.holders.live[key] = record
        if not names:
            self.holders.without_exclusive += 1
        self.devices.take(record, names)

    # --- what several indexes say together ---

    @property
    def items(self) -> int:
        """Those of live and waiting records; see `sizes.items`."""
        return self.holders.items + self.waiters.items

    def has_due(self, *, now: datetime, over_before: datetime, max_final: int) -> bool:
        """Whether a waiter's deadline or an order's end has passed, a device has been well for long enough, a record
        ended before `over_before`, or more than `max_final` records are final."""
        runs, waiters = self.runs, self.waiters
        if (
            runs.final_count > max_final
            or (waiters.deadlines and waiters.deadlines[0][0] <= now)
            or waiters.scan_from is not None
            or (bool(self.cordons) and self.has_ended_cordon(now))
            or self.has_recovered(now)
        ):
            return True
        return (bool(runs.endings) and runs.endings[0][0] < over_before) or self.is_ahead(now)

    @property
    def shows_what_is_held(self) -> bool:
        """Whether drivers report every held device."""
        devices = self.devices
        not_shown = devices.pools.used.keys() - devices.shown.keys()
        if not not_shown:
            return True  # nearly always; else it may be the whole of a held part, which nobody holds itself
        return not_shown.isdisjoint(
            name
            for record in self.holders.live.values()
            for name in devices.names(record, [info["id"] for infos in record.resources.values() for info in infos])
        )

    @property
    def keeps_names(self) -> bool:
        """Whether names of devices matter that no driver reports any more: somebody holds a device, or an order of an
        operator may be about one of these names."""
        return bool(self.holders.live or self.cordons)

    def has_ended_cordon(self, now: datetime) -> bool:
        """Whether an order's time is over."""
        return any(cordon.until is not UNSET and cordon.until <= now for cordon in self.cordons.values())

    def has_recovered(self, now: datetime) -> bool:
        """Whether a device that was ill has been well for long enough."""
        recovers_at = self.devices.recovers_at
        return recovers_at is not None and recovers_at <= now

    def is_ahead(self, now: datetime) -> bool:
        """Whether a record began in the future. Then the clock has been set back."""
        limit = now + CLOCK_SLACK
        endings, waiting_since = self.runs.endings, self.waiters.waiting_since
        return (
            (bool(endings) and endings[-1][0] > limit)
            or (bool(waiting_since) and waiting_since[-1][0] > limit)
            or (self.record is not None and self.record.since > limit)
        )

    def from_future(self, now: datetime, most: int) -> list[AllocationKey]:
        """The keys of records that ended, or began to wait, in the future; at most `most`."""
        limit = now + CLOCK_SLACK
        keys: list[AllocationKey] = []
        for entries in (self.runs.endings, self.waiters.waiting_since):
            for since, key in reversed(entries):
                if since <= limit or len(keys) >= most:
                    break
                keys.append(key)
        return keys

    def is_idle(self, *, since: datetime) -> bool:
        """Whether no allocation of the host is retained, no order is in effect, and its record has not changed since
        then."""
        is_unused = not self.runs.incarnations and not self.cordons
        return is_unused and self.record is not None and self.record.since < since
