"""`outfitter devices`: the devices that drivers report, and their holders."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.records import Host
    from outfitter_service.config import Connection
    from outfitter_service.query.device_lines import DeviceLine


@click.command()
@options.looking_on
@options.json_output
def devices(where: Connection, /, host: str | None, as_json: bool) -> None:
    """List the devices of all hosts, or of --host: their health, and who holds them.

    Standard error names resources without devices, with the reason.
    """
    import anyio

    from outfitter_service.query import device_lines, ledger_view

    ledger = anyio.run(ledger_view.read_from, where, host)
    hosts = sorted(ledger.hosts.values(), key=lambda record: record.host)
    lines = [line for record in hosts for line in device_lines.lines_of(ledger, record)]
    for record in hosts:
        _warn_of_absent(record)
    if as_json:
        output.print_json(lines)
    else:
        output.print_table(["host", "resource", "index", "device", "health", "held by", "for"], map(_row, lines))


def _warn_of_absent(host: Host) -> None:
    from outfitter_service.query import device_lines

    for resource, inventory in host.resources.items():
        if left_out := device_lines.left_out(inventory):
            warn(f"{host.host} has {left_out} more {resource}, which its record does not list")
        if not inventory.devices:
            why = f": {inventory.reason}" if inventory.reason else ""
            warn(f"{host.host} has no {resource} ({inventory.state}{why})")
    if host.manager.stopped_at is not None:
        warn(f"no manager serves {host.host} now: its last manager's data is shown")


def _row(line: DeviceLine) -> tuple[object, ...]:
    now = datetime.now(UTC)
    health = line.health if line.reason is None else f"{line.health} ({line.reason})"
    others = line.holder_count - len(line.holders)
    more = [f"and {others} more"] if others else []
    return (
        line.host,
        line.resource,
        line.properties.get("index"),
        line.id,
        health if line.state is None else f"{health}, {line.state}",
        ", ".join([*(holder.worker for holder in line.holders), *more]) or None,
        ", ".join(output.age((now - holder.since).total_seconds()) for holder in line.holders) or None,
    )
