"""What explains the state of a worker: the queue before it, and the devices that it wants, with their holders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.clauses import Clauses, Sieve, chosen, in_words
from outfitter_proto.records import Allocation
from outfitter_proto.signs_of_life import UNSERVED, Verdict
from outfitter_service.query import ledger_view
from outfitter_service.query.cordons import OrderInEffect, orders_on
from outfitter_service.query.device_lines import DeviceEntry, DeviceLine, entries_of
from outfitter_service.query.ledger_view import LedgerView, awaited_owner, warnings_of


class Waiter(Struct, frozen=True, kw_only=True):
    """A worker that is before another one in the queue."""

    worker: str
    position: int
    priority: int
    amounts: dict[str, int]


class Explanation(Struct, frozen=True, kw_only=True):
    """The state of one worker. `devices`: all devices of the resources that it wants, with their holders. `holds`: the
    ids of those that it has, by resource. `orders`: those of operators that are in effect on its host. `choices`: in
    words, which devices it takes, by resource. `excluded`: the devices that it does not take and why, by resource and
    id."""

    host: str
    worker: str
    incarnation: str
    state: str
    since: datetime
    reason: str | None
    reason_code: str | None
    queue_position: int | None
    wait_until: datetime | None
    amounts: dict[str, int]
    warnings: list[str]
    managed: bool
    ahead: list[Waiter]
    holds: dict[str, list[str]]
    labels: dict[str, str]
    orders: list[OrderInEffect]
    devices: list[DeviceLine]
    choices: dict[str, str] | UnsetType = UNSET
    excluded: dict[str, dict[str, str]] | UnsetType = UNSET


def explain(
    ledger: LedgerView, record: Allocation, devices: Iterable[DeviceEntry] | None = None, *, verdict: Verdict
) -> Explanation:
    """Explain the state of `record`, one of the ledger's. `verdict`: whether its host's manager lives. `devices`: those
    of its host, if the caller has them."""
    host = ledger.hosts_record(record.host)
    resources = set(record.request.amounts)
    if devices is None:
        devices = entries_of(ledger, host) if host is not None else []
    lines = [device.line() for device in devices if device.resource in resources]
    asked = chosen(record.request)
    return Explanation(
        host=record.host,
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        since=record.since,
        reason="; ".join(filter(None, [record.reason, awaited_owner(record, host)])) or None,
        reason_code=record.reason_code,
        queue_position=record.queue_position,
        wait_until=record.wait_until,
        amounts=record.request.amounts,
        warnings=warnings_of(record),
        managed=host is not None and verdict.life not in UNSERVED,
        ahead=list(_ahead(ledger, record)),
        holds=ledger_view.held_by_resource(record),
        labels=record.request.labels,
        devices=lines,
        orders=orders_on(ledger, record.host),
        choices={name: in_words(clauses) for name, clauses in asked.items()} or UNSET,
        excluded={name: _excluded(clauses, name, lines) for name, clauses in asked.items()} or UNSET,
    )


def _excluded(clauses: Clauses, resource: str, lines: Iterable[DeviceLine]) -> dict[str, str]:
    """Why the devices of a resource do not meet clauses, by id, without those that do."""
    sieve = Sieve(clauses)
    faults = {line.id: sieve.fault({**line.properties, "id": line.id}) for line in lines if line.resource == resource}
    return {device: fault for device, fault in faults.items() if fault is not None}


def _ahead(ledger: LedgerView, record: Allocation) -> Iterator[Waiter]:
    """The workers that are before this one in the queue and want any of the same resources."""
    if record.queue_position is None:
        return
    resources = record.request.amounts.keys()
    queue = [waiter for waiter in ledger.live(record.host) if waiter.queue_position is not None]
    for waiter in sorted(queue, key=lambda waiter: waiter.queue_position or 0):
        if (waiter.queue_position or 0) < record.queue_position and resources & waiter.request.amounts.keys():
            yield Waiter(
                worker=waiter.worker,
                position=waiter.queue_position or 0,
                priority=waiter.request.priority,
                amounts=waiter.request.amounts,
            )
