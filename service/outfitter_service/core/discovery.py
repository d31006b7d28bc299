"""The rules of drivers' reports, and of questions to on-demand drivers, which have no inventory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.keys import AllocationKey, allocation_names
from outfitter_proto.records import HOLDING_STATES, Allocation, Health, PoolUse, ReasonCode, ResourceInventory
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder, Rules
from outfitter_service.core.hosts import host_record, refreshed, with_health
from outfitter_service.core.placement import policy
from outfitter_service.core.state import cordons, held_back_devices, names_room, recovery
from outfitter_service.core.state.device_names import Links
from outfitter_service.core.state.host_state import HostState, QueueEntry, queue_entry
from outfitter_service.core.state.infos import names_held, other_names
from outfitter_service.core.state.ledger import SetInventory, SetScan
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.state.sizes import FullError, OversizeError
from outfitter_service.core.states import PENDING, RELEASING, Step

Infos = dict[str, list[dict[str, str]]]
"""A record's infos by resource."""
_MORE_NAMES = "more names of its devices are known"
"""The explanation in history where only the names of a holder's devices change, or what they are part of."""


def report(builder: DecisionBuilder, event: m.DriverReport) -> None:
    """Store a driver's report. An event of its own follows for the workers. A report for a host whose record was
    deleted meanwhile changes nothing."""
    if event.host not in builder.ledger.hosts:
        return
    overlay = builder.overlay(event.host)
    before = overlay.inventory(event.resource)
    others: dict[str, ResourceState] = {}
    if event.failure is not None and not event.devices:
        failure = _failure_now(builder, overlay, event, before.lendable)
        inventory = structs.replace(before, failure=failure, asking=0, is_retry_due=False)
    else:
        inventory, others = _reported(builder, overlay, event, before)
        failure = _failure_now(builder, overlay, event, inventory.lendable)
        inventory = structs.replace(inventory, failure=failure, least=before.least)
    if inventory == before and not others:
        return
    host_state = builder.host_state(event.host)
    # an answer without news matters only to those who wait for an answer
    chooses = host_state.waiters.choosing > 0
    is_news = others or not _serves_the_same(before, inventory, chooses=chooses)
    waiters = host_state.waiters.queue if is_news else host_state.waiters.unanswered.get(event.resource)
    is_for_one = event.resource in builder.rules.per_worker and not others and before.refused == inventory.refused
    if is_for_one and (before.failure is None or inventory.failure is not None):
        waiters = _concerned(builder, host_state, event.resource, before.asking_for)
    put_inventories(builder, host_state, {event.resource: inventory, **others}, waiters)


def _reported(
    builder: DecisionBuilder, overlay: HostOverlay, event: m.DriverReport, before: ResourceState
) -> tuple[ResourceState, dict[str, ResourceState]]:
    """The resource's inventory after a report, and those of other resources that change with it."""
    host_state, specs = overlay.host_state, builder.rules.specs
    replicas = specs[event.resource].replicas if event.resource in specs else 1
    inventory = ResourceState.of(
        event.devices, earlier=before.as_reported, asked=max(event.asked, before.asking), replicas=replicas
    )
    inventory = structs.replace(inventory, asking_for=before.asking_for, asked_for=before.asking_for)
    if before.reported and inventory.as_reported == before.as_reported:
        # the very same tuples, so that the host's state keeps its indexes
        same = structs.replace(
            before, asked=inventory.asked, asking=0, is_retry_due=False, failure=None, asked_for=before.asking_for
        )
        return same, {}
    inventory = structs.replace(inventory, linked=_still_linked(host_state, event.resource, inventory))
    if event.resource in specs:
        unwell = before.unwell if before.reported else recovery.recorded(_recorded(host_state, event.resource))
        unwell = recovery.after_report(unwell, inventory.as_reported, specs[event.resource], builder.now)
        inventory = inventory.with_unwell(unwell) if unwell else inventory
        inventory = held_back_devices.with_known_names(host_state, specs[event.resource], before, inventory)
    changed = _reassessed(builder, host_state, {**host_state.devices.inventories, event.resource: inventory})
    return changed.pop(event.resource, inventory), changed


