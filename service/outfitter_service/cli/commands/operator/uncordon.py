"""`outfitter uncordon`: end orders that keep devices from being lent."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, ordering, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_service.query.orders import OrderLine, Orders


@click.command()
@click.argument("host", callback=options.named("host"))
@ordering.not_an_option
@options.of_cluster
@ordering.resource
@ordering.device
@click.option("--order", "order_id", metavar="ID", help="End this order, whoever gave it.")
@click.option("--all", "is_all", is_flag=True, help="End the orders of all authors, also about parts.")
@ordering.author
@ordering.wait
@click.pass_context
def uncordon(
    ctx: click.Context,
    where: BusConnection,
    /,
    host: str,
    resource: str | None,
    device: str | None,
    order_id: str | None,
    is_all: bool,
    author: str,
    wait: float,
) -> None:
    """End your own orders about HOST, or about one resource or device there, and list the others.

    Your orders about a part stand: those about devices if you name a resource, and those about resources or devices if
    you name the host alone.

    History says who ended an order. Devices are lent again when no order takes them out any more.

    The exit code is 0 if the orders are ended and no longer in effect, or if no order stands. It is 1 if nothing was
    ended, because the orders are those of others or about parts. It is 75 if orders are ended and no manager has taken
    that yet.
    """
    import anyio

    if order_id is not None and (is_all or resource is not None or device is not None):
        raise click.UsageError("--order names one order: leave out --all, --resource and --device", ctx)
    anyio.run(_uncordon, where, host, resource, device, order_id, is_all, author, wait)


async def _uncordon(
    where: BusConnection,
    host: str,
    resource: str | None,
    device: str | None,
    order_id: str | None,
    is_all: bool,
    author: str,
    wait: float,
) -> None:
    from outfitter_service.query import known, ledger_view, orders
    from outfitter_service.query.orders import OrderState

    now = datetime.now(UTC)
    async with ledger_view.opened(where) as bus, orders.following(bus, where.cluster, host) as followed:
        there = await orders.read(bus, where.cluster, now)
        lines = orders.lines_of(there, followed.ledger, now, host)
        if not lines and (unknown := await known.unknown_host(bus, where.cluster, followed.ledger, host)):
            raise OutfitterCliError(unknown)
        selection = orders.selected(followed.ledger, host, resource, device)
        is_named = any(selection.has(line) for line in lines)
        if not is_named and host in followed.ledger.hosts:
            missing = orders.what_is_missing(followed.ledger, host, resource, device)
            if missing is not None:
                raise OutfitterCliError(f"nothing was ended: {missing}")
        if order_id is not None:
            chosen = [_named(order_id, there, lines, host)]
        else:
            own = [line for line in lines if line.author == author and selection.is_all_of(line)]
            chosen = [line for line in lines if selection.has(line)] if is_all else own
        for line in chosen:
            if line.ended_at is None and line.state is not OrderState.ENDED:
                await orders.publish(bus, where.cluster, line.ended(author, now))
                output.say(f"{line.id}  ended")
        sys.stdout.flush()
        await ordering.tidy(bus, where.cluster, there, now)
        pending = [line.id for line in chosen if line.state is not OrderState.ENDED]
        _tell_of_others(
            [line for line in lines if line.stands and line not in chosen and selection.meets(line)],
            [line for line in lines if line.stands and line not in chosen],
            pending,
        )
        if pending and wait > 0:
            await ordering.await_manager(bus, where.cluster, followed, pending, wait, given=False)


def _named(order_id: str, there: Orders, lines: Sequence[OrderLine], host: str) -> OrderLine:
    """The order with this id.

    Raises:
        OutfitterCliError: there is none of this host.
    """
    for line in lines:
        if line.id == order_id:
            if not line.stands and line.ended_by is not None:
                warn(f"{line.ended_by} has ended order {order_id} already, {output.ago(line.ended_at or line.at)}")
            return line
    if order_id in there.by_id:
        raise OutfitterCliError(f"order {order_id} is about host {there.by_id[order_id].host}, not about {host}")
    left = [line for line in lines if line.stands]
    known = f"those that stand: {ordering.in_words(left)}" if left else "no order stands there"
    raise OutfitterCliError(f"there is no order {order_id!r} about {host}; {known}")


def _tell_of_others(rest: Sequence[OrderLine], all_left: Sequence[OrderLine], pending: Sequence[str]) -> None:
    """Say which orders still take devices out that were meant. `all_left`: also those about other devices.

    Raises:
        OutfitterCliError: there are some, and nothing was ended.
    """
    if rest and not pending:
        raise OutfitterCliError(
            f"nothing was ended: others' orders, or orders about more or less than this, take it out: "
            f"{ordering.in_words(rest)}. `--order ID` ends one, whoever gave it, and `--all` those of all authors"
        )
    if rest:
        warn(f"still out, by {ordering.in_words(rest)}")
    elif not pending:
        warn(f"no such order stands{f'; those that do: {ordering.in_words(all_left)}' if all_left else ''}")
