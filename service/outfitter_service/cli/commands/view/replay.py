"""`outfitter replay`: the workers as they were at a moment in the past, rebuilt from history alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import OutfitterCliError, warn

if TYPE_CHECKING:
    from outfitter_service.config import Connection
    from outfitter_service.query.ledger_view import Stored
    from outfitter_service.query.rebuild import Comparison

SHOWN = 50
"""Most differences that are printed one by one."""


class Replayed(NamedTuple):
    """The allocations at the chosen moment and, with `--check`, the comparison at the end."""

    allocations: list[Stored]
    comparison: Comparison | None


@click.command()
@click.option(
    "--at",
    metavar="TIME",
    callback=options.moment,
    help="The moment: 2026-01-31T12:00:00Z, or a duration ago, such as 10m. Default: the end of history.",
)
@click.option(
    "--check", is_flag=True, help="Also replay to the end and compare with the ledger. Exit code 1 if they differ."
)
@options.looking_on
@options.json_output
def replay(where: Connection, /, at: datetime | None, check: bool, host: str | None, as_json: bool) -> int:
    """Show the workers of all hosts, or of --host, as `outfitter status` showed them at a moment.

    With --json: the allocation records as they were on the bus.
    """
    import anyio

    from outfitter_service.cli.commands.view.status import print_workers
    from outfitter_service.query import ledger_view

    now = datetime.now(UTC)
    if at is not None and at > now:
        raise click.BadParameter(f"{at:%Y-%m-%dT%H:%M:%SZ} is in the future", param_hint="--at")
    replayed = anyio.run(_replay, where, host, at, check)
    if as_json:
        output.print_json(ledger_view.as_on_the_wire(replayed.allocations))
    else:
        print_workers(replayed.allocations, at or now, {})
    return _print_comparison(replayed.comparison) if replayed.comparison is not None else 0


async def _replay(where: Connection, host: str | None, at: datetime | None, check: bool) -> Replayed:
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
        allocations = rebuild.allocations(parts, host)
        comparison = None
        if check:
            last = parts if at is None else await rebuild.rebuild(bus, where, host, None)
            comparison = rebuild.compare(last, host)
    return Replayed(allocations, comparison)


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


def _print_comparison(comparison: Comparison) -> int:
    """Print the result of the comparison; return the exit code."""
    for writer in comparison.unknown:
        warn(f"{writer} was not compared: its history does not reach its last commit")
    for difference in comparison.differences[:SHOWN]:
        field = "" if difference.field is None else f", field {difference.field}"
        in_ledger, in_history = _short(difference.ledger), _short(difference.history)
        warn(f"{difference.key}{field}: the ledger has {in_ledger}, history {in_history}")
    if len(comparison.differences) > SHOWN:
        warn(f"and {len(comparison.differences) - SHOWN} more differences")
    if comparison.differences:
        return 1
    warn(f"history equals the ledger: {comparison.records} records of {comparison.writers} writers, every field")
    return 1 if comparison.unknown else 0


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
