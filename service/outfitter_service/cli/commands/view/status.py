"""`outfitter status`: every worker with its devices, or the reason why it waits."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.bus import Bus
    from outfitter_proto.records import Allocation, Host
    from outfitter_service.config import BusConnection
    from outfitter_service.query import labels
    from outfitter_service.query.cordons import OrderInEffect
    from outfitter_service.query.ledger_view import LedgerView, StoredAllocation
    from outfitter_service.query.managers import UnservedHost

OVER_SHOWN = 20
"""How many ended or failed allocations are shown: the last ones. All live ones are shown."""

ORDERS_SHOWN = 20
"""How many operators' orders are shown: the newest ones."""

MOST_UNSERVED = 5
"""How many hosts without a manager get a line each."""

RECENT = timedelta(hours=1)
"""The age up to which dead letters are counted."""

STATES = ("pending", "preparing", "allocated", "releasing", "ended", "failed")


class WorkerFilter(Struct, frozen=True, kw_only=True):
    """The filters; None and nothing select everything. `holders`: only these allocations."""

    worker: options.WorkerNames | None = None
    states: Sequence[str] = ()
    resource: str | None = None
    labelled: labels.Wanted = ()
    holders: Container[str] | None = None

    def matches(self, record: Allocation) -> bool:
        from outfitter_service.query import labels

        return (
            (self.worker is None or self.worker.fits_key(record.key))
            and (not self.states or record.state in self.states)
            and (self.resource is None or self.resource in record.request.amounts)
            and (self.holders is None or record.key in self.holders)
            and labels.has_all(record.request.labels, self.labelled)
        )


