"""Drivers' reports, and the questions to drivers that have no inventory (on demand)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.records import HOLDING_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.hosts import host_record, refreshed, with_health
from outfitter_service.core.placement import policy
from outfitter_service.core.state import held_back_devices
from outfitter_service.core.state.host_state import HostState, Inventory, QueueEntry
from outfitter_service.core.state.infos import other_names
from outfitter_service.core.state.ledger import PutHost, SetInventory, SetScan
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import FullError, OversizeError
from outfitter_service.core.states import PENDING, RELEASING, Step

Infos = dict[str, list[dict[str, str]]]
"""A record's infos by resource."""


def report(draft: DecisionBuilder, event: m.DriverReport) -> None:
    """Take in what a driver said. What follows from it for workers is an event of its own. Of a host that was forgotten
    while its driver was being asked nothing is known any more, and nothing is kept."""
    if event.host not in draft.ledger.hosts:
        return
    view = draft.view(event.host)
    before = view.inventory(event.resource)
    others: dict[str, Inventory] = {}
    if event.failure is not None:
        failure = _failure_now(draft, view, event, before.healthy)
        inventory = structs.replace(before, failure=failure, asking=0, is_retry_due=False)
    else:
        inventory, others = _reported(draft, view, event, before)
        failure = _failure_now(draft, view, event, inventory.healthy)
        inventory = structs.replace(inventory, failure=failure, least=before.least)
    if inventory == before and not others:
        return
    book = draft.book(event.host)
    # an answer that is nothing new concerns only those who have waited for it
    is_news = others or not _says_the_same(before, inventory)
    concerned = book.queue if is_news else book.unanswered.get(event.resource)
    _put_inventories(draft, book, {event.resource: inventory, **others}, concerned)


def _reported(
    draft: DecisionBuilder, view: HostOverlay, event: m.DriverReport, before: Inventory
) -> tuple[Inventory, dict[str, Inventory]]:
    """The inventory that a report amounts to, and those of other resources that change because of it."""
    book, specs = view.book, draft.rules.specs
    inventory = Inventory.of(event.devices, asked=max(event.asked, before.asking))
    if inventory.found == before.found:
        # the very same tuples: the book then keeps its indexes
        inventory = structs.replace(
            before, asked=inventory.asked, asking=0, is_retry_due=False, failure=None, reported=True
        )
        if before.reported:
            return inventory, {}
    else:
        inventory = structs.replace(inventory, linked=_still_linked(book, event.resource, inventory))
    if event.resource in specs:
        inventory = held_back_devices.compared(book, specs[event.resource], before, inventory)
    changed = held_back_devices.settled(book, specs, {**book.inventories, event.resource: inventory})
    return changed.pop(event.resource, inventory), changed


def _put_inventories(
    draft: DecisionBuilder, book: HostState, inventories: dict[str, Inventory], concerned: Sequence[QueueEntry] | None
) -> None:
    """Inventories are others from now on, which concerns the first of `concerned` and all who wait behind it."""
    host, changes = book.host, draft.decision.changes
    changes += [SetInventory(host, resource, inventory) for resource, inventory in inventories.items()]
    if concerned and (book.scan_from is None or concerned[0] < book.scan_from):
        changes.append(SetScan(host, concerned[0]))
    if book.record is not None:
        record = host_record(book.record, draft.rules, {**book.inventories, **inventories}, draft.now)
        if record is not None:
            changes.append(PutHost(record))
    draft.again(host)


def lend_again(draft: DecisionBuilder, host: str) -> bool:
    """Hold back only what still must be, if a holder has ended because of whom anything is; whether that was so."""
    book = draft.book(host)
    if book.suspects <= book.live.keys():
        return False
    _put_inventories(draft, book, held_back_devices.settled(book, draft.rules.specs, book.inventories), book.queue)
    return True


def _failure_now(
    draft: DecisionBuilder, view: HostOverlay, event: m.DriverReport, healthy: int
) -> m.DriverFailure | None:
    """The failure that counts after a report. One of a driver that is asked on demand concerns those who want as many
    as it was asked for, or more. It counts until its delay is over, unless an answer to one of those says better."""
    spec = draft.rules.specs.get(event.resource)
    new = event.failure
    if spec is None or not spec.on_demand:
        return new
    before = view.inventory(event.resource)
    if new is not None:
        new = structs.replace(new, at_least=new.at_least or before.least)
    old = before.failure
    if old is None or before.is_retry_due or not _is_for_now(spec, old):
        return new
    if new is not None:
        return old if _is_for_now(spec, new) and old.at_least < new.at_least else new
    free = healthy - view.held_count(event.resource)
    return old if max(before.least, free) < old.at_least else None


