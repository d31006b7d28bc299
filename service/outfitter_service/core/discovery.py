"""Drivers' reports, and the questions to drivers that have no inventory (on demand)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.keys import allocation_names
from outfitter_proto.records import HOLDING_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.hosts import host_record, refreshed, with_health
from outfitter_service.core.placement import policy
from outfitter_service.core.state import held_back_devices
from outfitter_service.core.state.host_state import HostState, Inventory, QueueEntry
from outfitter_service.core.state.infos import other_names
from outfitter_service.core.state.ledger import PutRecord, SetInventory, SetScan
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import FullError, OversizeError
from outfitter_service.core.states import PENDING, RELEASING, Step

Infos = dict[str, list[dict[str, str]]]
"""A record's infos by resource."""


def report(builder: DecisionBuilder, event: m.DriverReport) -> None:
    """Take in what a driver said. What follows from it for workers is an event of its own. Of a host that was forgotten
    while its driver was being asked nothing is known any more, and nothing is kept."""
    if event.host not in builder.ledger.hosts:
        return
    overlay = builder.overlay(event.host)
    before = overlay.inventory(event.resource)
    others: dict[str, Inventory] = {}
    if event.failure is not None:
        failure = _failure_now(builder, overlay, event, before.healthy)
        inventory = structs.replace(before, failure=failure, asking=0, is_retry_due=False)
    else:
        inventory, others = _reported(builder, overlay, event, before)
        failure = _failure_now(builder, overlay, event, inventory.healthy)
        inventory = structs.replace(inventory, failure=failure, least=before.least)
    if inventory == before and not others:
        return
    host_state = builder.host_state(event.host)
    # an answer that is nothing new concerns only those who have waited for it
    is_news = others or not _says_the_same(before, inventory)
    concerned = host_state.queue if is_news else host_state.unanswered.get(event.resource)
    _put_inventories(builder, host_state, {event.resource: inventory, **others}, concerned)


def _reported(
    builder: DecisionBuilder, overlay: HostOverlay, event: m.DriverReport, before: Inventory
) -> tuple[Inventory, dict[str, Inventory]]:
    """The inventory that a report amounts to, and those of other resources that change because of it."""
    host_state, specs = overlay.host_state, builder.rules.specs
    inventory = Inventory.of(event.devices, asked=max(event.asked, before.asking))
    if inventory.found == before.found:
        # the very same tuples: the host state then keeps its indexes
        inventory = structs.replace(
            before, asked=inventory.asked, asking=0, is_retry_due=False, failure=None, reported=True
        )
        if before.reported:
            return inventory, {}
    else:
        inventory = structs.replace(inventory, linked=_still_linked(host_state, event.resource, inventory))
    if event.resource in specs:
        inventory = held_back_devices.compared(host_state, specs[event.resource], before, inventory)
    changed = held_back_devices.settled(host_state, specs, {**host_state.inventories, event.resource: inventory})
    return changed.pop(event.resource, inventory), changed


def _put_inventories(
    builder: DecisionBuilder,
    host_state: HostState,
    inventories: dict[str, Inventory],
    concerned: Sequence[QueueEntry] | None,
) -> None:
    """Inventories are others from now on, which concerns the first of `concerned` and all who wait behind it."""
    host, changes = host_state.host, builder.decision.changes
    changes += [SetInventory(host, resource, inventory) for resource, inventory in inventories.items()]
    if concerned and (host_state.scan_from is None or concerned[0] < host_state.scan_from):
        changes.append(SetScan(host, concerned[0]))
    if host_state.record is not None:
        record = host_record(host_state.record, builder.rules, {**host_state.inventories, **inventories}, builder.now)
        if record is not None:
            changes.append(PutRecord(record))
    builder.reschedule(host)


def lend_again(builder: DecisionBuilder, host: str) -> bool:
    """Hold back only what still must be, if a holder has ended because of whom anything is; whether that was so."""
    host_state = builder.host_state(host)
    if host_state.suspects <= host_state.live.keys():
        return False
    _put_inventories(
        builder,
        host_state,
        held_back_devices.settled(host_state, builder.rules.specs, host_state.inventories),
        host_state.queue,
    )
    return True


def _failure_now(
    builder: DecisionBuilder, overlay: HostOverlay, event: m.DriverReport, healthy: int
) -> m.DriverFailure | None:
    """The failure that counts after a report. One of a driver that is asked on demand concerns those who want as many
    as it was asked for, or more. It counts until its delay is over, unless an answer to one of those says better."""
    spec = builder.rules.specs.get(event.resource)
    new = event.failure
    if spec is None or not spec.on_demand:
        return new
    before = overlay.inventory(event.resource)
    if new is not None:
        new = structs.replace(new, at_least=new.at_least or before.least)
    old = before.failure
    if old is None or before.is_retry_due or not _is_for_now(spec, old):
        return new
    if new is not None:
        return old if _is_for_now(spec, new) and old.at_least < new.at_least else new
    free = healthy - overlay.held_count(event.resource)
    return old if max(before.least, free) < old.at_least else None


