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
    Hosts that workers ask for and that no manager serves are named on standard error.
    """
    import anyio

    from outfitter_proto.bus import Bus, BusError
    from outfitter_service.cli import errors, ledger, unserved
    from outfitter_service.config import connection

    where = connection(config, options.given(ctx))
    narrowed = options.given(ctx).get("host")

    async def look() -> ledger.Ledger:
        async with ledger.opened(where) as bus:
            found = await ledger.read(bus, where.cluster, narrowed)
            await warn_of_unserved(bus, found)
            return found

    async def warn_of_unserved(bus: Bus, found: ledger.Ledger) -> None:
        served = {record.host for record in found.hosts.values()}
        try:
            hosts = await unserved.find(bus, where.cluster, served=served, host=narrowed)
        except BusError as error:
            errors.warn(f"cannot tell which hosts have no manager: {error}")
            return
        for host, messages, last in hosts:
            ago = output.age((datetime.now(UTC) - last).total_seconds())
            errors.warn(
                f"no manager serves host {host!r}: {messages} of its messages went to the dead letters, the last one "
                f"{ago} ago. Start one with `outfitter serve --host {host}`"
            )

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