def _recorded(host_state: HostState, resource: str) -> ResourceInventory | None:
    """What the host's record has of a resource."""
    return host_state.record.resources.get(resource) if host_state.record is not None else None


def recover(builder: DecisionBuilder, host_state: HostState) -> None:
    """Lend the devices again that were ill and have been well for long enough."""
    specs, inventories = builder.rules.specs, host_state.devices.inventories
    still = {
        name: recovery.still(inventory.unwell, specs.get(name), builder.now)
        for name, inventory in inventories.items()
        if inventory.unwell
    }
    changed = {name: inventories[name].with_unwell(unwell) for name, unwell in still.items()}
    changed = {name: inventory for name, inventory in changed.items() if inventory != inventories[name]}
    if changed:
        put_inventories(builder, host_state, changed, host_state.waiters.queue)


def _concerned(
    builder: DecisionBuilder, host_state: HostState, resource: str, key: AllocationKey | None
) -> list[QueueEntry]:
    """The waiters whom an answer for one worker concerns: that worker, and those that have none yet."""
    concerned = list(host_state.waiters.unanswered.get(resource, ()))
    record = builder.record(key) if key is not None else None
    if record is not None and record.state == PENDING:
        concerned.append(queue_entry(record))
    return sorted(concerned)


def _reassessed(
    builder: DecisionBuilder, host_state: HostState, inventories: dict[str, ResourceState]
) -> dict[str, ResourceState]:
    """Those of a host's inventories that change, by their names' room, by what is held back, and by orders."""
    rules = builder.rules
    changed = names_room.reassessed(host_state, rules.specs, inventories, rules.max_bytes)
    changed |= held_back_devices.reassessed(host_state, rules.specs, {**inventories, **changed})
    return changed | cordons.reassessed(host_state, host_state.cordons, {**inventories, **changed})


def put_inventories(
    builder: DecisionBuilder,
    host_state: HostState,
    inventories: dict[str, ResourceState],
    waiters: Sequence[QueueEntry] | None,
) -> None:
    """Put inventories, and have the queue evaluated again from the first of `waiters` on."""
    host = host_state.host
    for resource, inventory in inventories.items():
        builder.change(SetInventory(host, resource, inventory))
    if waiters and (host_state.waiters.scan_from is None or waiters[0] < host_state.waiters.scan_from):
        builder.change(SetScan(host, waiters[0]))
    if host_state.record is not None:
        merged = {**host_state.devices.inventories, **inventories}
        record = host_record(host_state.record, builder.rules, merged, builder.now, keeps_names=host_state.keeps_names)
        if record is not None:
            builder.put_record(record)
    builder.reschedule(host)


def release_held_back(builder: DecisionBuilder, host: str) -> bool:
    """Release held-back devices if a holder that caused this has ended, take reports again for which there is room now,
    and forget names that only holders and orders needed if there are none any more. Returns whether there is any of it.
    """
    host_state = builder.host_state(host)
    outlives_names = host_state.devices.has_old_names and not host_state.keeps_names
    nothing_ended = host_state.devices.suspects <= host_state.holders.live.keys() and not outlives_names
    if nothing_ended and not host_state.devices.has_refused:
        return False
    changed = _reassessed(builder, host_state, host_state.devices.inventories)
    if nothing_ended and not changed:
        return False
    put_inventories(builder, host_state, changed, host_state.waiters.queue)
    return True


def _failure_now(
    builder: DecisionBuilder, overlay: HostOverlay, event: m.DriverReport, lendable: int
) -> m.DriverFailure | None:
    """The failure that counts after a report; None: no failure. `lendable`: the devices that nothing blocks.

    An on-demand driver's failure affects workers that want as many devices as the manager asked for, or more. It counts
    until its delay is over, or until the driver answers a question for as many devices.
    """
    spec = builder.rules.specs.get(event.resource)
    new = event.failure
    if spec is None or not spec.on_demand:
        return new
    before = overlay.inventory(event.resource)
    if new is not None:
        new = structs.replace(new, at_least=new.at_least or before.least)
    old = before.failure
    if old is None or before.is_retry_due or not _is_retried(spec, old):
        return new
    if new is not None:
        return old if _is_retried(spec, new) and old.at_least < new.at_least else new
    free = lendable - overlay.held_count(event.resource)
    return old if max(before.least, free) < old.at_least else None