def _is_for_now(spec: m.ResourceSpec, failure: m.DriverFailure) -> bool:
    """After a delay the driver is asked again."""
    return not failure.permanent or spec.on_failure == m.OnFailure.WAIT


def _still_linked(host_state: HostState, resource: str, inventory: Inventory) -> tuple[tuple[str, ...], ...]:
    """Names that a driver connects no longer, of devices whose holders' records do not have them all yet: names that
    were connected stay so while anybody holds the device."""
    gone = [tuple(names) for names in host_state.connected(resource) if len(names) > 1]
    if not gone:
        return ()
    lacking: set[str] = set()
    for record in host_state.live.values():
        for device_id, others in _names_held(record):
            if (now := other_names(device_id, others, host_state.classes)) != list(others):
                lacking.update((device_id, *now))
    named = {frozenset(names) for names in inventory.names}
    return tuple([names for names in gone if not lacking.isdisjoint(names) and frozenset(names) not in named])


def _names_held(record: Allocation) -> Iterator[tuple[str, list[str]]]:
    """The devices of a record by their ids, each with the other names that the record knows."""
    aliases = record.aliases
    for infos in record.resources.values():
        for info in infos:
            device_id = info["id"]
            yield device_id, (aliases.get(device_id, m.NO_NAMES) if aliases is not UNSET else m.NO_NAMES)


def _aliases_now(host_state: HostState, record: Allocation) -> dict[str, list[str]] | UnsetType:
    """A holder's other names of its devices: what was connected once stays so while it holds them."""
    if not host_state.classes:
        return record.aliases
    aliases = {
        device_id: others
        for device_id, known in _names_held(record)
        if (others := other_names(device_id, known, host_state.classes))
    }
    return aliases or UNSET


def _says_the_same(one: Inventory, other: Inventory) -> bool:
    """Whether two inventories serve the same requests."""
    if one.reported != other.reported or one.failure != other.failure or one.linked != other.linked:
        return False
    return one.devices is other.devices or [(device.id, device.aliases, device.health) for device in one.devices] == [
        (device.id, device.aliases, device.health) for device in other.devices
    ]


def refresh_holders(builder: DecisionBuilder, host: str) -> None:
    """Tell those who hold devices what has changed about them; what they hold stays theirs, under every name."""
    overlay = builder.overlay(host)
    for key in sorted(overlay.host_state.live):
        record = builder.record(key)
        if record is None or record.state not in HOLDING_STATES:
            continue
        newest = overlay.host_state.newest(record.worker)
        if newest is not None and newest != key and lacks_successor(record):
            try:
                record = tell_of_successor(builder, record, allocation_names(newest).incarnation)
            except FullError:
                builder.reschedule(host)
                return
        infos = record.resources
        if record.state != RELEASING:
            infos = {resource: _told_now(builder, overlay, resource, told) for resource, told in infos.items()}
        aliases = _aliases_now(overlay.host_state, record)
        if infos == record.resources and aliases == record.aliases:
            continue
        if len(builder.decision.changes) >= builder.rules.chunk:
            builder.reschedule(host)
            return
        try:
            _refresh(builder, record, infos, aliases)
        except FullError:
            builder.reschedule(host)
            return


def lacks_successor(record: Allocation) -> bool:
    """A holder's record does not say that its worker has a newer incarnation, should it have one."""
    return record.reason_code != ReasonCode.SUPERSEDED and record.state != RELEASING


def tell_of_successor(builder: DecisionBuilder, record: Allocation, newer: str) -> Allocation:
    """A worker has a newer incarnation: its older one's record says so."""
    told = f"superseded by incarnation {newer}; held until its owner is dead or its lease has ended"
    return builder.step(Step.REFRESH, told, record, grows=False, reason=told, reason_code=ReasonCode.SUPERSEDED)


def _refresh(
    builder: DecisionBuilder, record: Allocation, infos: Infos, aliases: dict[str, list[str]] | UnsetType
) -> None:
    """Tell a holder what has changed. Where its record would become too large, it is told of its devices' health alone,
    and of their names in any case: promises rest on those."""
    told = "infos changed" if infos != record.resources else "more names of its devices are known"
    try:
        builder.step(Step.REFRESH, told, record, resources=infos, aliases=aliases)
    except OversizeError:
        brief = {name: list(map(with_health, known, infos[name])) for name, known in record.resources.items()}
        if brief == record.resources and aliases == record.aliases:
            return
        try:
            builder.step(Step.REFRESH, "devices' health changed", record, resources=brief, aliases=aliases)
        except OversizeError:  # granted at a time when no room was left for it
            if aliases != record.aliases:
                told = "more names of its devices are known"
                builder.step(Step.REFRESH, told, record, grows=False, aliases=aliases)


def _told_now(
    builder: DecisionBuilder, overlay: HostOverlay, resource: str, infos: list[dict[str, str]]
) -> list[dict[str, str]]:
    spec = builder.rules.specs.get(resource)
    if spec is None or not overlay.inventory(resource).reported:
        return infos
    free_list = overlay.host_state.shelves.get(resource)
    result = []
    for info in infos:
        places = free_list.places.get(overlay.host_state.canonical(info["id"])) if free_list is not None else None
        if free_list is not None and places:
            result.append(refreshed(info, free_list.devices[places[0]]))
        else:
            # an on-demand driver names what it was asked for: what is missing is not gone
            result.append(info if spec.on_demand else refreshed(info, None))
    return result


