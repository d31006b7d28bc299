"""`outfitter status`: every worker, and what it holds or waits for."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli import options, output

if TYPE_CHECKING:
    from outfitter_service.cli.ledger import Stored


@click.command()
@options.connection
@options.json_output
@click.pass_context
def status(ctx: click.Context, /, config: str | None, as_json: bool, **_options: object) -> None:
    """List the workers of all hosts, or of --host: what they hold, or why they wait.

    With --json: the allocation records as they stand on the bus, ended ones included until they are deleted there.
    """
    import anyio

    from outfitter_service.cli import ledger
    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    narrowed = options.given(ctx).get("host")

    async def look() -> ledger.Ledger:
        async with ledger.opened(where) as bus:
            return await ledger.read(bus, where.cluster, narrowed)

    found = anyio.run(look).allocations
    if as_json:
        output.print_json(ledger.as_on_the_wire(found))
        return
    print_workers(found, datetime.now(UTC))


def print_workers(found: Iterable[Stored], now: datetime) -> None:
    """The table of workers, as it is (or was) at `now`."""
    from outfitter_service.cli import ledger

    output.print_table(
        ["host", "worker", "state", "age", "devices", "queue", "reason"],
        (
            (
                record.host,
                record.worker,
                record.state,
                output.age((now - record.since).total_seconds()),
                ledger.devices_in_words(record),
                record.queue_position,
                record.reason,
            )
            for record, _ in found
        ),
    )