def _is_retried(spec: m.ResourceSpec, failure: m.DriverFailure) -> bool:
    """Whether the manager asks the driver again after a delay."""
    return not failure.permanent or spec.on_failure == m.OnFailure.WAIT


def _still_linked(host_state: HostState, resource: str, inventory: ResourceState) -> Links:
    """What the driver no longer connects and what must stay connected.

    - Groups of names: a worker holds the device, and its record lacks one of the names; or an operator's order names
      the device, and the driver does not say that the names are of several devices now.
    - Parts: a worker holds the part or the whole.
    """
    before = host_state.devices.connected(resource)
    reported = set(inventory.parts)
    parts = names_room.held_parts(host_state, [pair for pair in before.parts if pair not in reported])
    return Links(_still_one(host_state, before.names, inventory), parts)


def _still_one(
    host_state: HostState, before: tuple[tuple[str, ...], ...], inventory: ResourceState
) -> tuple[tuple[str, ...], ...]:
    """The groups of names that must stay connected."""
    groups = [names for names in before if len(names) > 1]
    if not groups:
        return ()
    lacking, ordered = names_room.lacking_names(host_state), names_room.ordered_names(host_state)
    reported = {frozenset(names) for names in inventory.names}
    devices = {name: device.id for device in inventory.as_reported for name in (device.id, *device.aliases)}

    def is_needed(names: tuple[str, ...]) -> bool:
        if not lacking.isdisjoint(names):
            return True
        all_names = host_state.devices.classes.get(names[0], names)
        return not ordered.isdisjoint(names) and len({devices[name] for name in all_names if name in devices}) < 2

    return tuple([names for names in groups if frozenset(names) not in reported and is_needed(names)])


def _aliases_now(host_state: HostState, record: Allocation) -> dict[str, list[str]] | UnsetType:
    """The other names of a holder's devices. Names that were connected once stay connected while it holds them."""
    if not host_state.devices.classes:
        return record.aliases
    aliases = {
        device_id: others
        for device_id, recorded in names_held(record)
        if (others := other_names(device_id, recorded, host_state.devices.classes))
    }
    return aliases or UNSET


def _serves_the_same(before: ResourceState, after: ResourceState, *, chooses: bool) -> bool:
    """Whether two inventories serve the same requests. `chooses`: some waiter takes certain devices only."""
    if before.reported != after.reported or before.failure != after.failure or before.linked != after.linked:
        return False
    if before.devices is after.devices:
        return True
    if len(before.devices) != len(after.devices):
        return False
    if chooses and [device.properties for device in before.devices] != [device.properties for device in after.devices]:
        return False
    pairs = zip(before.devices, after.devices, strict=True)
    return all(old is new or _seen_by_requests(old) == _seen_by_requests(new) for old, new in pairs)


def _seen_by_requests(device: m.KnownDevice) -> tuple[str, tuple[str, ...], str | None, Health, bool, bool]:
    is_out, is_used = device.cordon is not None, device.used_by is not None
    return device.id, device.aliases, device.part_of, device.health, is_out, is_used


def refresh_holders(builder: DecisionBuilder, host: str) -> None:
    """Publish to holders what has changed about their devices. They keep the devices under every name."""
    overlay = builder.overlay(host)
    for key in sorted(overlay.host_state.holders.live):
        record = builder.record(key)
        if record is None or record.state not in HOLDING_STATES:
            continue
        newest = overlay.host_state.runs.newest(record.worker)
        if newest is not None and newest != key and lacks_superseded_mark(record) and builder.rules.news:
            try:
                record = mark_superseded(builder, record, allocation_names(newest).incarnation)
            except FullError:
                builder.reschedule(host)
                return
        infos = record.resources
        if record.state != RELEASING:
            infos = {resource: _current_infos(builder, overlay, resource, old) for resource, old in infos.items()}
        links = _aliases_now(overlay.host_state, record), overlay.devices.uses_now(record)
        if infos == record.resources and links == (record.aliases, record.uses):
            continue
        if len(builder.decision.changes) >= builder.rules.chunk:
            builder.reschedule(host)
            return
        try:
            _refresh(builder, record, infos, links)
        except FullError:
            builder.reschedule(host)
            return


