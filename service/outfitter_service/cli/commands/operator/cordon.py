"""`outfitter cordon`: order that devices are lent to nobody."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_proto.records import MAX_REASON
from outfitter_service.cli._lib import options, ordering, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_service.query.orders import FollowedHost, Selection


def _reason(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    if not value.strip():
        raise click.BadParameter("say why: whoever waits for the devices is shown it")
    if len(value.strip()) > MAX_REASON:
        warn(f"only the first {MAX_REASON} characters of the reason are kept")
    return value.strip()[:MAX_REASON]


@click.command()
@click.argument("host", callback=options.named("host"))
@ordering.not_an_option
@options.of_cluster
@ordering.resource
@ordering.device
@click.option("--reason", metavar="TEXT", required=True, callback=_reason, help="Why, for whoever waits or looks on.")
@click.option(
    "--until", "ends", metavar="TIME", callback=options.moment_ahead,
    help="It ends by itself then, by the clock of the host's manager: 2026-01-31T12:00:00Z, or 2h (from now on).",
)  # fmt: skip
@ordering.author
@ordering.wait
def cordon(
    where: BusConnection,
    /,
    host: str,
    resource: str | None,
    device: str | None,
    reason: str,
    ends: datetime | None,
    author: str,
    wait: float,
) -> None:
    """Order that no device of HOST is lent: of one resource with --resource, only one device with --device.

    Whoever has a device keeps it, and who waits goes on waiting. The command prints the order's id. `uncordon` ends the
    order. Devices are lent again when no order takes them out.

    The exit code is 0 if the order is in effect, or with --wait 0 if it is written. It is 75 if it is written and no
    manager has taken it yet: then the order stands.
    """
    import anyio

    anyio.run(_cordon, where, host, resource, device, reason, ends, author, wait)


async def _cordon(
    where: BusConnection,
    host: str,
    resource: str | None,
    device: str | None,
    reason: str,
    ends: datetime | None,
    author: str,
    wait: float,
) -> None:
    from msgspec import UNSET

    from outfitter_proto.records import CordonOrder
    from outfitter_service.query import known, ledger_view, orders

    now = datetime.now(UTC)
    async with ledger_view.opened(where) as bus, orders.following(bus, where.cluster, host) as followed:
        missing = await known.unknown_host(bus, where.cluster, followed.ledger, host)
        missing = missing or orders.what_is_missing(followed.ledger, host, resource, device)
        if missing is not None:
            raise OutfitterCliError(f"nothing was ordered: {missing}")
        there = await orders.read(bus, where.cluster, now)
        selection = orders.selected(followed.ledger, host, resource, device)
        order_id = orders.new_id(now, [*there.by_id, *followed.in_effect])
        out_before = _count_out(followed)
        order = CordonOrder(
            id=order_id, host=host, author=author, reason=reason, at=now, resource=resource or UNSET,
            device=device or UNSET, until=ends or UNSET,
        )  # fmt: skip
        await orders.publish(bus, where.cluster, order)
        output.say(order.id)
        sys.stdout.flush()
        await ordering.tidy(bus, where.cluster, there, now)
        if wait > 0:
            await ordering.await_manager(bus, where.cluster, followed, [order.id], wait, given=True, until=ends)
            output.say(_effect(followed, selection, out_before), err=True)


def _count_out(followed: FollowedHost) -> int:
    """How many devices the host's record counts as cordoned, once each resource."""
    record = followed.ledger.hosts.get(followed.host)
    return sum(inventory.cordoned or 0 for inventory in record.resources.values()) if record is not None else 0


def _effect(followed: FollowedHost, selection: Selection, out_before: int) -> str:
    """What is lent to nobody now, and who keeps it, in words. `out_before`: see `_count_out`."""
    from outfitter_service.query import orders

    taken_out = orders.covered(followed.ledger, selection)
    if not taken_out:
        text = f"in effect on {followed.host}, and about no device that the host's record lists"
        more = _count_out(followed) - out_before
        if more > 0:
            return f"{text}: {more} more cordoned than before"
        return f"{text}: as many are cordoned as before. Is the name right? Else end the order"
    counts = Counter(entry.resource for entry in taken_out)
    devices = ", ".join(f"{count} {resource}" for resource, count in counts.items())
    now = f": nobody gets {devices} there now" if devices else ""
    keeping = dict.fromkeys(holder.worker for entry in taken_out for holder in [*entry.holders, *entry.kept_by])
    kept = f"; kept until they end: those of {', '.join(keeping)}" if keeping else ""
    return f"in effect on {followed.host}{now}{kept}"