def _is_for_now(spec: m.ResourceSpec, failure: m.DriverFailure) -> bool:
    """After a delay the driver is asked again."""
    return not failure.permanent or spec.on_failure == m.OnFailure.WAIT


def _still_linked(book: HostState, resource: str, inventory: Inventory) -> tuple[tuple[str, ...], ...]:
    """Names that a driver connects no longer, of devices whose holders' records do not have them all yet: names that
    were connected stay so while anybody holds the device."""
    gone = [tuple(names) for names in book.connected(resource) if len(names) > 1]
    if not gone:
        return ()
    lacking: set[str] = set()
    for record in book.live.values():
        for device_id, others in _names_held(record):
            if (now := other_names(device_id, others, book.classes)) != list(others):
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


def _aliases_now(book: HostState, record: Allocation) -> dict[str, list[str]] | UnsetType:
    """A holder's other names of its devices: what was connected once stays so while it holds them."""
    if not book.classes:
        return record.aliases
    aliases = {
        device_id: others
        for device_id, known in _names_held(record)
        if (others := other_names(device_id, known, book.classes))
    }
    return aliases or UNSET


def _says_the_same(one: Inventory, other: Inventory) -> bool:
    """Whether two inventories serve the same requests."""
    if one.reported != other.reported or one.failure != other.failure or one.linked != other.linked:
        return False
    return one.devices is other.devices or [(device.id, device.aliases, device.health) for device in one.devices] == [
        (device.id, device.aliases, device.health) for device in other.devices
    ]


def refresh_holders(draft: DecisionBuilder, host: str) -> None:
    """Tell those who hold devices what has changed about them; what they hold stays theirs, under every name."""
    view = draft.view(host)
    for key in sorted(view.book.live):
        record = draft.record(key)
        if record is None or record.state not in HOLDING_STATES:
            continue
        newest = view.book.newest(record.worker)
        if newest is not None and newest != key and lacks_successor(record):
            try:
                record = tell_of_successor(draft, record, newest.rpartition("/")[2])
            except FullError:
                draft.again(host)
                return
        infos = record.resources
        if record.state != RELEASING:
            infos = {resource: _told_now(draft, view, resource, told) for resource, told in infos.items()}
        aliases = _aliases_now(view.book, record)
        if infos == record.resources and aliases == record.aliases:
            continue
        if len(draft.decision.changes) >= draft.rules.chunk:
            draft.again(host)
            return
        try:
            _refresh(draft, record, infos, aliases)
        except FullError:
            draft.again(host)
            return


def lacks_successor(record: Allocation) -> bool:
    """A holder's record does not say that its worker has a newer incarnation, should it have one."""
    return record.reason_code != ReasonCode.SUPERSEDED and record.state != RELEASING


def tell_of_successor(draft: DecisionBuilder, record: Allocation, newer: str) -> Allocation:
    """A worker has a newer incarnation: its older one's record says so."""
    told = f"superseded by incarnation {newer}; held until its owner is dead or its lease has ended"
    return draft.step(Step.REFRESH, told, record, grows=False, reason=told, reason_code=ReasonCode.SUPERSEDED)


def _refresh(
    draft: DecisionBuilder, record: Allocation, infos: Infos, aliases: dict[str, list[str]] | UnsetType
) -> None:
    """Tell a holder what has changed. Where its record would become too large, it is told of its devices' health alone,
    and of their names in any case: promises rest on those."""
    told = "infos changed" if infos != record.resources else "more names of its devices are known"
    try:
        draft.step(Step.REFRESH, told, record, resources=infos, aliases=aliases)
    except OversizeError:
        brief = {name: list(map(with_health, known, infos[name])) for name, known in record.resources.items()}
        if brief == record.resources and aliases == record.aliases:
            return
        try:
            draft.step(Step.REFRESH, "devices' health changed", record, resources=brief, aliases=aliases)
        except OversizeError:  # granted at a time when no room was left for it
            if aliases != record.aliases:
                told = "more names of its devices are known"
                draft.step(Step.REFRESH, told, record, grows=False, aliases=aliases)


def _told_now(
    draft: DecisionBuilder, view: HostOverlay, resource: str, infos: list[dict[str, str]]
) -> list[dict[str, str]]:
    spec = draft.rules.specs.get(resource)
    if spec is None or not view.inventory(resource).reported:
        return infos
    shelf = view.book.shelves.get(resource)
    result = []
    for info in infos:
        places = shelf.places.get(view.book.canonical(info["id"])) if shelf is not None else None
        if shelf is not None and places:
            result.append(refreshed(info, shelf.devices[places[0]]))
        else:
            # an on-demand driver names what it was asked for: what is missing is not gone
            result.append(info if spec.on_demand else refreshed(info, None))
    return result


