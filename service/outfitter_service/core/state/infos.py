"""The infos, environment variables and CDI names of granted devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records import Allocation, Health
from outfitter_service.core.model import NO_ITEMS, NO_NAMES, KnownDevice

_HEALTHY = Health.HEALTHY


def info(device: KnownDevice, ordinal: int) -> dict[str, str]:
    """The info of one device, the `ordinal`-th of its resource."""
    number = str(ordinal)
    properties = {"index": number, **device.properties, "id": device.id, "local_index": number}
    if device.health != _HEALTHY:
        properties["health"] = device.health
        if device.reason:
            properties["health.reason"] = device.reason
    return properties


class GrantInfos(Struct, gc=False):
    """A grant's devices as workers see them."""

    infos: dict[str, list[dict[str, str]]]
    """By resource, in the granted order."""
    env: dict[str, str]
    """Environment variables."""
    cdi: list[str]
    """CDI names."""
    aliases: dict[str, list[str]] | UnsetType
    """The other names of devices that have several, by id. The record keeps them: after a restart, another resource may
    show the device before the driver that knows its names has reported."""


def other_names(device_id: str, recorded: Iterable[str], classes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The other names of a device: the `recorded` ones, then those that `classes` connects with any of its names."""
    others = dict.fromkeys(recorded)
    for name in (device_id, *others):
        for more in classes.get(name, ()):
            others.setdefault(more)
    others.pop(device_id, None)
    return list(others)


def names_held(record: Allocation) -> Iterator[tuple[str, list[str]]]:
    """The ids of a record's devices, each with its other names in the record."""
    aliases = record.aliases
    for infos in record.resources.values():
        for info in infos:
            device_id = info["id"]
            yield device_id, (aliases.get(device_id, NO_NAMES) if aliases is not UNSET else NO_NAMES)


def grant_infos(
    devices: Mapping[str, Iterable[KnownDevice]], classes: Mapping[str, tuple[str, ...]] = NO_ITEMS
) -> GrantInfos:
    """The infos of a grant: each device's properties with its `id`, and `local_index` in the granted order. The values
    of one variable are joined with commas, equal ones once. `classes`: as `DeviceIndex.classes`."""
    infos: dict[str, list[dict[str, str]]] = {}
    more: list[KnownDevice] = []
    for resource, chosen in devices.items():
        of_resource = infos[resource] = []
        for device in chosen:
            of_resource.append(info(device, len(of_resource)))
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
