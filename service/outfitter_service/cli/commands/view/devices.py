"""`outfitter devices`: the devices that drivers report, and their holders."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import UNSET, Struct

from outfitter_service.cli._lib import options, output
from outfitter_service.query.errors import warn

if TYPE_CHECKING:
    from outfitter_proto.records import Allocation, Host, ResourceInventory
    from outfitter_service.config import Connection
    from outfitter_service.query.ledger_view import LedgerView

NOT_REPORTED = "its driver does not report it"


class DeviceHolder(Struct, frozen=True, kw_only=True):
    """An allocation that holds a device. `since`: when it got into its state. `delayed_by`: why a releasing device is
    not free yet."""

    worker: str
    incarnation: str
    state: str
    token: int | None
    since: datetime
    delayed_by: str | None = None


class DeviceLine(Struct, frozen=True, kw_only=True):
    """One device of one host. `state`: its state apart from allocations (a quarantine), or None."""

    host: str
    resource: str
    id: str
    health: str
    sharing: str
    reason: str | None = None
    state: str | None = None
    properties: dict[str, str] = {}
    holders: list[DeviceHolder] = []


@click.command()
@options.looking_on
@options.json_output
def devices(where: Connection, /, host: str | None, as_json: bool) -> None:
    """List the devices of all hosts, or of --host: their health, and who holds them.

    Standard error names resources without devices, with the reason.
    """
    import anyio

    from outfitter_service.query import ledger_view

    ledger = anyio.run(ledger_view.read_from, where, host)
    hosts = sorted(ledger.hosts.values(), key=lambda record: record.host)
    lines = [line for record in hosts for line in lines_of(ledger, record)]
    for record in hosts:
        _warn_of_absent(record)
    if as_json:
        output.print_json(lines)
    else:
        output.print_table(["host", "resource", "index", "device", "health", "held by", "for"], map(_row, lines))


def lines_of(ledger: LedgerView, host: Host) -> list[DeviceLine]:
    """The reported devices of a host, and the held ones that no driver reports any more."""
    from outfitter_proto.records import Device

    records = {device.id: device for device in ledger.of(Device) if device.host == host.host}
    lines: list[DeviceLine] = []
    for resource, inventory in host.resources.items():
        for device in inventory.devices:
            record = records.get(device.id)
            lines.append(
                DeviceLine(
                    host=host.host,
                    resource=resource,
                    id=device.id,
                    health=device.health,
                    sharing=inventory.sharing,
                    reason=device.reason or (record.reason if record else None),
                    state=record.state if record else None,
                    properties=device.properties,
                    holders=[_holder(allocation) for allocation in ledger.holders(host.host, device.id)],
                )
            )
    return lines + list(_unreported(ledger, host, {line.id for line in lines}))


def _unreported(ledger: LedgerView, host: Host, reported: set[str]) -> list[DeviceLine]:
    lines: dict[str, DeviceLine] = {}
    incomplete = {name for name, inventory in host.resources.items() if _left_out(inventory)}
    for record in ledger.live(host.host):
        for resource, held in record.resources.items():
            for device in held:
                device_id = device.get("id", "")
                if device_id not in reported and device_id not in lines:
                    lines[device_id] = DeviceLine(
                        host=host.host,
                        resource=resource,
                        id=device_id,
                        health="unknown",
                        sharing="shared" if resource in record.shared else "exclusive",
                        reason="the host's record does not list it" if resource in incomplete else NOT_REPORTED,
                        properties=device,
                        holders=[_holder(allocation) for allocation in ledger.holders(host.host, device_id)],
                    )
    return list(lines.values())


def _holder(record: Allocation) -> DeviceHolder:
    return DeviceHolder(
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        token=record.token,
        since=record.since,
        delayed_by=record.delayed_by or None,
    )


def _left_out(inventory: ResourceInventory) -> int:
    """The number of reported devices that the record does not list one by one."""
    return 0 if inventory.total is UNSET else inventory.total - len(inventory.devices)


def _warn_of_absent(host: Host) -> None:
    for resource, inventory in host.resources.items():
        if left_out := _left_out(inventory):
            warn(f"{host.host} has {left_out} more {resource}, which its record does not list")
        if not inventory.devices:
            why = f": {inventory.reason}" if inventory.reason else ""
            warn(f"{host.host} has no {resource} ({inventory.state}{why})")
    if host.manager.stopped_at is not None:
        warn(f"no manager serves {host.host} now: its last manager's data is shown")


def _row(line: DeviceLine) -> tuple[object, ...]:
    now = datetime.now(UTC)
    health = line.health if line.reason is None else f"{line.health} ({line.reason})"
    return (
        line.host,
        line.resource,
        line.properties.get("index"),
        line.id,
        health if line.state is None else f"{health}, {line.state}",
        ", ".join(holder.worker for holder in line.holders) or None,
        ", ".join(output.age((now - holder.since).total_seconds()) for holder in line.holders) or None,
    )
