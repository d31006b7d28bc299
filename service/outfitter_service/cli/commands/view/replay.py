"""`outfitter replay`: the workers as they stood at a moment in the past, rebuilt from history alone."""

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


class Found(NamedTuple):
    """The allocations at the chosen moment and, with `--check`, the comparison at the end."""

    allocations: list[Stored]
    comparison: Comparison | None


@click.command()
@click.option(
    "--at",
    metavar="TIME",
    callback=options.moment,
    help="The moment: 2026-01-31T12:00:00Z, or how long ago it was, such as 10m. The end of history by default.",
)
@click.option(
    "--check", is_flag=True, help="Replay to the end, too, and compare that with the ledger: exit code 1 if it differs."
)
@options.looking_on
@options.json_output
@click.pass_context
def replay(
    ctx: click.Context, /, at: datetime | None, check: bool, config: str | None, as_json: bool, **_options: object
) -> int:
    """Show the workers of all hosts, or of --host, as they stood at a moment: `outfitter status` of then.

    With --json: the allocation records as they stood on the bus.
    """
    import anyio

    from outfitter_service.cli.commands.view.status import print_workers
    from outfitter_service.config import connection
    from outfitter_service.query import ledger_view

    now = datetime.now(UTC)
    if at is not None and at > now:
        raise click.BadParameter(f"{at:%Y-%m-%dT%H:%M:%SZ} is yet to come", ctx, param_hint="--at")
    found = anyio.run(_look, connection(config, options.given(ctx)), options.given(ctx).get("host"), at, check)
    if as_json:
        output.print_json(ledger_view.as_on_the_wire(found.allocations))
    else:
        print_workers(found.allocations, at or now)
    return _judge(found.comparison) if found.comparison is not None else 0


async def _look(where: Connection, host: str | None, at: datetime | None, check: bool) -> Found:
    from outfitter_service.query import ledger_view, rebuild

    async with ledger_view.opened(where) as bus:
        parts = await rebuild.rebuild(bus, where, host, at)
        if not any(part.checkpoints for part in parts):
            raise OutfitterCliError("nothing was ever decided" + (f" for host {host}" if host else ""))
        known = any(progress.whole is not None for part in parts for progress in part.writers.values())
        for part in parts:
            missing = [name for name, one in part.writers.items() if not one.known]
            begins = await rebuild.oldest(bus, where, part, missing) if missing else {}
            for writer in missing:
                told = _unknown(writer, at, begins.get(writer))
                if not known:
                    raise OutfitterCliError(told)
                warn(told)
        allocations = rebuild.allocations(parts, host)
        comparison = None
        if check:
            ended = parts if at is None else await rebuild.rebuild(bus, where, host, None)
            comparison = rebuild.compare(ended, host)
    return Found(allocations, comparison)


def _unknown(writer: str, at: datetime | None, begins: datetime | None) -> str:
    off = "switched off (history = false)"
    if begins is None:
        return f"of {writer} there is no history: it is or was {off}, or its retention has deleted it"
    if at is None:
        return f"the history of {writer} does not reach its last commit: it was {off} meanwhile"
    moments = f"{at:%Y-%m-%dT%H:%M:%SZ}: the oldest that can be replayed is {begins:%Y-%m-%dT%H:%M:%S.%fZ}"
    return f"the history of {writer} does not tell of {moments}"


def _judge(told: Comparison) -> int:
    """Print the result of the comparison; return the exit code."""
    for writer in told.unknown:
        warn(f"{writer} was not compared: its history does not reach its last commit")
    for one in told.differences[:SHOWN]:
        field = "" if one.field is None else f", field {one.field}"
        warn(f"{one.key}{field}: the ledger has {_short(one.ledger)}, history {_short(one.history)}")
    if len(told.differences) > SHOWN:
        warn(f"and {len(told.differences) - SHOWN} more differences")
    if told.differences:
        return 1
    warn(f"the end of history is the ledger: {told.records} records of {told.writers} writers, every field")
    return 1 if told.unknown else 0


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
