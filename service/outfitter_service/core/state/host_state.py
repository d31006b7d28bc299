"""One host's part of the ledger in memory: its record, and four indexes of its allocations that decisions read.

The indexes are a function of the host's records and of its drivers' last reports, in whatever order they came. Only
`Ledger` changes a `HostState`, and a `HostState` decides nothing.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, Host
from outfitter_service.core.state.device_index import DeviceIndex
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.holder_index import HolderIndex
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.state.run_index import RunIndex
from outfitter_service.core.state.waiter_index import WaiterIndex
from outfitter_service.core.states import PENDING

CLOCK_SLACK = timedelta(seconds=2)
"""If a record began further in the future than this, it was written before the clock was set back."""


class HostState:
    """One host's records and indexes."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.record: Host | None = None
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
        """Whether a waiter's deadline has passed, a record ended before `over_before`, or more than `max_final` records
        are final."""
        runs, waiters = self.runs, self.waiters
        if (
            runs.final_count > max_final
            or (waiters.deadlines and waiters.deadlines[0][0] <= now)
            or waiters.scan_from is not None
        ):
            return True
        return (bool(runs.endings) and runs.endings[0][0] < over_before) or self.is_ahead(now)

    def is_ahead(self, now: datetime) -> bool:
        """Whether a record began in the future. Then the clock has been set back."""
        limit = now + CLOCK_SLACK
        endings, waiting_since = self.runs.endings, self.waiters.waiting_since
        return (
            (bool(endings) and endings[-1][0] > limit)
            or (bool(waiting_since) and waiting_since[-1][0] > limit)
            or (self.record is not None and self.record.since > limit)
        )

    def ahead(self, now: datetime, most: int) -> list[AllocationKey]:
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
        """Whether no allocation of the host is retained, and its record has not changed since then."""
        return not self.runs.incarnations and self.record is not None and self.record.since < since
