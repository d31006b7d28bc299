"""What a grant says of its devices: their infos, and the variables and names that containers know them by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records import Health
from outfitter_service.core.model import NO_ITEMS, NO_NAMES, KnownDevice

_HEALTHY = Health.HEALTHY


def info(device: KnownDevice, ordinal: int) -> dict[str, str]:
    """What a worker is told of one device, the `ordinal`-th of its resource."""
    number = str(ordinal)
    told = {"index": number, **device.properties, "id": device.id, "local_index": number}
    if device.health != _HEALTHY:
        told["health"] = device.health
        if device.reason:
            told["health.reason"] = device.reason
    return told


class GrantInfos(Struct, gc=False):
    """What a grant says of its devices: their infos, the variables and CDI names they come with, and their other
    names. The record keeps those: after a restart, another resource may show the same device before the driver that
    knows its names has reported."""

    infos: dict[str, list[dict[str, str]]]
    env: dict[str, str]
    cdi: list[str]
    aliases: dict[str, list[str]] | UnsetType


def other_names(device_id: str, known: Iterable[str], classes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The other names of a device: those that are `known`, then what `classes` connects with any of its names."""
    others = dict.fromkeys(known)
    for name in (device_id, *others):
        for more in classes.get(name, ()):
            others.setdefault(more)
    others.pop(device_id, None)
    return list(others)


def grant_infos(
    devices: Mapping[str, Iterable[KnownDevice]], classes: Mapping[str, tuple[str, ...]] = NO_ITEMS
) -> GrantInfos:
    """What a grant says: each device's properties with its `id`, and `local_index` in the granted order; values
    of one variable joined with commas, equal ones once. `classes` are the names of devices that have several, whoever
    connects them: see `HostState.classes`."""
    infos: dict[str, list[dict[str, str]]] = {}
    more: list[KnownDevice] = []
    for resource, chosen in devices.items():
        told = infos[resource] = []
        for device in chosen:
            told.append(info(device, len(told)))
            if device.env or device.cdi or device.aliases or device.id in classes:
                more.append(device)
    if not more:
        return GrantInfos(infos, NO_ITEMS, NO_NAMES, UNSET)
    values: dict[str, dict[str, None]] = {}
    cdi: dict[str, None] = {}
    aliases: dict[str, list[str]] = {}
    for device in more:
        for variable, value in device.env.items():
            values.setdefault(variable, {})[value] = None
        cdi.update(dict.fromkeys(device.cdi))
        if device.aliases or device.id in classes:
            aliases[device.id] = other_names(device.id, device.aliases, classes)
    env = {variable: ",".join(items) for variable, items in values.items()} if values else NO_ITEMS
    return GrantInfos(infos, env, list(cdi) if cdi else NO_NAMES, aliases or UNSET)
