"""`outfitter orders`: what operators ordered, and whether it is in effect."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.bus import BusError
    from outfitter_service.config import BusConnection
    from outfitter_service.query.orders import OrderLine

STATES = {
    "not-taken": "not taken yet",
    "in-effect": "in effect",
    "lost": "in effect, lost in the topic",
    "ending": "in effect, ended",
    "ended": "ended",
}
"""The states of `OrderState`, for people."""


@click.command()
@click.argument("host", required=False, callback=options.named("host"))
@options.of_cluster
@click.option("--ended", is_flag=True, help="Ended orders as well. They are deleted 30 days after their end.")
@options.json_output
def orders(where: BusConnection, /, host: str | None, ended: bool, as_json: bool) -> None:
    """List the orders that take devices out, of all hosts or of HOST, and whether they are in effect.

    An order is in effect once the manager of its host has taken it into the ledger. It stays in effect until the
    manager has taken its end.
    """
    import anyio

    found = anyio.run(_read, where, host)
    shown = [line for line in found.lines if ended or line.since is not None or line.stands]
    if as_json:
        output.print_json(shown)
    elif shown:
        output.print_table(
            ["id", "host", "what", "author", "given", "until", "state", "reason"], map(_row, shown)
        )  # fmt: skip
    if found.error is not None:
        raise found.error
    if not shown:
        warn(f"no order stands{f': {found.why_none}' if found.why_none else ''}")


class _Found(NamedTuple):
    """All orders. `why_none`: why none of them stands; None: nobody gave one. `error`: why there are only those that
    the ledger has in effect."""

    lines: list[OrderLine]
    why_none: str | None = None
    error: BusError | None = None


async def _read(where: BusConnection, host: str | None) -> _Found:
    from msgspec.structs import replace

    from outfitter_proto.bus import BusError
    from outfitter_service.query import known, ledger_view
    from outfitter_service.query import orders as reading

    now = datetime.now(UTC)
    async with ledger_view.opened(where) as bus:
        ledger = await ledger_view.read(bus, where.cluster, host)
        try:
            there = await reading.read(bus, where.cluster, now)
        except BusError as error:
            lines = reading.lines_of(reading.Orders({}, 0), ledger, now, host)
            return _Found([replace(line, state=reading.OrderState.IN_EFFECT) for line in lines], error=error)
        if there.unreadable:
            warn(f"orders that cannot be understood, damaged or of a later version: {there.unreadable}")
        if lines := reading.lines_of(there, ledger, now, host):
            return _Found(lines, "--ended shows those that ended")
        return _Found(lines, await known.unknown_host(bus, where.cluster, ledger, host))


def _row(line: OrderLine) -> tuple[str | None, ...]:
    until = None if line.until is None else f"{line.until.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return line.id, line.host, line.what, line.author, output.ago(line.at), until, _state(line), line.reason


def _state(line: OrderLine) -> str:
    by = f" by {line.ended_by}" if line.ended_by else ""
    return f"{STATES[line.state]}{by}"
