"""`outfitter devices`: the devices that drivers report, and their holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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


HEALTHS = ("healthy", "unhealthy", "unknown")


class DeviceFilter(Struct, frozen=True, kw_only=True):
    """The filters; None selects everything. `free`: only devices that can be lent now."""

    resource: str | None
    health: str | None
    free: bool
    holder: options.WorkerNames | None
    labelled: labels.Wanted

    def matches(self, device: DeviceEntry, *, is_served: bool) -> bool:
        return (
            self.resource in {None, device.resource}
            and self.health in {None, device.health}
            and (not self.free or (is_served and device.line().is_free))
            and (not (self.holder or self.labelled) or any(map(self._is_of, device.holders)))
        )

    def _is_of(self, record: Allocation) -> bool:
        from outfitter_service.query import labels

        of_worker = self.holder is None or self.holder.fits_key(record.key)
        return of_worker and labels.has_all(record.request.labels, self.labelled)


@click.command()
@options.looking_on
@click.option("--resource", metavar="NAME", help="Only devices of this resource.")
@click.option("--health", type=click.Choice(HEALTHS), help="Only devices of this health.")
@click.option("--free", is_flag=True, help="Only devices that can be lent now.")
@click.option("--holder", metavar="WORKER", type=options.WORKER, help=f"Only what this worker holds: {WORKER_FORMS}.")
@options.only_labels
@options.json_output
def devices(
    where: BusConnection,
    /,
    host: str | None,
    resource: str | None,
    health: str | None,
    free: bool,
    holder: options.WorkerNames | None,
    labelled: labels.Wanted,
    as_json: bool,
) -> None:
    """List the devices of all hosts, or of --host: their health, and who holds them.

    The last lines count the devices of each resource, whatever --health, --free, --holder and --label leave out.
    Standard error names resources without devices, and drivers that fail, with the reason.
    """
    import anyio

    from outfitter_service.query import device_lines, known

    chosen = DeviceFilter(resource=resource, health=health, free=free, holder=holder, labelled=labelled)
    ledger, lives, unknown_host = anyio.run(known.look, where, options.host_of(host, holder))
    hosts = sorted(ledger.hosts.values(), key=lambda record: record.host)
    all_devices = [
        (device, lives.get(record.host, UNKNOWN).life not in UNSERVED)
        for record in hosts
        for device in device_lines.entries_of(ledger, record)
    ]
    lines = [device.line() for device, is_served in all_devices if chosen.matches(device, is_served=is_served)]
    for record in hosts:
        _warn_of_absent(record, lives.get(record.host, UNKNOWN), resource)
    if not lines:
        warn(unknown_host or _no_device(ledger, chosen))
    if as_json:
        output.print_json(lines)
        return
    output.print_table(["host", "resource", "index", "device", "health", "held by", "for"], map(_row, lines))
    for total in _totals([each for each in all_devices if resource in {None, each[0].resource}]):
        output.say(total)


def _no_device(ledger: LedgerView, chosen: DeviceFilter) -> str:
    """Why nothing is shown, where there is such a host."""
    from outfitter_service.query import known

    if not ledger.hosts:
        return "no devices: no manager has ever run here"
    missing = None if chosen.resource is None else known.unknown_resource(ledger, chosen.resource)
    if missing is None and chosen.holder is not None:
        missing = known.unknown_worker(ledger, chosen.holder)
    missing = missing or known.unknown_labels(ledger, chosen.labelled)
    return f"no device matches: {missing}" if missing else "no device matches"


def _totals(devices: Iterable[tuple[DeviceEntry, bool]]) -> Iterator[str]:
    """How many devices of each resource are free, held, ill and unknown. An ill one may be held as well. With each
    device stands whether a manager serves its host."""
    counts: dict[str, Counter[str]] = {}
    for device, is_served in devices:
        line = device.line()
        is_held = bool(line.holders) and not line.is_free  # whoever shares a healthy device leaves it free for others
        of_resource = counts.setdefault(line.resource, Counter())
        of_resource["all"] += 1
        of_resource["free"] += line.is_free and is_served
        of_resource["held"] += is_held
        of_resource[line.health] += 1
        of_resource[f"{line.health} and held"] += is_held
        of_resource["unserved"] += line.is_free and not is_served
    for resource, found in sorted(counts.items()):
        parts = [f"{found['free']} free", f"{found['held']} held"]
        for health in HEALTHS[1:]:
            both = found[f"{health} and held"]
            parts.append(f"{found[health]} {health}" + (f" ({both} of them held)" if both else ""))
        parts += [f"{found['unserved']} on hosts without a manager"] if found["unserved"] else []
        yield f"{resource}: {found['all']} {'device' if found['all'] == 1 else 'devices'}: {', '.join(parts)}"


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
        health,
        ", ".join([*(holder.worker for holder in line.holders), *more]) or None,
        ", ".join(output.age((now - holder.since).total_seconds()) for holder in line.holders) or None,
    )
