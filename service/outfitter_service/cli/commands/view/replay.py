"""`outfitter replay`: the workers as they were at a moment in the past, rebuilt from history alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.query.errors import OutfitterCliError

if TYPE_CHECKING:
    from outfitter_service.config import BusConnection
    from outfitter_service.query.ledger_view import StoredAllocation


@click.command()
@click.option(
    "--at",
    metavar="TIME",
    callback=options.moment,
    help="The moment: 2026-01-31T12:00:00Z, or a duration ago, such as 10m. Default: the end of history.",
)
@click.option("--check", is_flag=True, hidden=True)
@options.looking_on
@options.json_output
def replay(where: BusConnection, /, at: datetime | None, check: bool, host: str | None, as_json: bool) -> int:
    """Show the workers of all hosts, or of --host, as `outfitter status` showed them at a moment.

    With --json: the allocation records as they were on the bus.
    """
    if check:
        raise click.UsageError("there is no --check any more: `outfitter verify` compares history with the ledger")
    import anyio

    from outfitter_service.cli.commands.view.status import print_workers
    from outfitter_service.query import ledger_view

    now = datetime.now(UTC)
    if at is not None and at > now:
        raise click.BadParameter(f"{at:%Y-%m-%dT%H:%M:%SZ} is in the future", param_hint="--at")
    allocations = anyio.run(_replay, where, host, at)
    if as_json:
        output.print_json(ledger_view.as_on_the_wire(allocations))
    else:
        print_workers(allocations, at or now, {})
    return 0


async def _replay(where: BusConnection, host: str | None, at: datetime | None) -> list[StoredAllocation]:
    from outfitter_service.query import known, ledger_view, rebuild

    async with ledger_view.opened(where) as bus:
        parts = await rebuild.rebuild(bus, where, host, at)
        if not any(part.checkpoints for part in parts):
            ledger = await ledger_view.read(bus, where.cluster, host)
            why = await known.unknown_host(bus, where.cluster, ledger, host)
            of_host = f" for host {host}" if host else ""
            raise OutfitterCliError(f"the ledger is empty{of_host}" + (f": {why}" if why else ""))
        is_any_known = any(progress.complete_since is not None for part in parts for progress in part.writers.values())
        for part in parts:
            unknown = [writer for writer, progress in part.writers.items() if not progress.is_known]
            begins = await rebuild.oldest(bus, where, part, unknown) if unknown else {}
            for writer in unknown:
                message = _unknown(writer, at, begins.get(writer))
                if not is_any_known:
                    raise OutfitterCliError(message)
                warn(message)
        return rebuild.allocations(parts, host)


def _unknown(writer: str, at: datetime | None, begins: datetime | None) -> str:
    off = "switched off (history = false)"
    if begins is None:
        return f"there is no history of {writer}: it is or was {off}, or its retention has deleted it"
    if at is None:
        return f"the history of {writer} does not reach its last commit: it was {off} meanwhile"
    return (
        f"the history of {writer} does not cover {at:%Y-%m-%dT%H:%M:%SZ}: "
        f"the oldest moment that can be replayed is {begins:%Y-%m-%dT%H:%M:%S.%fZ}"
    )
