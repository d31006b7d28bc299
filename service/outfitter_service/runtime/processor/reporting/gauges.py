"""What the gauges of state show, counted commit by commit: a scrape must not walk a ledger, nor see what is undecided.

It is told what each commit changed. Of a ledger it looks at the hosts of which something is new, for what drivers said
last: many at once in parts, so that a scrape never comes upon more than some.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, Health
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.inventory import Inventory
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.states import PENDING
from outfitter_service.metrics import HELD_BACK, StateCounts
from outfitter_service.runtime.processor.reporting.exclusivity_check import Holders, Violation

OTHER = "(other)"
"""The resource of records that ask for one nobody has heard of: names that workers make up must not become labels."""

NONE = "(none)"
"""The resource of records that have none."""

AT_ONCE = 200
"""Hosts that are counted anew in one turn of the event loop."""

_Ids = dict[str, frozenset[str]]


class _Shown(NamedTuple):
    """A resource's devices on one host as its driver reported them, by health (`ids`), and how many are in which
    state (`counts`). `inventory` and `synonyms` are those that it was counted from."""

    inventory: Inventory
    synonyms: object
    ids: _Ids
    counts: dict[str, int]


class StateGauges:
    """The committed records of one processor, counted by what the gauges show."""

    def __init__(self, resources: Iterable[str]) -> None:
        """`resources` are those the manager is configured with."""
        self._resources = frozenset(resources)
        self._records = 0
        self._allocations: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], int] = {}
        self._holders = Holders()
        self._devices: Counter[tuple[str, str]] = Counter()
        self._known: dict[str, dict[str, _Shown]] = {}
        """What `_devices` has of each host and resource."""
        self._stale: set[str] = set()
        """The hosts of which something is new since."""

    def replay(self, records: Mapping[AllocationKey, Allocation], *, hosts: Iterable[str] = ()) -> list[Violation]:
        """Begin anew with all records of a ledger, by key, and its `hosts`; return what the self-check finds of the
        records."""
        self._records = 0
        self._allocations.clear()
        self._pending.clear()
        self._devices.clear()
        self._known.clear()
        self._stale = set(hosts)
        self._holders.clear()
        return self.take(records, before={})

    def take(
        self, changed: Mapping[AllocationKey, Allocation | None], *, before: Mapping[AllocationKey, Allocation]
    ) -> list[Violation]:
        """Take in one commit's allocations by key (None: deleted), which were so `before`, as far as they were; return
        what the self-check finds of them."""
        self._count(before.values(), -1)
        self._count(changed.values(), 1)
        self._stale.update([record.host for record in before.values()])
        self._stale.update([record.host for record in changed.values() if record is not None])
        return self._holders.take(changed, before=before)

    def _count(self, records: Iterable[Allocation | None], sign: int) -> None:
        # nearly always those that want the same share what says so, and follow each other
        amounts: dict[str, int] = {}
        state, reason, alike = "", None, 0
        for record in records:
            if record is None:
                continue
            if record.request.amounts is not amounts or record.state != state or record.reason_code != reason:
                self._count_alike(amounts, state, reason, alike)
                amounts, state, reason, alike = record.request.amounts, record.state, record.reason_code, 0
            alike += sign
        self._count_alike(amounts, state, reason, alike)

    def _count_alike(self, amounts: Iterable[str], state: str, reason: str | None, count: int) -> None:
        if not count:
            return
        self._records += count
        for resource in amounts or (NONE,):
            known = resource is NONE or state in HOLDING_STATES or resource in self._resources
            name = resource if known else OTHER
            self._allocations[name, state] = self._allocations.get((name, state), 0) + count
            if state == PENDING and reason is not None:
                self._pending[name, reason] = self._pending.get((name, reason), 0) + count

    def standing(self, ledger: Ledger) -> StateCounts:
        """What is counted here; `ledger` is the one of which the records are."""
        self._recount(ledger, None)
        return StateCounts(
            devices=+self._devices,
            allocations=Counter(self._allocations),
            pending=Counter(self._pending),
            records=self._records,
        )

    def catch_up(self, ledger: Ledger) -> bool:
        """Where something is new of many hosts, count some of them anew; whether it is still of many."""
        if len(self._stale) + len(ledger.reported) > AT_ONCE:
            self._recount(ledger, AT_ONCE)
        return len(self._stale) > AT_ONCE

    def _recount(self, ledger: Ledger, most: int | None) -> None:
        stale = self._stale
        stale |= ledger.reported
        ledger.reported.clear()
        for host in list(islice(stale, most)):
            stale.discard(host)
            before = self._known.pop(host, {})
            self._add(before, -1)
            host_state = ledger.hosts.get(host)
            if host_state is not None and host_state.inventories:
                self._known[host] = shown = self._shown(host_state, before)
                self._add(shown, 1)

    def _add(self, shown: Mapping[str, _Shown], sign: int) -> None:
        devices = self._devices
        for resource, of_it in shown.items():
            for state, count in of_it.counts.items():
                devices[resource, state] += sign * count

    def _shown(self, host_state: HostState, before: Mapping[str, _Shown]) -> dict[str, _Shown]:
        """The devices of a host as they are now; `before` is what they were."""
        held: Iterable[str] = self._holders.held(host_state.host)
        if host_state.synonyms:
            held = {host_state.canonical(name) for name in held}
        found: dict[str, _Shown] = {}
        for resource, inventory in host_state.inventories.items():
            known = before.get(resource)
            if known is not None and known.inventory is inventory and known.synonyms is host_state.synonyms:
                ids = known.ids
            else:
                ids = _ids(host_state, inventory)
            counts = {"held": 0}
            for health, those in ids.items():
                taken = len(those.intersection(held))
                counts["held"] += taken
                counts["free" if health == Health.HEALTHY else health] = len(those) - taken
            found[resource] = _Shown(inventory, host_state.synonyms, ids, counts)
        return found


def _ids(host_state: HostState, inventory: Inventory) -> _Ids:
    """A resource's devices by health, under their canonical names; those that are held back apart."""
    grouped: dict[str, set[str]] = {}
    for device in inventory.devices:
        state = HELD_BACK if device.id in inventory.held_back else str(device.health)
        grouped.setdefault(state, set()).add(host_state.canonical(device.id))
    return {health: frozenset(ids) for health, ids in grouped.items()}