@click.command()
@options.looking_on
@options.one_worker
@options.only_devices
@options.only_labels
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only in this state; repeatable.")
@click.option("--limit", type=options.COUNT, metavar="N", help="At most N workers.")
@click.option("--all", "everything", is_flag=True, help=f"All that ended or failed, not only the last {OVER_SHOWN}.")
@options.json_output
def status(
    where: BusConnection,
    /,
    host: str | None,
    worker: options.WorkerNames | None,
    resource: str | None,
    model: str | None,
    health: str | None,
    labelled: labels.Wanted,
    states: Sequence[str],
    limit: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """List the workers of all hosts, or of --host: what they hold, or why they wait.

    Live workers come first, then those that ended or failed, the last ones first. --model and --health choose who holds
    such a device. The last lines count the devices of each resource and each model, and who waits, and say what
    operators have taken out, unless workers are chosen by name or state.

    With --json: an array of their allocation records as on the bus, in the order of registrations. Standard error names
    hosts whose manager was killed, or is stopped while workers or messages wait, and managers that cannot read
    operators' orders. It names hosts that workers ask for
    and that no manager serves, and counts the unroutable messages of the last hour.
    """
    import anyio

    from outfitter_service.query import device_totals, known, ledger_view

    host = options.host_of(host, worker)

    async def read() -> tuple[ledger_view.LedgerView, dict[str, UnservedHost], str | None]:
        async with ledger_view.opened(where) as bus:
            ledger = await ledger_view.read(bus, where.cluster, host)
            unserved = await _warn_of_managers(bus, where.cluster, ledger, host)
            await _warn_of_unserved(bus, where.cluster, ledger, host)
            return ledger, unserved, await known.unknown_host(bus, where.cluster, ledger, host)

    ledger, unserved, unknown_host = anyio.run(read)
    devices = device_totals.devices_in(ledger, resource, model)
    holders = {record.key for device in devices if health in {None, device.health} for record in device.holders}
    asked = WorkerFilter(
        worker=worker, states=states, resource=resource, labelled=labelled,
        holders=None if model is health is None else holders,
    )  # fmt: skip
    chosen = [stored for stored in ledger.allocations if asked.matches(stored.record)]
    if not chosen:
        warn(unknown_host or _no_worker(ledger, asked, None if devices else model))
    if as_json:
        output.print_json(ledger_view.as_on_the_wire(chosen[:limit]))
        return
    shown = sorted_for_people(chosen)
    left_out = 0
    if not (everything or worker or states or labelled):
        shown, left_out = _without_long_over(shown)
    if limit is not None:
        left_out += max(0, len(shown) - limit)
        shown = shown[:limit]
    print_workers(shown, datetime.now(UTC), ledger.hosts)
    if not (worker or states):
        output.say_totals(device_totals.totals_in(ledger, devices, resource=resource, model=model, unserved=unserved))
        named = (
            None if resource is model is None else {(each.host, order.id) for each in devices for order in each.orders}
        )
        _say_orders(ledger, named, unserved)
    if left_out:
        warn(f"and {left_out} more" + ("" if limit is not None else " that ended or failed: --all shows them"))


def _no_worker(ledger: LedgerView, asked: WorkerFilter, missing_model: str | None) -> str:
    """Why nothing is shown, where there is such a host. `missing_model`: of no device."""
    from outfitter_service.query import known

    if asked == WorkerFilter():
        return "no workers"
    missing = known.unknown_worker(ledger, asked.worker) if asked.worker is not None else None
    if missing is None and asked.resource is not None:
        missing = known.unknown_resource(ledger, asked.resource)
    if missing is None and missing_model is not None:
        missing = known.unknown_model(ledger, missing_model)
    missing = missing or known.unknown_labels(ledger, asked.labelled)
    return f"no worker matches: {missing}" if missing else "no worker matches"


def _without_long_over(workers: Sequence[StoredAllocation]) -> tuple[list[StoredAllocation], int]:
    """All live workers and the first of those that are over, and the number of the others."""
    over = [stored for stored in workers if is_over(stored)]
    return [*workers[: len(workers) - len(over)], *over[:OVER_SHOWN]], max(0, len(over) - OVER_SHOWN)


def is_over(stored: StoredAllocation) -> bool:
    from outfitter_proto.records import FINAL_STATES

    return stored.record.state in FINAL_STATES


def sorted_for_people(workers: Iterable[StoredAllocation]) -> list[StoredAllocation]:
    """The live workers in their order, then those that are over, the last one first."""
    workers = list(workers)
    over = filter(is_over, workers)
    last_first = sorted(over, key=lambda stored: stored.record.since, reverse=True)
    return [*(stored for stored in workers if not is_over(stored)), *last_first]


def _say_orders(
    ledger: LedgerView, named: Container[tuple[str, str]] | None, unserved: Mapping[str, UnservedHost]
) -> None:
    """Say which operators' orders are in effect: those that are `named` by host and id, or all."""
    from outfitter_service.query import cordons

    found = [
        (host, order)
        for host in sorted(ledger.names)
        for order in cordons.orders_on(ledger, host)
        if named is None or (host, order.id) in named
    ]
    newest = sorted(found, key=lambda pair: pair[1].since)[-ORDERS_SHOWN:]
    for host, order in newest:
        output.say_wrapped(f"{host}: {order_in_words(order, unserved.get(host))}")
    if len(found) > len(newest):
        warn(f"and {len(found) - len(newest)} more orders in effect: `outfitter orders` lists them")


def order_in_words(order: OrderInEffect, unserved: UnservedHost | None) -> str:
    """What an order takes out, for how long it has, and why. `unserved`: that no manager serves its host."""
    from outfitter_proto.signs_of_life import in_words

    said = f"{order.about} cordoned {output.ago(order.since)}: {order.in_words}"
    if unserved is None or unserved.planned is None or not order.is_of_host:
        return said
    return f"{said}; its manager {in_words(unserved.verdict, output.ago)}, as planned"


async def _warn_of_managers(bus: Bus, cluster: str, ledger: LedgerView, host: str | None) -> dict[str, UnservedHost]:
    """Say whose managers are missed. Returns the hosts that no manager serves, by name."""
    from outfitter_proto.bus import BusError
    from outfitter_service.query import managers

    try:
        found = await managers.unserved(bus, cluster, ledger, host)
    except BusError as error:
        warn(f"cannot tell which managers live: {error}")
        return {}
    served = ledger.hosts.keys() - {unserved.host for unserved in found}
    for why, writers in (await managers.unread_orders(bus, cluster, ledger, served)).items():
        who = f"manager {writers[0]}" + (f" and {len(writers) - 1} more" if len(writers) > 1 else "")
        warn(f"{who} cannot read operators' orders: {why}; what is cordoned stays so")
    for unserved in found:
        if unserved.is_missed:
            runs = unserved.verdict.process is not None
            remedy = "" if runs else f". Start one with `outfitter serve --host {unserved.host}`"
            warn(f"{manager_in_words(unserved)}{remedy}")
    return {unserved.host: unserved for unserved in found}


def manager_in_words(unserved: UnservedHost) -> str:
    """What has become of the manager of a host, and who waits for it."""
    from outfitter_proto.signs_of_life import in_words

    waiting = [f"{unserved.waiting} of its workers wait"] if unserved.waiting else []
    if unserved.unanswered:
        waiting.append(f"{unserved.unanswered} messages lie unanswered")
    said = in_words(unserved.verdict, output.ago)
    return "; ".join([f"the manager of host {unserved.host!r} {said}", *waiting])


async def _warn_of_unserved(bus: Bus, cluster: str, ledger: LedgerView, host: str | None) -> None:
    from outfitter_proto.bus import BusError
    from outfitter_service.query import unserved_hosts

    served = ledger.hosts.keys()
    try:
        lost = await unserved_hosts.find(bus, cluster, served=served, host=host, since=datetime.now(UTC) - RECENT)
    except BusError as error:
        warn(f"cannot tell which hosts have no manager: {error}")
        return
    for unserved in lost.hosts[:MOST_UNSERVED]:
        ago = output.age((datetime.now(UTC) - unserved.last).total_seconds())
        warn(
            f"no manager serves host {unserved.host!r}: {unserved.messages} of its messages became dead letters, "
            f"the last one {ago} ago. Start one with `outfitter serve --host {unserved.host}`"
        )
    if (rest := len(lost.hosts) - MOST_UNSERVED) > 0:
        warn(f"more hosts without a manager: {rest}; `outfitter dead-letters --code no-manager` shows them")
    if lost.misdirected:
        counts = ", ".join(f"{code}: {count}" for code, count in sorted(lost.misdirected.items()))
        warn(
            f"messages that reached no manager within the last hour: {counts}. "
            f"`outfitter dead-letters --code {min(lost.misdirected)}` shows what was wrong"
        )


def print_workers(workers: Collection[StoredAllocation], now: datetime, hosts: Mapping[str, Host]) -> None:
    """The table of workers, as it is (or was) at `now`. `hosts`: the hosts' records."""
    from outfitter_service.query import labels, ledger_view

    has_labels = any(record.request.labels for record, _ in workers)
    output.print_table(
        ["host", "worker", "state", "age", "devices", "queue", *(["labels"] if has_labels else []), "reason"],
        (
            (
                record.host,
                record.worker,
                record.state,
                output.age((now - record.since).total_seconds()),
                ledger_view.devices_in_words(record),
                record.queue_position,
                *([labels.in_words(record.request.labels) or None] if has_labels else []),
                "; ".join(
                    filter(
                        None,
                        (
                            record.reason,
                            ledger_view.illness_in_words(record),
                            ledger_view.awaited_owner(record, hosts.get(record.host)),
                            *ledger_view.warnings_of(record),
                        ),
                    )
                )
                or None,
            )
            for record, _ in workers
        ),
    )
