"""Counts the values of the state gauges, commit by commit.

So a scrape does not walk a ledger, and shows only committed records. Devices are counted again on hosts with changes,
some hosts at a time: so a scrape never has to count many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, PoolUse
from outfitter_service.core.state.device_index import DeviceIndex, shared_ids
from outfitter_service.core.state.device_names import CanonicalName
from outfitter_service.core.state.free_list import FreeList
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.core.state.lending import Block, block_of
from outfitter_service.core.state.pools import Pools
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.states import PENDING
from outfitter_service.metrics import StateCounts
from outfitter_service.runtime.processor.reporting.exclusivity_check import ExclusivityViolation, Holders

OTHER = "(other)"
"""The label for unknown resources: names that workers make up must not become labels."""

NONE = "(none)"
"""The label for records without a resource."""

MOST_MODELS = 50
"""Most models of devices that become labels: those of which there are most. The others count as `OTHER`."""

_LONGEST_MODEL = 100
"""Characters of a model's name."""

AT_ONCE = 200
"""Hosts that are counted again in one turn of the event loop."""

_Ids = dict[tuple[str | None, Block | None, bool], frozenset[str]]


class _DeviceCounts(NamedTuple):
    """The devices of one resource on one host. `inventory` and `synonyms`: what they were counted from."""

    inventory: ResourceState
    synonyms: object
    ids: _Ids
    """The reported devices, by model, by why they are lent to nobody, and by whether they are healthy."""
    counts: Mapping[tuple[str | None, str], int]
    """Their number by model and state."""
    healthy: int
    blocked: Mapping[Block, int]


class _Sharers:
    """How many records share each device, by host and by every name that they know."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def clear(self) -> None:
        self._counts.clear()

    def of(self, host: str) -> Iterable[str]:
        """The names of the devices of `host` that somebody shares."""
        return self._counts.get(host, {}).keys()

    def count(self, records: Iterable[Allocation | None], sign: int) -> None:
        for record in records:
            if record is None or not record.shared or record.state not in HOLDING_STATES:
                continue
            counts = self._counts.setdefault(record.host, Counter())
            aliases = {} if record.aliases is UNSET else record.aliases
            for device_id in shared_ids(record):
                for name in (device_id, *aliases.get(device_id, ())):
                    counts[name] += sign
                    if not counts[name]:
                        del counts[name]


class StateGauges:
    """Counts one processor's committed records for the gauges."""

    def __init__(self, resources: Iterable[str]) -> None:
        """`resources`: the configured ones."""
        self._resources = frozenset(resources)
        self._records = 0
        self._allocations: dict[tuple[str, str], int] = {}
        self._pending: dict[tuple[str, str], int] = {}
        self._holders = Holders()
        self._sharers = _Sharers()
        self._devices: Counter[tuple[str, str | None, str]] = Counter()
        """The devices by resource, model and state."""
        self._healthy: Counter[str] = Counter()
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._counted: dict[str, dict[str, _DeviceCounts]] = {}
        """The part of each host and resource in `_devices`, `_healthy` and `_blocked`."""
        self._stale: set[str] = set()
        """Hosts with changes since they were counted."""

    def replay(
        self, records: Mapping[AllocationKey, Allocation], *, hosts: Iterable[str] = ()
    ) -> list[ExclusivityViolation]:
        """Start again with all records of a ledger, by key, and its `hosts`. Returns the violations among them."""
        self._records = 0
        self._allocations.clear()
        self._pending.clear()
        self._devices.clear()
        self._healthy.clear()
        self._blocked.clear()
        self._counted.clear()
        self._stale = set(hosts)
        self._holders.clear()
        self._sharers.clear()
        return self.update(records, before={})

    def update(
        self, changed: Mapping[AllocationKey, Allocation | None], *, before: Mapping[AllocationKey, Allocation]
    ) -> list[ExclusivityViolation]:
        """Add one commit's allocations by key (None: deleted). `before`: the records that they replace. Returns the
        violations among them."""
        self._count(before.values(), -1)
        self._count(changed.values(), 1)
        self._sharers.count(before.values(), -1)
        self._sharers.count(changed.values(), 1)
        self._stale.update([record.host for record in before.values()])
        self._stale.update([record.host for record in changed.values() if record is not None])
        return self._holders.update(changed, before=before)

    def _count(self, records: Iterable[Allocation | None], sign: int) -> None:
        # workers with equal requests nearly always share one object, and follow each other
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
            is_bounded = resource is NONE or state in HOLDING_STATES or resource in self._resources
            name = resource if is_bounded else OTHER
            self._allocations[name, state] = self._allocations.get((name, state), 0) + count
            if state == PENDING and reason is not None:
                self._pending[name, reason] = self._pending.get((name, reason), 0) + count

    def state_counts(self, ledger: Ledger) -> StateCounts:
        """The counts. `ledger`: the ledger of the counted records."""
        self._recount(ledger, None)
        devices: Counter[tuple[str, str]] = Counter()
        for (resource, _, state), count in self._devices.items():
            devices[resource, state] += count
        return StateCounts(
            devices=+devices,
            healthy=+self._healthy,
            blocked=+self._blocked,
            models=_of_models(+self._devices),
            allocations=Counter(self._allocations),
            pending=Counter(self._pending),
            records=self._records,
        )

    def catch_up(self, ledger: Ledger) -> bool:
        """If many hosts have changes, count some of them again. Returns whether many are left."""
        if len(self._stale) + len(ledger.changed_inventories) > AT_ONCE:
            self._recount(ledger, AT_ONCE)
        return len(self._stale) > AT_ONCE

    def _recount(self, ledger: Ledger, most: int | None) -> None:
        stale = self._stale
        stale |= ledger.take_changed_inventories()
        for host in list(islice(stale, most)):
            stale.discard(host)
            before = self._counted.pop(host, {})
            self._add(before, -1)
            host_state = ledger.hosts.get(host)
            if host_state is not None and host_state.devices.inventories:
                self._counted[host] = counted = self._device_counts(host_state, before)
                self._add(counted, 1)

    def _add(self, counted: Mapping[str, _DeviceCounts], sign: int) -> None:
        for resource, of_resource in counted.items():
            self._healthy[resource] += sign * of_resource.healthy
            for block, count in of_resource.blocked.items():
                self._blocked[resource, block] += sign * count
            for (model, state), count in of_resource.counts.items():
                self._devices[resource, model, state] += sign * count
                if not self._devices[resource, model, state]:
                    del self._devices[resource, model, state]

    def _device_counts(self, host_state: HostState, before: Mapping[str, _DeviceCounts]) -> dict[str, _DeviceCounts]:
        """The counts of a host's devices now, by resource. `before`: the last counts."""
        devices = host_state.devices
        alone = frozenset(map(devices.canonical, self._holders.held(host_state.host)))
        by_any = alone.union(map(devices.canonical, self._sharers.of(host_state.host)))
        used = self._holders.used(host_state.host)
        counted: dict[str, _DeviceCounts] = {}
        for resource, inventory in devices.inventories.items():
            last = before.get(resource)
            if last is not None and last.inventory is inventory and last.synonyms is devices.synonyms:
                ids = last.ids
            else:
                ids = _ids(devices, inventory)
            shares = _is_shared(host_state, resource)
            held = alone if shares else by_any
            free_list = devices.free_lists.get(resource)
            if free_list is not None and (used or not free_list.is_plain):
                held = held.union(_kept(devices, free_list, held, used, shares=shares))
            counts: Counter[tuple[str | None, str]] = Counter()
            blocked: Counter[Block] = Counter()
            for (model, block, _), names in ids.items():
                if block is not None:
                    blocked[block] += len(names)
                held_count = len(names.intersection(held))
                counts[model, "held"] += held_count
                counts[model, block or "free"] += len(names) - held_count
            healthy = sum(len(names) for (_, _, is_healthy), names in ids.items() if is_healthy)
            counted[resource] = _DeviceCounts(inventory, devices.synonyms, ids, counts, healthy, blocked)
        return counted