def ask_anew(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> None:
    """A new worker is served what was discovered for it: its on-demand drivers are asked, whatever is known."""
    for resource, amount in record.request.amounts.items():
        spec = builder.rules.specs.get(resource)
        if spec is not None and spec.on_demand and not overlay.inventory(resource).asking:
            _ask(builder, overlay, resource, amount, record.key)


def ask_for_more(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """A worker waits: ask those on-demand drivers that may name more devices than they did, one more for each that the
    worker may get as another resource as well. The answer to one of them, if any was asked, decides about the worker.
    """
    asked = None
    for spec, enough in _lacking(builder, overlay, record):
        _ask(builder, overlay, spec.name, enough, record.key, least=record.request.amounts[spec.name])
        asked = spec
    return asked


def may_be_served(builder: DecisionBuilder, overlay: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """The on-demand resource, the last if there are several, that `ask_for_more` would ask for more."""
    found = [spec for spec, _ in _lacking(builder, overlay, record)]
    return found[-1] if found else None


def _lacking(
    builder: DecisionBuilder, overlay: HostOverlay, record: Allocation
) -> Iterator[tuple[m.ResourceSpec, int]]:
    """The on-demand resources whose drivers may name more devices than are free, and how many would do."""
    amounts = record.request.amounts
    for resource, amount in amounts.items():
        spec = builder.rules.specs.get(resource)
        if spec is not None and spec.on_demand:
            enough = amount + policy.rival_amount(overlay, builder.rules.specs, amounts, resource)
            inventory = overlay.inventory(resource)
            if policy.may_name_more(overlay, spec, enough, inventory) and overlay.free_count(resource) < enough:
                yield spec, enough


def ask_next(builder: DecisionBuilder, overlay: HostOverlay, waiting: Iterable[QueueEntry]) -> None:
    """All have been looked at, and some of those wait for a question to be put: put it for the first of them or, while
    a failure counts, for each amount in turn, the smallest first, so that nobody's failures are in others' way."""
    lacking: dict[str, list[tuple[int, int, Allocation]]] = {}
    for _, _, key in sorted(waiting):
        record = builder.record(key)
        if record is not None and record.state == PENDING:
            for spec, enough in _lacking(builder, overlay, record):
                lacking.setdefault(spec.name, []).append((record.request.amounts[spec.name], enough, record))
    for resource, candidates in lacking.items():
        inventory = overlay.inventory(resource)
        chosen = candidates[0] if inventory.failure is None else _next_in_turn(candidates, inventory.least)
        _ask(builder, overlay, resource, chosen[1], chosen[2].key, least=chosen[0])


def _next_in_turn(candidates: Sequence[tuple[int, int, Allocation]], least: int) -> tuple[int, int, Allocation]:
    """The first of those that want the next larger amount than `least` or, if there is none, the smallest."""
    return min(candidates, key=lambda candidate: (candidate[0] <= least, candidate[0]))


def retry(builder: DecisionBuilder, event: m.DriverRetry) -> None:
    """An on-demand driver failed for now: ask it again, for each amount in turn that its failure concerns."""
    overlay = builder.overlay(event.host)
    inventory = overlay.inventory(event.resource)
    failure = inventory.failure
    if failure is None:
        return
    if inventory.asking:
        inventory = structs.replace(inventory, is_retry_due=True)
        builder.decision.changes.append(SetInventory(event.host, event.resource, inventory))
        return
    candidates = []
    # all of them, however many: the delay makes this rare, and some that fail must not hide the others
    for _, _, key in overlay.host_state.waiting.get(event.resource, ()):
        record = builder.ledger.allocations[key]
        amount = record.request.amounts[event.resource]
        if amount >= failure.at_least:
            candidates.append((amount, amount, record))
    if candidates:
        amount, _, record = _next_in_turn(candidates, inventory.least)
        _ask(builder, overlay, event.resource, amount, record.key)
        return
    inventory = structs.replace(inventory, failure=None)
    builder.decision.changes.append(SetInventory(event.host, event.resource, inventory))
    if overlay.host_state.queue:
        builder.decision.changes.append(SetScan(event.host, overlay.host_state.queue[0]))
        builder.reschedule(event.host)


def _ask(
    builder: DecisionBuilder, overlay: HostOverlay, resource: str, amount: int, key: str, *, least: int | None = None
) -> None:
    host = overlay.host_state.host
    wanted = overlay.held_count(resource) + amount
    least = amount if least is None else least
    inventory = structs.replace(overlay.inventory(resource), asking=wanted, least=least)
    overlay.set_inventory(resource, inventory)
    builder.decision.changes.append(SetInventory(host, resource, inventory))
    builder.decision.commands.append(
        m.Discover(host=host, resource=resource, amount=wanted, least=least, allocation=key)
    )