def ask_anew(draft: DecisionBuilder, view: HostOverlay, record: Allocation) -> None:
    """A new worker is served what was discovered for it: its on-demand drivers are asked, whatever is known."""
    for resource, amount in record.request.amounts.items():
        spec = draft.rules.specs.get(resource)
        if spec is not None and spec.on_demand and not view.inventory(resource).asking:
            _ask(draft, view, resource, amount, record.key)


def ask_for_more(draft: DecisionBuilder, view: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """A worker waits: ask those on-demand drivers that may name more devices than they did, one more for each that the
    worker may get as another resource as well. The answer to one of them, if any was asked, decides about the worker.
    """
    asked = None
    for spec, enough in _lacking(draft, view, record):
        _ask(draft, view, spec.name, enough, record.key, least=record.request.amounts[spec.name])
        asked = spec
    return asked


def may_be_served(draft: DecisionBuilder, view: HostOverlay, record: Allocation) -> m.ResourceSpec | None:
    """The on-demand resource, the last if there are several, that `ask_for_more` would ask for more."""
    found = [spec for spec, _ in _lacking(draft, view, record)]
    return found[-1] if found else None


def _lacking(draft: DecisionBuilder, view: HostOverlay, record: Allocation) -> Iterator[tuple[m.ResourceSpec, int]]:
    """The on-demand resources whose drivers may name more devices than are free, and how many would do."""
    amounts = record.request.amounts
    for resource, amount in amounts.items():
        spec = draft.rules.specs.get(resource)
        if spec is not None and spec.on_demand:
            enough = amount + policy.rival_amount(view, draft.rules.specs, amounts, resource)
            inventory = view.inventory(resource)
            if policy.may_name_more(view, spec, enough, inventory) and view.free_count(resource) < enough:
                yield spec, enough


def ask_next(draft: DecisionBuilder, view: HostOverlay, waiting: Iterable[QueueEntry]) -> None:
    """All have been looked at, and some of those wait for a question to be put: put it for the first of them or, while
    a failure counts, for each amount in turn, the smallest first, so that nobody's failures are in others' way."""
    lacking: dict[str, list[tuple[int, int, Allocation]]] = {}
    for _, _, key in sorted(waiting):
        record = draft.record(key)
        if record is not None and record.state == PENDING:
            for spec, enough in _lacking(draft, view, record):
                lacking.setdefault(spec.name, []).append((record.request.amounts[spec.name], enough, record))
    for resource, candidates in lacking.items():
        inventory = view.inventory(resource)
        chosen = candidates[0] if inventory.failure is None else _next_in_turn(candidates, inventory.least)
        _ask(draft, view, resource, chosen[1], chosen[2].key, least=chosen[0])


def _next_in_turn(candidates: Sequence[tuple[int, int, Allocation]], least: int) -> tuple[int, int, Allocation]:
    """The first of those that want the next larger amount than `least` or, if there is none, the smallest."""
    return min(candidates, key=lambda candidate: (candidate[0] <= least, candidate[0]))


def retry(draft: DecisionBuilder, event: m.DriverRetry) -> None:
    """An on-demand driver failed for now: ask it again, for each amount in turn that its failure concerns."""
    view = draft.view(event.host)
    inventory = view.inventory(event.resource)
    failure = inventory.failure
    if failure is None:
        return
    if inventory.asking:
        inventory = structs.replace(inventory, is_retry_due=True)
        draft.decision.changes.append(SetInventory(event.host, event.resource, inventory))
        return
    candidates = []
    # all of them, however many: the delay makes this rare, and some that fail must not hide the others
    for _, _, key in view.book.waiting.get(event.resource, ()):
        record = draft.ledger.allocations[key]
        amount = record.request.amounts[event.resource]
        if amount >= failure.at_least:
            candidates.append((amount, amount, record))
    if candidates:
        amount, _, record = _next_in_turn(candidates, inventory.least)
        _ask(draft, view, event.resource, amount, record.key)
        return
    inventory = structs.replace(inventory, failure=None)
    draft.decision.changes.append(SetInventory(event.host, event.resource, inventory))
    if view.book.queue:
        draft.decision.changes.append(SetScan(event.host, view.book.queue[0]))
        draft.again(event.host)


def _ask(
    draft: DecisionBuilder, view: HostOverlay, resource: str, amount: int, key: str, *, least: int | None = None
) -> None:
    host = view.book.host
    wanted = view.held_count(resource) + amount
    least = amount if least is None else least
    inventory = structs.replace(view.inventory(resource), asking=wanted, least=least)
    view.set_inventory(resource, inventory)
    draft.decision.changes.append(SetInventory(host, resource, inventory))
    draft.decision.commands.append(m.Discover(host=host, resource=resource, amount=wanted, least=least, allocation=key))
