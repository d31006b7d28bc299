"""`outfitter devices`: the devices that drivers report, and their holders."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
from msgspec import Struct

from outfitter_proto.signs_of_life import UNKNOWN, UNSERVED, Verdict, in_words
from outfitter_service.cli._lib import options, output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.cli._lib.options import WORKER_FORMS

if TYPE_CHECKING:
    from outfitter_proto.records import Allocation, Host
    from outfitter_service.config import BusConnection
    from outfitter_service.query import labels
    from outfitter_service.query.device_lines import DeviceEntry, DeviceLine
    from outfitter_service.query.ledger_view import LedgerView


class DeviceFilter(Struct, frozen=True, kw_only=True):
    """The filters of what is true of a device now; None selects everything. `free`: only what can be lent now."""

    name: str | None
    health: str | None
    free: bool
    holder: options.WorkerNames | None
    labelled: labels.Wanted

    def matches(self, device: DeviceEntry, *, is_served: bool) -> bool:
        return (
            (self.name is None or device.is_meant_by(self.name))
            and self.health in {None, device.health}
            and (not self.free or (is_served and device.is_free))
            and (not (self.holder or self.labelled) or any(map(self._is_of, device.holders)))
        )

    def _is_of(self, record: Allocation) -> bool:
        from outfitter_service.query import labels

        of_worker = self.holder is None or self.holder.fits_key(record.key)
        return of_worker and labels.has_all(record.request.labels, self.labelled)


@click.command()
@options.looking_on
@options.only_devices
@click.option("--device", "name", metavar="ID", help="Only this device: its id, or any of its other names.")
@click.option("--free", is_flag=True, help="Only devices that can be lent now.")
@click.option("--holder", metavar="WORKER", type=options.WORKER, help=f"Only what this worker holds: {WORKER_FORMS}.")
@options.only_labels
@options.json_output
def devices(
    where: BusConnection,
    /,
    host: str | None,
    resource: str | None,
    model: str | None,
    health: str | None,
    name: str | None,
    free: bool,
    holder: options.WorkerNames | None,
    labelled: labels.Wanted,
    as_json: bool,
) -> None:
    """List the devices of all hosts, or of --host: their health, and who holds them.

    The last lines count the devices of each resource and each model, and who waits, whatever --device, --health,
    --free, --holder and --label leave out. "kept by": who has parts of the device, or what it is a part of. Standard
    error names resources without devices, and drivers that fail, with the reason.
    """
    import anyio

    from outfitter_service.query import device_totals, known

    chosen = DeviceFilter(name=name, health=health, free=free, holder=holder, labelled=labelled)
    ledger, lives, unknown_host = anyio.run(known.look, where, options.host_of(host, holder))
    hosts = sorted(ledger.hosts.values(), key=lambda record: record.host)
    unserved = {name for name, verdict in lives.items() if verdict.life in UNSERVED}
    about = device_totals.devices_in(ledger, resource, model)
    lines = [device.line() for device in about if chosen.matches(device, is_served=device.host not in unserved)]
    for record in hosts:
        _warn_of_absent(record, lives.get(record.host, UNKNOWN), resource)
    if not lines:
        warn(unknown_host or _no_device(ledger, chosen, resource, None if about else model))
    if as_json:
        output.print_json(lines)
        return
    _print_table(lines)
    output.say_totals(device_totals.totals_in(ledger, about, resource=resource, model=model, unserved=unserved))


def _no_device(ledger: LedgerView, chosen: DeviceFilter, resource: str | None, missing_model: str | None) -> str:
    """Why nothing is shown, where there is such a host. `missing_model`: of no device."""
    from outfitter_service.query import known, orders

    if not ledger.hosts:
        return "no devices: no manager has ever run here"
    missing = None if resource is None else known.unknown_resource(ledger, resource)
    if missing is None and missing_model is not None:
        missing = known.unknown_model(ledger, missing_model)
    if missing is None and chosen.name is not None and len(ledger.hosts) == 1:
        missing = orders.what_is_missing(ledger, next(iter(ledger.hosts)), resource, chosen.name)
    if missing is None and chosen.holder is not None:
        missing = known.unknown_worker(ledger, chosen.holder)
    missing = missing or known.unknown_labels(ledger, chosen.labelled)
    return f"no device matches: {missing}" if missing else "no device matches"


def _warn_of_absent(host: Host, verdict: Verdict, only: str | None) -> None:
    from outfitter_proto.records import ReasonCode
    from outfitter_service.query import device_lines

    for resource, inventory in host.resources.items():
        if only not in {None, resource}:
            continue
        if left_out := device_lines.left_out(inventory):
            warn(f"{host.host} has {left_out} more {resource}, which its record does not list")
        if not inventory.devices:
            why = f": {inventory.reason}" if inventory.reason else ""
            warn(f"{host.host} has no {resource} ({inventory.state}{why})")
        elif inventory.state == ReasonCode.DRIVER_FAILED:
            why = inventory.reason or "its record has no room for the reason"
            warn(f"the driver of {resource} on {host.host} fails now: {why}")
    if verdict.life in UNSERVED:
        why = in_words(verdict, output.ago)
        warn(f"no manager serves {host.host} now (it {why}): its last manager's data is shown")


def _print_table(lines: Sequence[DeviceLine]) -> None:
    """The devices, with a column for what any of them has a value of."""
    optional = {
        "name": [line.properties.get("name") for line in lines],
        "model": [line.model for line in lines],
        "MIG": [line.properties.get("mig.profile") for line in lines],
        "memory": [line.memory for line in lines],
    }
    said = {heading: cells for heading, cells in optional.items() if any(cells)}
    output.print_table(
        ["host", "resource", "index", "device", *said, "health", "held by", "for"],
        (
            (line.host, line.resource, line.properties.get("index"), line.id, *more, *_state(line))
            for line, *more in zip(lines, *said.values(), strict=True)
        ),
    )


def _state(line: DeviceLine) -> tuple[str | None, ...]:
    """Its health, who holds it, and for how long."""
    now = datetime.now(UTC)
    health = line.health if line.reason is None else f"{line.health} ({line.reason})"
    if line.cordoned_because is not None:
        health += f", cordoned: {line.cordoned_because}"
    if line.stranger is not None:
        health += f", used by {line.stranger}"
    if line.kept_by and not line.holders:
        health += f", kept by {', '.join(dict.fromkeys(holder.worker for holder in line.kept_by))}"
    others = line.holder_count - len(line.holders)
    more = [f"and {others} more"] if others else []
    return (
        health,
        ", ".join([*(holder.worker for holder in line.holders), *more]) or None,
        ", ".join(output.age((now - holder.since).total_seconds()) for holder in line.holders) or None,
    )