def lacks_superseded_mark(record: Allocation) -> bool:
    """Whether a holder's record does not say yet that its worker has a newer incarnation, if it has one."""
    return record.reason_code != ReasonCode.SUPERSEDED and record.state != RELEASING


def mark_superseded(builder: DecisionBuilder, record: Allocation, newer: str) -> Allocation:
    """Say in a holder's record that its worker has a newer incarnation."""
    reason = f"superseded by incarnation {newer}; keeps its devices until its owner is dead or its lease has ended"
    return builder.step(Step.REFRESH, reason, record, grows=False, reason=reason, reason_code=ReasonCode.SUPERSEDED)


_RecordLinks = tuple[dict[str, list[str]] | UnsetType, dict[str, PoolUse] | UnsetType]
"""A record's `aliases` and `uses`."""


def _refresh(builder: DecisionBuilder, record: Allocation, infos: Infos, links: _RecordLinks) -> None:
    """Publish new infos to a holder. A record that would become too large gets only the devices' health and names, or
    one of both. Names for which it has no room stay connected all the same, and in the host's record."""
    recorded = record.aliases, record.uses
    explanation = "infos changed" if infos != record.resources else _MORE_NAMES
    brief = {name: list(map(with_health, old, infos[name])) for name, old in record.resources.items()}
    attempts = [
        (explanation, infos, links),
        ("devices' health changed", brief, links),
        (_MORE_NAMES, record.resources, links),
        ("devices' health changed", brief, recorded),
    ]
    for why, resources, (aliases, uses) in attempts:
        if resources == record.resources and (aliases, uses) == recorded:
            continue
        try:
            builder.step(Step.REFRESH, why, record, resources=resources, aliases=aliases, uses=uses)
        except OversizeError:
            continue
        return


def _current_infos(
    builder: DecisionBuilder, overlay: HostOverlay, resource: str, infos: list[dict[str, str]]
) -> list[dict[str, str]]:
    spec = builder.rules.specs.get(resource)
    if spec is None or not overlay.inventory(resource).reported:
        return infos
    free_list = overlay.devices.free_lists.get(resource)
    result = []
    for info in infos:
        positions = free_list.positions.get(overlay.devices.canonical(info["id"])) if free_list is not None else None
        if free_list is not None and positions:
            device = free_list.devices[positions[0]]
            if overlay.inventory(resource).is_recovering(device.id):  # its holder is told what its driver says
                device = structs.replace(device, health=Health.HEALTHY, reason=None)
            result.append(refreshed(info, device))
        else:
            # an on-demand driver names only what it was asked for, so a missing device need not be gone
            result.append(info if spec.on_demand else refreshed(info, None))
    return result


