"""What is said of a host: its inventory record, and the infos of devices whose state has changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import MAX_LISTED_DEVICES, Health, Host, InventoryDevice, ResourceInventory
from outfitter_service.core import reasons
from outfitter_service.core.decision import Rules
from outfitter_service.core.model import KnownDevice, ResourceSpec, SpecState
from outfitter_service.core.state.held_back_devices import remembered
from outfitter_service.core.state.host_state import Inventory
from outfitter_service.core.state.infos import info

MAX_KNOWN_NAMES = 1024
"""Names of known devices in a host's record, while others are held back. After a restart, what is beyond counts as new.
"""


def host_record(before: Host, rules: Rules, inventories: Mapping[str, Inventory], now: datetime) -> Host | None:
    """The host's record with its inventories as they are now, or None if nothing has changed."""
    resources = {
        name: _inventory(spec, inventories.get(name), before.resources.get(name)) for name, spec in rules.specs.items()
    }
    resources = fitting(resources, rules.max_bytes // 2)
    if resources == before.resources:
        return None
    return structs.replace(before, resources=resources, since=now)


def fitting(resources: dict[str, ResourceInventory], most: int) -> dict[str, ResourceInventory]:
    """What can be said of a host's resources in `most` bytes: of the one that takes most, half as many devices are
    listed, again and again; then no reason is given, then fewer names, then fewer known ones, and then it is left out.
    Devices are counted in any case."""
    resources = dict(resources)
    sizes = {name: len(name) + len(encode(one)) for name, one in resources.items()}
    while sum(sizes.values()) > most:
        name = max(sizes, key=sizes.__getitem__)
        shorter = _shorter(resources[name])
        if shorter is None:
            del resources[name], sizes[name]
        else:
            resources[name] = shorter
            sizes[name] = len(name) + len(encode(shorter))
    return resources


def _shorter(told: ResourceInventory) -> ResourceInventory | None:
    """The same with less said of it; None: nothing is left to leave out."""
    if told.devices:
        return structs.replace(told, devices=told.devices[: len(told.devices) // 2])
    if told.reason:
        return structs.replace(told, reason=None)
    if told.names:
        return structs.replace(told, names=told.names[: len(told.names) // 2] or UNSET)
    if told.known:
        return structs.replace(told, known=told.known[: len(told.known) // 2])
    return None


def _inventory(spec: ResourceSpec, inventory: Inventory | None, before: ResourceInventory | None) -> ResourceInventory:
    sharing = "shared" if spec.shared else "exclusive"
    if spec.state != SpecState.OK:
        return ResourceInventory(
            state=spec.state,
            reason=reasons.not_in_effect(spec),
            amount=spec.amount,
            sharing=sharing,
            known=remembered(spec, before),
        )
    found = inventory.devices if inventory else ()
    if inventory is None or (inventory.failure is None and not inventory.reported):
        state, reason = "not-reported", reasons.not_reported(spec)
    elif inventory.failure is not None:
        state, reason = "driver-failed", inventory.failure.reason
    else:
        state, reason = "reported", None
    return ResourceInventory(
        state=state,
        reason=reason,
        amount=spec.amount,
        sharing=sharing,
        devices=[
            InventoryDevice(id=d.id, health=d.health, reason=d.reason, properties=d.properties)
            for d in found[:MAX_LISTED_DEVICES]
        ],
        total=len(found),
        healthy=inventory.healthy if inventory else 0,
        names=_names(inventory, before),
        on_demand=spec.on_demand or UNSET,
        known=_known(spec, inventory, before),
    )


def _names(inventory: Inventory | None, before: ResourceInventory | None) -> list[list[str]] | UnsetType:
    """The names of devices that have several. Until a driver has reported for the first time they are as they were:
    after a restart, other resources show devices that only this driver knows to be the same."""
    if inventory is None or not inventory.reported:
        return before.names if before is not None else UNSET
    return [list(names) for names in inventory.names[:MAX_LISTED_DEVICES]] or UNSET


def _known(spec: ResourceSpec, inventory: Inventory | None, before: ResourceInventory | None) -> list[str] | UnsetType:
    """The names of known devices, where they are not simply those that are listed."""
    if inventory is None or not inventory.reported:
        return remembered(spec, before)
    return UNSET if inventory.known is None else list(inventory.known[:MAX_KNOWN_NAMES])


def refreshed(told: dict[str, str], device: KnownDevice | None) -> dict[str, str]:
    """A granted device's info, brought up to date under the id it was granted by; one that is gone is of unknown
    health."""
    if device is None:
        return {**told, "health": Health.UNKNOWN, "health.reason": "the driver does not report this device any more"}
    return {**info(device, int(told["local_index"])), "id": told["id"]}


def with_health(told: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """A granted device's info with nothing new but whether the device is well."""
    kept = {name: value for name, value in told.items() if name not in ("health", "health.reason")}
    return {**kept, "health": now["health"]} if "health" in now else kept
