"""`outfitter explain`: what a worker holds, or why it waits, in sentences."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_proto.records import Allocation, Host
    from outfitter_proto.signs_of_life import Verdict
    from outfitter_service.config import BusConnection
    from outfitter_service.query.device_lines import DeviceHolder, DeviceLine
    from outfitter_service.query.explanation import Explanation


@click.command()
@click.argument("worker", type=options.WORKER, envvar="OUTFITTER_WORKER")
@options.looking_on
@options.json_output
def explain(where: BusConnection, /, worker: options.WorkerNames, host: str | None, as_json: bool) -> None:
    """Explain the state of WORKER: what it holds, or why it waits, who is before it, and who holds the devices.

    WORKER is its name on any host, HOST/WORKER, or a run as HOST/WORKER/INCARNATION.
    """
    import anyio

    from outfitter_proto.signs_of_life import UNKNOWN
    from outfitter_service.query import explanation, known

    ledger, lives, unknown_host = anyio.run(known.look, where, options.host_of(host, worker))
    records = ledger.of_worker(worker.worker, worker.incarnation)
    if not records:
        raise OutfitterCliError("; ".join(filter(None, [known.no_worker(ledger, worker), unknown_host])))
    explanations = [explanation.explain(ledger, record, verdict=lives.get(record.host, UNKNOWN)) for record in records]
    if as_json:
        output.print_json(explanations)
        return
    for record, explained in zip(records, explanations, strict=True):
        sentences = _sentences(record, explained, ledger.hosts.get(record.host), lives.get(record.host, UNKNOWN))
        for sentence in sentences:
            output.say(sentence)


def _sentences(record: Allocation, explanation: Explanation, host: Host | None, verdict: Verdict) -> Iterator[str]:
    from outfitter.session.status import AllocationStatus, status_of
    from outfitter_service.query import labels, ledger_view

    worker, request = f"{explanation.worker} on {explanation.host}", _in_words(explanation.amounts)
    age, since = _age(explanation.since), f"{explanation.since:%Y-%m-%dT%H:%M:%SZ}"
    duration = f"for {age} (since {since})"
    match status_of(record):
        case AllocationStatus.YOURS:
            held = _in_words({name: len(devices) for name, devices in record.resources.items()})
            yield f"{worker} has held {held} {duration}."
        case AllocationStatus.WAITING if explanation.state == "pending":
            yield f"{worker} has waited for {request} {duration}."
        case AllocationStatus.WAITING:
            step = ": its driver prepares the devices" if explanation.state == "preparing" else ""
            yield f"{worker} has been {explanation.state} with {request} {duration}{step}."
        case _ if explanation.state == "releasing":
            yield (
                f"{worker} has been releasing {request} {duration}: the devices are free once their driver has taken "
                "them back and nobody uses them."
            )
        case AllocationStatus.OVER:
            did = "requested" if record.token is None else "held"
            yield f"{worker} ended {age} ago ({since}): it {did} {request}."
        case AllocationStatus.FAILED:
            yield f"{worker} was refused {request} {age} ago ({since})."
    if explanation.labels:
        yield f"Its labels are {labels.in_words(explanation.labels)}."
    if explanation.reason:
        yield f"Reason: {explanation.reason}."
    for warning in explanation.warnings:
        yield f"Warning about its registration: {warning}."
    for name, unavailable in record.unavailable.items():
        yield f"It has no infos of {name}: {unavailable.reason}."
    if explanation.state == "pending":
        yield from _waiting(explanation)
    elif status_of(record) is AllocationStatus.YOURS:
        yield from _holding(record, explanation)
    if ledger_view.awaited_owner(record, host) is not None:
        yield f"If that process has ended: `{_deregistration(record)}`."
    if ledger_view.awaits_unseen_survivors(record, host):
        yield f"If these processes have ended: `{_deregistration(record)}`."
    yield _manager(explanation, host, verdict)


def _deregistration(record: Allocation) -> str:
    """The command that ends this run of a worker."""
    words = ["outfitter", "deregister", "--worker", f"{record.host}/{record.worker}/{record.incarnation}"]
    return shlex.join(words)


def _waiting(explanation: Explanation) -> Iterator[str]:
    if explanation.queue_position is not None:
        yield f"It has position {explanation.queue_position} in the queue" + (
            "." if explanation.ahead else "; no worker before it wants the same resources."
        )
    for waiter in explanation.ahead:
        yield f"  Before it: {waiter.worker}, which wants {_in_words(waiter.amounts)} (priority {waiter.priority})."
    for name, amount in explanation.amounts.items():
        devices = [line for line in explanation.devices if line.resource == name]
        excluded, choice = (explanation.excluded or {}).get(name, {}), (explanation.choices or {}).get(name)
        taken = [line for line in devices if line.id not in excluded]
        free = [line for line in taken if line.is_free]
        wanted, such = (f"{amount} {name} ({choice})", " such") if choice else (f"{amount} {name}", "")
        yield f"It wants {wanted}; {len(free)} of {len(taken)}{such} are free."
        for line in devices:
            why = excluded.get(line.id)
            yield f"  {line.id} {_use(line) if why is None else f'is not such: {why}'}."
    if explanation.wait_until is not None:
        seconds = (explanation.wait_until - datetime.now(UTC)).total_seconds()
        yield f"It gives up at {explanation.wait_until:%Y-%m-%dT%H:%M:%SZ} (in {output.age(max(seconds, 0))})."


def _holding(record: Allocation, explanation: Explanation) -> Iterator[str]:
    from outfitter_service.query.held_devices import names_in

    ids = [device.get("id", "") for devices in record.resources.values() for device in devices]
    own = {name for device_id in ids for name in names_in(record, device_id)}
    for line in explanation.devices:
        if not own.isdisjoint(line.names):
            states = " and ".join(_states(line))
            yield f"  It holds {line.resource} {line.id}{f', which is {states}' if states else ''}."
    for operator, share in record.operators.items():
        has = [f"{name} {', '.join(ids)}" for name, ids in share.resources.items()]
        has += [f"all of {name}" for name in share.shared or ()]
        yield f"  Its operator {operator} has {', '.join(has) or 'none of them'}."


def _use(line: DeviceLine) -> str:
    holders = [_holder(holder) for holder in line.holders]
    if not holders and line.kept_by:
        keepers = " and ".join(map(_holder, line.kept_by))
        kept = f"is part of {line.part_of}, which" if line.part_of is not None else "has parts, which"
        return f"{kept} {keepers} holds" + "".join(f", and is {state}" for state in _states(line))
    if line.holders:
        more = line.holder_count - len(holders)
        free = "is shared, and free: it is held by " if line.is_free else "is held by "
        if line.has_replica:
            free = f"has {line.replicas} replicas, of which one is free: it is held by "
        return (
            free
            + " and ".join([*holders, *([f"{more} more"] if more else [])])
            + "".join(f", and is {state}" for state in _states(line))
        )
    if line.block is not None:
        return f"is {' and '.join(_states(line))}"
    return "is free" if line.state is None else f"is {line.state}" + (f" ({line.reason})" if line.reason else "")


def _holder(holder: DeviceHolder) -> str:
    return f"{holder.worker} ({holder.state} for {_age(holder.since)}{_delay(holder)})"


def _states(line: DeviceLine) -> Iterator[str]:
    """Why a device is lent to nobody, whoever has it: its illness, who takes it out, and which stranger uses it."""
    if line.illness is not None:
        yield line.health + (f" ({line.reason})" if line.reason else "")
    if line.cordoned_because is not None:
        yield f"cordoned: {line.cordoned_because}"
    if line.stranger is not None:
        yield f"used by {line.stranger}"


def _delay(holder: DeviceHolder) -> str:
    return f": {holder.delayed_by}" if holder.delayed_by else ""


def _manager(explanation: Explanation, host: Host | None, verdict: Verdict) -> str:
    from outfitter_proto.signs_of_life import in_words
    from outfitter_service.query import cordons

    name = explanation.host
    if host is None:
        return f"No manager of {name} is known: start one with `outfitter serve --host {name}`."
    if not explanation.managed:
        until = "one runs" if verdict.process is None else "it writes again"
        order = cordons.host_order(explanation.orders, datetime.now(UTC))
        planned = "" if order is None else f", as planned: {order.in_words}"
        return f"The manager of {name} {in_words(verdict, output.ago)}{planned}; nothing changes until {until}."
    return f"The manager of {name} has run for {_age(host.manager.since)}."


def _in_words(amounts: dict[str, int]) -> str:
    return " and ".join(f"{amount} {name}" for name, amount in amounts.items()) or "nothing"


def _age(since: datetime) -> str:
    return output.age(max(0.0, (datetime.now(UTC) - since).total_seconds()))
