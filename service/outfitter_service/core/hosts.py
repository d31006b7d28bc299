"""A host's inventory record, and the infos of granted devices whose state has changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from msgspec import UNSET, UnsetType, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import MAX_LISTED_DEVICES, Health, Host, InventoryDevice, ResourceInventory
from outfitter_service.core import reasons
from outfitter_service.core.decision import Rules
from outfitter_service.core.model import KnownDevice, ResourceSpec, SpecState
from outfitter_service.core.state import names_room, recovery
from outfitter_service.core.state.device_names import by_whole
from outfitter_service.core.state.held_back_devices import names_to_keep
from outfitter_service.core.state.infos import info
from outfitter_service.core.state.resource_state import ResourceState

MAX_KNOWN_NAMES = 1024
"""Most names of known devices in a host's record while other devices are held back. Known devices beyond it count as
new after a restart."""


def host_record(
    before: Host, rules: Rules, inventories: Mapping[str, ResourceState], now: datetime, *, keeps_names: bool
) -> Host | None:
    """The host's record with its current inventories, or None if nothing has changed. `keeps_names`: as
    `HostState.keeps_names`."""
    resources = {
        name: _inventory(spec, inventories.get(name), before.resources.get(name), keeps_names=keeps_names)
        for name, spec in rules.specs.items()
    }
    for name, recorded in before.resources.items() if keeps_names else ():
        if name not in resources and not (recorded.names is UNSET and recorded.parts is UNSET):
            resources[name] = _not_configured(name, recorded)
    resources = fitting(resources, names_room.record_bytes(rules.max_bytes))
    if resources == before.resources:
        return None
    return structs.replace(before, resources=resources, since=now)


def fitting(resources: dict[str, ResourceInventory], most: int) -> dict[str, ResourceInventory]:
    """The resources of a host, shortened to `most` bytes.

    The largest resource is shortened again and again. It loses half of its listed devices, then its reason, half of the
    known names, half of those that were ill, and is left out at last. The numbers of devices stay. The names of devices
    with several names stay, and whatever has some: see `names_room`.
    """
    resources = dict(resources)
    sizes = {name: len(name) + len(encode(inventory)) for name, inventory in resources.items()}
    longest = dict(sizes)
    while longest and sum(sizes.values()) > most:
        name = max(longest, key=longest.__getitem__)
        shorter = _shorter(resources[name])
        if shorter is not None:
            resources[name] = shorter
            sizes[name] = longest[name] = len(name) + len(encode(shorter))
            continue
        del longest[name]
        if resources[name].names is UNSET and resources[name].parts is UNSET:
            del resources[name], sizes[name]
    return resources


def _shorter(inventory: ResourceInventory) -> ResourceInventory | None:
    """The inventory one step shorter, or None if nothing can be left out any more."""
    if inventory.devices:
        return structs.replace(inventory, devices=inventory.devices[: len(inventory.devices) // 2])
    if inventory.reason:
        return structs.replace(inventory, reason=None)
    if inventory.known:
        return structs.replace(inventory, known=inventory.known[: len(inventory.known) // 2])
    if inventory.unwell:
        return structs.replace(inventory, unwell=recovery.shorter(inventory.unwell))
    return None


def _not_configured(name: str, before: ResourceInventory) -> ResourceInventory:
    """A resource that is not configured any more, and whose names may be those of held devices."""
    reason = reasons.not_configured(name)
    return ResourceInventory(
        state=SpecState.DISABLED, reason=reason, sharing=before.sharing, names=before.names, parts=before.parts
    )


def _inventory(
    spec: ResourceSpec, inventory: ResourceState | None, before: ResourceInventory | None, *, keeps_names: bool
) -> ResourceInventory:
    sharing = "shared" if spec.shared else "exclusive"
    if spec.state != SpecState.OK:
        return ResourceInventory(
            state=spec.state,
            reason=reasons.not_in_effect(spec),
            amount=spec.amount,
            sharing=sharing,
            known=names_to_keep(spec, before),
            names=before.names if keeps_names and before is not None else UNSET,
            parts=before.parts if keeps_names and before is not None else UNSET,
        )
    names, parts = _connected(inventory, before)
    devices = inventory.devices if inventory else ()
    if inventory is None or (inventory.failure is None and not inventory.reported):
        state, reason = "not-reported", reasons.not_reported(spec)
    elif inventory.failure is not None:
        state, reason = "driver-failed", inventory.failure.reason
    elif inventory.refused is not None:
        state, reason = "driver-failed", reasons.names_refused(spec.name, inventory.refused)
    else:
        state, reason = "reported", None
    return ResourceInventory(
        state=state,
        reason=reason,
        amount=spec.amount,
        sharing=sharing,
        devices=[
            InventoryDevice(
                id=d.id,
                health=d.health,
                reason=d.reason,
                properties=d.properties,
                cordon=d.cordon or UNSET,
                used_by=d.used_by or UNSET,
            )
            for d in devices[:MAX_LISTED_DEVICES]
        ],
        total=len(devices),
        healthy=inventory.healthy if inventory else 0,
        cordoned=len(inventory.cordoned) or UNSET if inventory else UNSET,
        on_demand=spec.on_demand or UNSET,
        known=_known(spec, inventory, before),
        names=names,
        parts=parts,
        replicas=spec.replicas if spec.replicas > 1 else UNSET,
        unwell=_unwell(spec, inventory, before),
    )


def _unwell(
    spec: ResourceSpec, inventory: ResourceState | None, before: ResourceInventory | None
) -> dict[str, datetime | None] | UnsetType:
    """The devices that are ill, or were so. They stay as recorded until the driver's first report."""
    if not recovery.is_damped(spec):
        return UNSET
    has_reported = inventory is not None and inventory.reported
    return dict(inventory.unwell if inventory is not None and has_reported else recovery.recorded(before)) or UNSET


def _connected(
    inventory: ResourceState | None, before: ResourceInventory | None
) -> tuple[list[list[str]] | UnsetType, dict[str, list[str]] | UnsetType]:
    """The names of each device that has several, and the parts of each device that has some.

    A name that is forgotten here could let a device be lent twice after a restart: other resources may have devices
    that only this driver knows to be the same. So they stay as recorded until the driver's first report.
    """
    if inventory is not None and inventory.refused is not None:
        links = inventory.refused.kept
    elif inventory is not None and inventory.reported:
        links = inventory.links
    else:
        return (before.names, before.parts) if before is not None else (UNSET, UNSET)
    return list(map(list, links.names)) or UNSET, by_whole(links.parts) or UNSET


def _known(
    spec: ResourceSpec, inventory: ResourceState | None, before: ResourceInventory | None
) -> list[str] | UnsetType:
    """The names of known devices, if they differ from the listed ones."""
    if inventory is None or not inventory.reported:
        return names_to_keep(spec, before)
    return UNSET if inventory.known is None else list(inventory.known[:MAX_KNOWN_NAMES])


def refreshed(granted: dict[str, str], device: KnownDevice | None) -> dict[str, str]:
    """A granted device's current info, under the id of its grant. A device that is gone (None) has unknown health."""
    if device is None:
        return {**granted, "health": Health.UNKNOWN, "health.reason": "the driver no longer reports this device"}
    return {**info(device, int(granted["local_index"])), "id": granted["id"]}


def with_health(granted: dict[str, str], current: dict[str, str]) -> dict[str, str]:
    """A granted device's info with the `current` health, and otherwise unchanged."""
    others = {name: value for name, value in granted.items() if name not in ("health", "health.reason")}
    return {**others, "health": current["health"]} if "health" in current else others
