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


class Borrowed(NamedTuple):
    """The devices of an allocation, by all of their names. `with_wholes`: and those that these are parts of."""

    own: frozenset[str] = frozenset()
    with_wholes: frozenset[str] = frozenset()

    def covers(self, names: Collection[str], whole: str | None) -> bool:
        """Whether its worker may use the device with these names, a part of `whole`. Tools name a process on a part and
        on its whole. Who has one part may not use another one."""
        return whole in self.own or not self.with_wholes.isdisjoint(names)

    def __or__(self, other: Borrowed) -> Borrowed:
        return Borrowed(self.own | other.own, self.with_wholes | other.with_wholes)


class Borrower(NamedTuple):
    """An allocation that holds devices. `owner`: its process; None: nobody here knows which one it is. `is_ending`: it
    is being released, and what runs on its devices may be its own."""

    devices: Borrowed
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
        self._past: OrderedDict[ProcessIdentity, Borrowed] = OrderedDict()
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
            self._holding[key] = Borrower(_borrowed(record), owner, ending)
            for name in self._holding[key].devices.with_wholes:
                self._by_name.setdefault(name, set()).add(key)
        else:
            self._remember(before or Borrower(_borrowed(record), owner, is_ending=True))

    def _wait_no_more(self, key: AllocationKey) -> None:
        owner = self._waiting.pop(key, None)
        if owner is not None:
            self._waiting_owners[owner] -= 1
            if not self._waiting_owners[owner]:
                del self._waiting_owners[owner]

    def _drop(self, key: AllocationKey) -> Borrower | None:
        """The allocation holds nothing any more, as far as is known. Returns what it held."""
        before = self._holding.pop(key, None)
        for name in before.devices.with_wholes if before is not None else ():
            self._by_name[name].discard(key)
            if not self._by_name[name]:
                del self._by_name[name]
        return before

    def _remember(self, past: Borrower) -> None:
        if past.owner is None or not past.devices.own:
            return
        self._past[past.owner] = past.devices | self._past.pop(past.owner, Borrowed())
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

    def holders(self, names: Collection[str], whole: str | None = None) -> dict[AllocationKey, Borrower]:
        """Who may use the device with these names, a part of `whole`, because it holds one of both."""
        keys = {key for name in (*names, whole or "") for key in self._by_name.get(name, ())}
        found = {key: self._holding[key] for key in sorted(keys)}
        return {key: borrower for key, borrower in found.items() if borrower.devices.covers(names, whole)}

    def waits(self, lineage: Collection[ProcessIdentity], keys: Collection[AllocationKey]) -> bool:
        """Whether one of these processes owns an allocation that waits, or one of these allocations does."""
        owners, waiting = self._waiting_owners.keys(), self._waiting.keys()
        return not (owners.isdisjoint(lineage) and waiting.isdisjoint(keys))

    def has_held(self, process: ProcessIdentity, names: Collection[str], whole: str | None = None) -> bool:
        """Whether this process owned an allocation that held the device with these names, or its `whole`."""
        return self._past.get(process, Borrowed()).covers(names, whole)


def _borrowed(record: Allocation) -> Borrowed:
    own = frozenset(name for device, others in names_held(record) for name in (device, *others))
    return Borrowed(own, own | (record.uses or {}).keys())
