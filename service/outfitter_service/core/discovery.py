"""Drivers' reports, and the questions to drivers that have no inventory (on demand)."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.records import HOLDING_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core import policy
from outfitter_service.core.book import HostBook, Inventory
from outfitter_service.core.draft import Draft
from outfitter_service.core.hosts import host_record, refreshed, with_health
from outfitter_service.core.ledger import PutHost, SetInventory, SetScan
from outfitter_service.core.sizes import FullError, OversizeError
from outfitter_service.core.states import RELEASING, Step
from outfitter_service.core.terms import other_names
from outfitter_service.core.view import View

Infos = dict[str, list[dict[str, str]]]
"""A record's infos by resource."""


def report(draft: Draft, event: m.DriverReport) -> None:
    """Take in what a driver said. What follows from it for workers is an event of its own. Of a host that was forgotten
    while its driver was being asked nothing is known any more, and nothing is kept."""
    if event.host not in draft.ledger.hosts:
        return
    view = draft.view(event.host)
    before = view.inventory(event.resource)
    if event.failure is not None:
        inventory = structs.replace(before, failure=event.failure, asking=0)
    else:
        inventory = Inventory.of(event.devices, asked=max(event.asked, before.asking))
        if inventory.devices == before.devices:
            # the very same tuple: the book then keeps its indexes
            inventory = structs.replace(inventory, devices=before.devices, linked=before.linked)
        else:
            inventory = structs.replace(inventory, linked=_still_linked(view.book, event.resource, inventory))
    if inventory == before:
        return
    draft.decision.changes.append(SetInventory(event.host, event.resource, inventory))
    book = draft.book(event.host)
    # an answer that is nothing new concerns only those who have waited for it
    concerned = book.unanswered.get(event.resource) if _says_the_same(before, inventory) else book.queue
    if concerned and (book.scan_from is None or concerned[0] < book.scan_from):
        draft.decision.changes.append(SetScan(event.host, concerned[0]))
    if book.record is not None:
        inventories = {**book.inventories, event.resource: inventory}
        record = host_record(book.record, draft.rules, inventories, draft.now)
        if record is not None:
            draft.decision.changes.append(PutHost(record))
    draft.again(event.host)


def _still_linked(book: HostBook, resource: str, inventory: Inventory) -> tuple[tuple[str, ...], ...]:
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


def _aliases_now(book: HostBook, record: Allocation) -> dict[str, list[str]] | UnsetType:
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


def refresh_holders(draft: Draft, host: str) -> None:
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


def tell_of_successor(draft: Draft, record: Allocation, newer: str) -> Allocation:
    """A worker has a newer incarnation: its older one's record says so."""
    told = f"superseded by incarnation {newer}; held until its owner is dead or its lease has ended"
    return draft.step(Step.REFRESH, told, record, grows=False, reason=told, reason_code=ReasonCode.SUPERSEDED)


def _refresh(draft: Draft, record: Allocation, infos: Infos, aliases: dict[str, list[str]] | UnsetType) -> None:
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


def _told_now(draft: Draft, view: View, resource: str, infos: list[dict[str, str]]) -> list[dict[str, str]]:
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


def ask_anew(draft: Draft, view: View, record: Allocation) -> None:
    """A new worker is served what was discovered for it: its on-demand drivers are asked, whatever is known."""
    for resource, amount in record.request.amounts.items():
        spec = draft.rules.specs.get(resource)
        if spec is not None and spec.on_demand and not view.inventory(resource).asking:
            _ask(draft, view, resource, amount, record.key)


def ask_for_more(draft: Draft, view: View, record: Allocation) -> m.ResourceSpec | None:
    """A worker waits: ask those on-demand drivers that may name more devices than they did, one more for each that the
    worker may get as another resource as well. The answer to one of them, if any was asked, decides about the worker.
    """
    asked = None
    amounts = record.request.amounts
    for resource, amount in amounts.items():
        spec = draft.rules.specs.get(resource)
        if spec is not None and spec.on_demand:
            enough = amount + policy.rival_amount(view, draft.rules.specs, amounts, resource)
            inventory = view.inventory(resource)
            if policy.may_name_more(view, spec, enough, inventory) and view.free_count(resource) < enough:
                _ask(draft, view, resource, enough, record.key, least=amount)
                asked = spec
    return asked


def retry(draft: Draft, event: m.DriverRetry) -> None:
    """An on-demand driver failed for now: ask it again for the first who waits for it."""
    view = draft.view(event.host)
    if view.inventory(event.resource).asking:
        return
    waiting = view.book.waiting.get(event.resource)
    if waiting:
        key = waiting[0][2]
        _ask(draft, view, event.resource, draft.ledger.allocations[key].request.amounts[event.resource], key)


def _ask(draft: Draft, view: View, resource: str, amount: int, key: str, *, least: int | None = None) -> None:
    host = view.book.host
    wanted = view.held_count(resource) + amount
    inventory = structs.replace(view.inventory(resource), asking=wanted)
    view.set_inventory(resource, inventory)
    draft.decision.changes.append(SetInventory(host, resource, inventory))
    draft.decision.commands.append(
        m.Discover(
            host=host, resource=resource, amount=wanted, least=amount if least is None else least, allocation=key
        )
    )