def _kept(
    devices: DeviceIndex,
    free_list: FreeList,
    held: Collection[CanonicalName],
    used: Mapping[str, Mapping[AllocationKey, PoolUse]],
    *,
    shares: bool,
) -> Iterator[CanonicalName]:
    """The devices of a resource that nobody can be lent because of parts and replicas. `held`: those that somebody
    holds. `used`: what records use besides, under each name that they know. `shares`: whether the resource does."""
    of_record = {(devices.canonical(name), key): use for name, users in used.items() for key, use in users.items()}
    committed = Pools()
    for (name, _), use in of_record.items():
        committed.change(name, use, 1)
    for name, positions in free_list.positions.items():
        uses = free_list.shared_uses_of(positions[0]) if shares else free_list.uses_of(positions[0])
        (_, own), *wholes = uses
        has_room = committed.fits(name, own) and all(committed.fits(whole, use) for whole, use in wholes)
        if not has_room or any(whole in held for whole, _ in wholes):
            yield name


def _is_shared(host_state: HostState, resource: str) -> bool:
    """Whether a device that others share can still be lent."""
    recorded = host_state.record.resources.get(resource) if host_state.record is not None else None
    return recorded is not None and recorded.sharing == "shared"


def _ids(devices: DeviceIndex, inventory: ResourceState) -> _Ids:
    """The canonical names of a resource's devices, as `_DeviceCounts.ids` has them."""
    grouped: dict[tuple[str | None, Block | None, bool], set[str]] = {}
    for device in inventory.devices:
        model = device.properties.get("model", "")[:_LONGEST_MODEL] or None
        illness = block_of(device.health, device.reason)
        block = block_of(
            device.health, device.reason, cordoned=device.cordon is not None, stranger=device.used_by is not None
        )
        grouped.setdefault((model, block, illness is None), set()).add(devices.canonical(device.id))
    return {group: frozenset(ids) for group, ids in grouped.items()}


def _of_models(devices: Counter[tuple[str, str | None, str]]) -> Counter[tuple[str, str, str]]:
    """The devices of which drivers name the model, with at most `MOST_MODELS` names."""
    sizes: Counter[tuple[str, str]] = Counter()
    for (resource, model, _), count in devices.items():
        if model is not None:
            sizes[resource, model] += count
    named = {pair for pair, _ in sizes.most_common(MOST_MODELS)}
    found: Counter[tuple[str, str, str]] = Counter()
    for (resource, model, state), count in devices.items():
        if model is not None:
            found[resource, model if (resource, model) in named else OTHER, state] += count
    return found
