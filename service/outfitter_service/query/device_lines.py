"""The devices of hosts with their health and their holders: what commands and the API show of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, Struct

from outfitter_proto.records import Allocation, Device, Host, ResourceInventory
from outfitter_service.query import ledger_view
from outfitter_service.query.ledger_view import LedgerView

NOT_REPORTED = "its driver does not report it"


class DeviceHolder(Struct, frozen=True, kw_only=True):
    """An allocation that holds a device. `since`: when it got into its state. `delayed_by`: why a releasing device is
    not free yet. `shared`: it may share the device with others."""

    worker: str
    incarnation: str
    state: str
    token: int | None
    since: datetime
    delayed_by: str | None = None
    shared: bool = False


class DeviceLine(Struct, frozen=True, kw_only=True):
    """One device of one host. `state`: its state apart from allocations (a quarantine), or None. `listed`: the host's
    record has it. Otherwise a worker holds it."""

    host: str
    resource: str
    id: str
    health: str
    sharing: str
    reason: str | None = None
    state: str | None = None
    properties: dict[str, str] = {}
    holders: list[DeviceHolder] = []
    listed: bool = True


def lines_of(ledger: LedgerView, host: Host) -> list[DeviceLine]:
    """The devices that a host's record lists, and the held ones that it does not list."""
    records = {device.id: device for device in ledger.of(Device, host.host)}
    holders = _holders_by_device(ledger, host.host)
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
                    holders=holders.get(device.id, []),
                )
            )
    return lines + _unlisted(ledger, host, {line.id for line in lines}, holders)


def _holders_by_device(ledger: LedgerView, host: str) -> dict[str, list[DeviceHolder]]:
    holders: dict[str, list[DeviceHolder]] = {}
    for record in ledger.live(host):
        alone = {
            device.get("id") for name in record.resources.keys() - record.shared for device in record.resources[name]
        }
        for device_id in ledger_view.held_ids(record):
            holders.setdefault(device_id, []).append(_holder(record, shared=device_id not in alone))
    return holders


def _unlisted(
    ledger: LedgerView, host: Host, listed: set[str], holders: dict[str, list[DeviceHolder]]
) -> list[DeviceLine]:
    lines: dict[str, DeviceLine] = {}
    incomplete = {name for name, inventory in host.resources.items() if left_out(inventory)}
    for record in ledger.live(host.host):
        for resource, held in record.resources.items():
            for device in held:
                device_id = device.get("id", "")
                if device_id not in listed and device_id not in lines:
                    health, reason = _health_of(device) if resource in incomplete else ("unknown", NOT_REPORTED)
                    lines[device_id] = DeviceLine(
                        host=host.host,
                        resource=resource,
                        id=device_id,
                        health=health,
                        sharing="shared" if resource in record.shared else "exclusive",
                        reason=reason,
                        properties=device,
                        holders=holders.get(device_id, []),
                        listed=False,
                    )
    return list(lines.values())


def _health_of(info: Mapping[str, str]) -> tuple[str, str | None]:
    """The health of a held device and its reason. Its holder's record has those of the driver's last report."""
    return info.get("health", "healthy"), info.get("health.reason")


def _holder(record: Allocation, *, shared: bool) -> DeviceHolder:
    return DeviceHolder(
        worker=record.worker,
        incarnation=record.incarnation,
        state=record.state,
        token=record.token,
        since=record.since,
        delayed_by=record.delayed_by or None,
        shared=shared,
    )


def left_out(inventory: ResourceInventory) -> int:
    """The number of reported devices that the record does not list one by one."""
    return 0 if inventory.total is UNSET else inventory.total - len(inventory.devices)