def ask_for_new_worker(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> None:
    """Ask the on-demand drivers of a new worker, whatever they have reported before: it gets devices that were
    discovered for it."""
    for resource, amount in record.request.amounts.items():
        spec = builder.rules.specs.get(resource)
        if spec is None or not spec.on_demand or overlay.inventory(resource).asking:
            continue
        others_wait = resource in builder.rules.per_worker and overlay.host_state.waiters.waiting.get(resource)
        if others_wait and _fails(overlay.inventory(resource), amount):
            continue  # those before it failed with as many, and are asked for again first
        _ask(builder, overlay, resource, amount, record.key)


def without_answer(overlay: HostOverlay, rules: Rules, record: Allocation) -> set[str]:
    """The resources of a waiter whose drivers answer for one worker at a time, and have not answered for this one."""
    if not rules.per_worker:
        return set()
    wanted = rules.per_worker.intersection(record.request.amounts)
    return {resource for resource in wanted if overlay.inventory(resource).asked_for != record.key}


def _fails(inventory: ResourceState, amount: int) -> bool:
    return inventory.failure is not None and amount >= inventory.failure.at_least


def ask_for_more(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """Ask the on-demand drivers that may name more devices for a waiter, one more for each device that it may get as
    another resource. Returns the last resource asked for; its answer decides about the worker."""
    last = None
    for spec, enough in _lacking(builder, overlay, record):
        _ask(builder, overlay, spec.name, enough, record.key, least=record.request.amounts[spec.name])
        last = spec
    return last


def next_to_ask(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """The last on-demand resource that `ask_for_more` would ask for, or None."""
    specs = [spec for spec, _ in _lacking(builder, overlay, record)]
    return specs[-1] if specs else None


def _lacking(
    builder: DecisionBuilder, overlay: HostOverlay, record: Allocation
) -> Iterator[tuple[m.ResourceSpec, int]]:
    """The on-demand resources whose drivers may name more devices than are free, each with the amount that suffices."""
    amounts = record.request.amounts
    unanswered = without_answer(overlay, builder.rules, record)
    for resource, amount in amounts.items():
        spec = builder.rules.specs.get(resource)
        if spec is not None and resource in unanswered:
            if not overlay.inventory(resource).asking and not _fails(overlay.inventory(resource), amount):
                yield spec, amount
        elif spec is not None and spec.on_demand:
            enough = amount + policy.rival_amount(overlay, builder.rules.specs, amounts, resource)
            inventory = overlay.inventory(resource)
            if policy.may_name_more(overlay, spec, enough, inventory) and overlay.free_count(resource) < enough:
                yield spec, enough


def ask_next(builder: DecisionBuilder, overlay: HostOverlay, waiting: Iterable[QueueEntry]) -> None:
    """After a pass through the queue, ask the drivers for the first waiter. While a failure counts, ask for each amount
    in turn, the smallest first. So one worker's failures do not block the others."""
    by_resource: dict[str, list[tuple[int, int, Allocation]]] = {}
    for _, _, key in sorted(waiting):
        record = builder.record(key)
        if record is not None and record.state == PENDING:
            for spec, enough in _lacking(builder, overlay, record):
                by_resource.setdefault(spec.name, []).append((record.request.amounts[spec.name], enough, record))
    for resource, candidates in by_resource.items():
        inventory = overlay.inventory(resource)
        chosen = candidates[0] if inventory.failure is None else _next_in_turn(candidates, inventory.least)
        _ask(builder, overlay, resource, chosen[1], chosen[2].key, least=chosen[0])


def _next_in_turn(candidates: Sequence[tuple[int, int, Allocation]], least: int) -> tuple[int, int, Allocation]:
    """The first candidate for the next larger amount than `least`, or else for the smallest."""
    return min(candidates, key=lambda candidate: (candidate[0] <= least, candidate[0]))


def retry(builder: DecisionBuilder, event: m.DriverRetry) -> None:
    """Ask an on-demand driver again after a temporary failure, for each affected amount in turn."""
    overlay = builder.overlay(event.host)
    inventory = overlay.inventory(event.resource)
    failure = inventory.failure
    if failure is None:
        return
    if inventory.asking:
        inventory = structs.replace(inventory, is_retry_due=True)
        builder.change(SetInventory(event.host, event.resource, inventory))
        return
    candidates = []
    # all waiters, however many: the delay makes this rare, and amounts that fail must not hide the others
    for _, _, key in overlay.host_state.waiters.waiting.get(event.resource, ()):
        record = builder.ledger.allocations[key]
        amount = record.request.amounts[event.resource]
        if amount >= failure.at_least:
            candidates.append((amount, amount, record))
    if candidates:
        amount, _, record = _next_in_turn(candidates, inventory.least)
        _ask(builder, overlay, event.resource, amount, record.key)
        return
    inventory = structs.replace(inventory, failure=None)
    builder.change(SetInventory(event.host, event.resource, inventory))
    if queue := overlay.host_state.waiters.queue:
        builder.change(SetScan(event.host, queue[0]))
        builder.reschedule(event.host)


def _ask(
    builder: DecisionBuilder,
    overlay: HostOverlay,
    resource: str,
    amount: int,
    key: AllocationKey,
    *,
    least: int | None = None,
) -> None:
    host = overlay.host_state.host
    held = overlay.held_count(resource)
    total = held + amount
    least = amount if least is None else least
    inventory = structs.replace(overlay.inventory(resource), asking=total, least=least, asking_for=key)
    overlay.set_inventory(resource, inventory)
    builder.change(SetInventory(host, resource, inventory))
    builder.command(m.Discover(host=host, resource=resource, amount=total, least=least, held=held, allocation=key))
