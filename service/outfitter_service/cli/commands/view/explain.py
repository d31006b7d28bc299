"""`outfitter explain`: who holds what, and why a worker waits, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.records import Allocation, Host
    from outfitter_service.cli.commands.view.devices import Holder, Line
    from outfitter_service.query.ledger_view import LedgerView


class Waiter(Struct, frozen=True, kw_only=True):
    """A worker that is served first."""

    worker: str
    position: int
    priority: int
    amounts: dict[str, int]


class Explanation(Struct, frozen=True, kw_only=True):
    """The state of one worker. `devices`: all devices of the resources that it wants, with their holders."""

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
    devices: list[Line]


@click.command()
@click.argument("worker", envvar="OUTFITTER_WORKER")
@options.looking_on
@options.json_output
@click.pass_context
def explain(ctx: click.Context, /, worker: str, config: str | None, as_json: bool, **_options: object) -> None:
    """Say where WORKER stands: what it holds, or why it waits, behind whom, and who has what it wants."""
    import anyio

    from outfitter_service.config import connection
    from outfitter_service.query import ledger_view

    where = connection(config, options.given(ctx))
    found = anyio.run(ledger_view.read_from, where, options.given(ctx).get("host"))
    records = found.of_worker(worker)
    if not records:
        raise OutfitterCliError(_unknown(found, worker))
    told = [_explanation(found, record) for record in records]
    if as_json:
        output.print_json(told)
        return
    for record, explanation in zip(records, told, strict=True):
        for sentence in _sentences(record, explanation, found.hosts.get(record.host)):
            output.say(sentence)


def _unknown(ledger: LedgerView, worker: str) -> str:
    from difflib import get_close_matches

    known = list(dict.fromkeys(stored.record.worker for stored in ledger.allocations))
    near = get_close_matches(worker, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`outfitter status` lists those there are"
    return f"there is no worker {worker!r}: it never registered, or was over long ago; {hint}"


def _explanation(ledger: LedgerView, record: Allocation) -> Explanation:
    from outfitter_service.cli.commands.view.devices import lines_of
    from outfitter_service.query.ledger_view import warnings_of

    host = ledger.hosts.get(record.host)
    wanted = set(record.request.amounts)
    return Explanation(
        host=record.host,
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        since=record.since,
        reason=record.reason,
        reason_code=record.reason_code,
        queue_position=record.queue_position,
        wait_until=record.wait_until,
        amounts=record.request.amounts,
        warnings=warnings_of(record),
        managed=host is not None and host.manager.stopped_at is None,
        ahead=list(_ahead(ledger, record)),
        devices=[line for line in lines_of(ledger, host) if line.resource in wanted] if host is not None else [],
    )


def _ahead(ledger: LedgerView, record: Allocation) -> Iterator[Waiter]:
    """The workers before it in the queue that want any of the same resources."""
    if record.queue_position is None:
        return
    wanted = record.request.amounts.keys()
    waiting = [other for other in ledger.live(record.host) if other.queue_position is not None]
    for other in sorted(waiting, key=lambda other: other.queue_position or 0):
        if (other.queue_position or 0) < record.queue_position and wanted & other.request.amounts.keys():
            yield Waiter(
                worker=other.worker,
                position=other.queue_position or 0,
                priority=other.request.priority,
                amounts=other.request.amounts,
            )


def _sentences(record: Allocation, told: Explanation, host: Host | None) -> Iterator[str]:
    from outfitter.session.status import AllocationStatus, standing

    asked = _asked(told.amounts)
    age, since = _age(told.since), f"{told.since:%Y-%m-%dT%H:%M:%SZ}"
    for_long = f"for {age} (since {since})"
    match standing(record):
        case AllocationStatus.YOURS:
            yield f"{told.worker} on {told.host} has had {asked} {for_long}."
        case AllocationStatus.WAITING if told.state == "pending":
            yield f"{told.worker} on {told.host} has waited for {asked} {for_long}."
        case AllocationStatus.WAITING:
            doing = ": its driver makes the devices ready" if told.state == "preparing" else ""
            yield f"{told.worker} on {told.host} has been {told.state} with {asked} {for_long}{doing}."
        case _ if told.state == "releasing":
            yield (
                f"{told.worker} on {told.host} has been giving back {asked} {for_long}: what it held is free when its "
                "driver has taken it back and nobody uses it."
            )
        case AllocationStatus.OVER:
            yield f"{told.worker} on {told.host} has been over {for_long}: it held or wanted {asked}."
        case AllocationStatus.FAILED:
            yield f"{told.worker} on {told.host} was refused {asked} {age} ago ({since})."
    if told.reason:
        yield f"Reason: {told.reason}."
    for warning in told.warnings:
        yield f"Of its registration: {warning}."
    for name, missing in record.unavailable.items():
        yield f"It has no infos of {name}: {missing.reason}."
    if told.state == "pending":
        yield from _waiting(told)
    elif standing(record) is AllocationStatus.YOURS:
        yield from _holding(record, told)
    yield _manager(told, host)


def _waiting(told: Explanation) -> Iterator[str]:
    if told.queue_position is not None:
        yield f"It has position {told.queue_position} in the queue" + (
            "." if told.ahead else "; nobody before it wants any of the same resources."
        )
    for waiter in told.ahead:
        yield f"  Before it: {waiter.worker}, which wants {_asked(waiter.amounts)} (priority {waiter.priority})."
    for name, amount in told.amounts.items():
        devices = [line for line in told.devices if line.resource == name]
        free = [line for line in devices if not line.holders and line.health == "healthy"]
        yield f"Of {name} it wants {amount}; there are {len(devices)}, of which {len(free)} are free."
        for line in devices:
            yield f"  {line.id} {_use(line)}."
    if told.wait_until is not None:
        left = (told.wait_until - datetime.now(UTC)).total_seconds()
        yield f"It gives up at {told.wait_until:%Y-%m-%dT%H:%M:%SZ} (in {output.age(max(left, 0))})."


def _holding(record: Allocation, told: Explanation) -> Iterator[str]:
    mine = {device.get("id") for devices in record.resources.values() for device in devices}
    for line in told.devices:
        if line.id in mine:
            ill = "" if line.health == "healthy" else f", which is {line.health} ({line.reason})"
            yield f"  It has {line.resource} {line.id}{ill}."
    for operator, share in record.operators.items():
        has = [f"{name} {', '.join(ids)}" for name, ids in share.resources.items()]
        has += [f"all of {name}" for name in share.shared or ()]
        yield f"  Its operator {operator} has {', '.join(has) or 'none of them'}."


def _use(line: Line) -> str:
    if line.holders:
        return "is held by " + " and ".join(
            f"{holder.worker} ({holder.state} for {_age(holder.since)}{_delay(holder)})" for holder in line.holders
        )
    if line.health != "healthy":
        return f"is {line.health}" + (f" ({line.reason})" if line.reason else "")
    return "is free" if line.state is None else f"is {line.state}" + (f" ({line.reason})" if line.reason else "")


def _delay(holder: Holder) -> str:
    return f": {holder.delayed_by}" if holder.delayed_by else ""


def _manager(told: Explanation, host: Host | None) -> str:
    if host is None:
        return f"Nothing is known of a manager of {told.host}: start one with `outfitter serve --host {told.host}`."
    if host.manager.stopped_at is not None:
        return (
            f"The manager of {told.host} was stopped {_age(host.manager.stopped_at)} ago: nothing moves until one runs."
        )
    return f"The manager of {told.host} has been there for {_age(host.manager.since)}."


def _asked(amounts: dict[str, int]) -> str:
    return " and ".join(f"{amount} {name}" for name, amount in amounts.items()) or "nothing"


def _age(since: datetime) -> str:
    return output.age(max(0.0, (datetime.now(UTC) - since).total_seconds()))
