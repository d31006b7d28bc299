"""The waiters of one host: its pending records."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from datetime import datetime

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation, ReasonCode
from outfitter_service.core.state.sizes import items

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
        for index in self._indexes_of(record):
            for resource in record.request.amounts:
                insort(index.setdefault(resource, []), entry)
        if record.wait_until is not None:
            if record.reason_code != ReasonCode.NOT_REPORTED:
                insort(self.deadlines, (record.wait_until, key))
            insort(self.waiting_since, (record.since, key))

    def _remove(self, key: AllocationKey, record: Allocation) -> None:
        self.items -= items(record.request)
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

    def _indexes_of(self, record: Allocation) -> Iterable[dict[str, list[QueueEntry]]]:
        """The indexes by resource that a pending record is in."""
        if record.reason_code == ReasonCode.BUSY:
            return self.waiting, self.claims
        return (self.waiting, self.unanswered) if record.reason_code == ReasonCode.NOT_REPORTED else (self.waiting,)
