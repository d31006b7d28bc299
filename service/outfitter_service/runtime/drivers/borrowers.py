"""Who waits for a host's devices, holds some, or has held some, with the processes that own these allocations.

It is what the manager knows of processes that may rightly use a device: it follows the committed records.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple

import anyio
from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, AllocationState, Owner
from outfitter_proto.support import processes
from outfitter_service.core.state.infos import names_held
from outfitter_service.runtime.drivers.running_processes import ProcessIdentity
from outfitter_service.runtime.identity import Identity

MOST_PAST = 1000
"""Most past owners that are remembered, the last ones."""


class Borrower(NamedTuple):
    """An allocation that holds devices. `names`: all names of these and of their wholes. `owner`: its process; None:
    nobody here knows which one it is. `is_ending`: it is being released, and what runs on its devices may be its own.
    """

    names: frozenset[str]
    owner: ProcessIdentity | None
    is_ending: bool


class Borrowers:
    """Those of one host."""

    def __init__(self, identity: Identity) -> None:
        """`identity`: the manager's, which says whose processes it sees."""
        self._identity = identity
        self._waiting: dict[AllocationKey, ProcessIdentity | None] = {}
        self._waiting_owners: Counter[ProcessIdentity] = Counter()
        self._holding: dict[AllocationKey, Borrower] = {}
        self._by_name: dict[str, set[AllocationKey]] = {}
        self._past: OrderedDict[ProcessIdentity, frozenset[str]] = OrderedDict()
        self.restored = anyio.Event()
        """Set once the ledger is known. Before, every worker would be a stranger."""
        self.version = 0
        """It grows with each change."""
        self.sees_all = identity.boot_id is not None and identity.pid_ns == processes.INITIAL_PID_NAMESPACE
        """Whether a pid that a driver reads means the same process for the manager. In another PID namespace it may
        mean another one, or none."""

    def restore(self, records: Iterable[Allocation]) -> None:
        """Begin with a restored ledger."""
        self._waiting.clear()
        self._waiting_owners.clear()
        self._holding.clear()
        self._by_name.clear()
        self.version += 1
        for record in records:
            self.see(record)
        self.restored.set()

    def see(self, record: Allocation) -> None:
        """The record is committed."""
        self.version += 1
        key, owner = record.key, self._process(record.request.owner)
        self._wait_no_more(key)
        before = self._drop(key)
        if record.state == AllocationState.PENDING:
            self._waiting[key] = owner
            if owner is not None:
                self._waiting_owners[owner] += 1
        elif record.state in HOLDING_STATES:
            ending = record.state == AllocationState.RELEASING
            self._holding[key] = Borrower(_names(record), owner, ending)
            for name in self._holding[key].names:
                self._by_name.setdefault(name, set()).add(key)
        else:
            self._remember(before or Borrower(_names(record), owner, is_ending=True))

    def _wait_no_more(self, key: AllocationKey) -> None:
        owner = self._waiting.pop(key, None)
        if owner is not None:
            self._waiting_owners[owner] -= 1
            if not self._waiting_owners[owner]:
                del self._waiting_owners[owner]

    def _drop(self, key: AllocationKey) -> Borrower | None:
        """The allocation holds nothing any more, as far as is known. Returns what it held."""
        before = self._holding.pop(key, None)
        for name in before.names if before is not None else ():
            self._by_name[name].discard(key)
            if not self._by_name[name]:
                del self._by_name[name]
        return before

    def _remember(self, past: Borrower) -> None:
        if past.owner is None or not past.names:
            return
        self._past[past.owner] = past.names | self._past.pop(past.owner, frozenset())
        if len(self._past) > MOST_PAST:
            self._past.popitem(last=False)

    def _process(self, owner: Owner | None) -> ProcessIdentity | None:
        """The owner as the manager sees processes; None: it cannot tell which one it is, or there is none."""
        me = self._identity
        if owner is None or me.boot_id is None or (owner.boot_id, owner.pid_ns) != (me.boot_id, me.pid_ns):
            return None
        time_ns = None if owner.time_ns is UNSET else owner.time_ns
        return (owner.pid, owner.start_ticks) if time_ns == me.time_ns else None

    # --- asking ---

    def holders(self, names: Collection[str]) -> dict[AllocationKey, Borrower]:
        """Who holds the device with these names."""
        keys = {key for name in names for key in self._by_name.get(name, ())}
        return {key: self._holding[key] for key in sorted(keys)}

    def waits(self, lineage: Collection[ProcessIdentity], keys: Collection[AllocationKey]) -> bool:
        """Whether one of these processes owns an allocation that waits, or one of these allocations does."""
        owners, waiting = self._waiting_owners.keys(), self._waiting.keys()
        return not (owners.isdisjoint(lineage) and waiting.isdisjoint(keys))

    def has_held(self, process: ProcessIdentity, names: Collection[str]) -> bool:
        """Whether this process owned an allocation that held the device with these names."""
        return not self._past.get(process, frozenset()).isdisjoint(names)


def _names(record: Allocation) -> frozenset[str]:
    """All names of a record's devices, and of those that these are parts of: tools name a process on both."""
    names = {name for device, others in names_held(record) for name in (device, *others)}
    return frozenset(names | (record.uses or {}).keys())
