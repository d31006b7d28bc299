"""The `static` driver: the configuration lists the devices.

For hardware without discovery, for licences and other countable things, and for tests. Settings (each under
`param.`) apply to every host, or below `hosts.<host>.` to one host:

    count = 8                       devices with the indexes 0 to 7
    devices = "a;b"                 devices by name, with the indexes 0 and 1
    device.<name>.<key> = value     describes one device, see `description`

Without `devices`, there are only the described devices. The id of a named device has its name, because its index
changes if another device leaves the list. Devices of `count` have no names, and their ids have their indexes.

The common settings do not apply to a host with settings of its own. A host without any settings has no devices.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence

import anyio
from msgspec import structs

from outfitter_drivers import settings
from outfitter_drivers.api import (
    Device,
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceDriverFactory,
    ExternalResourceInfo,
    Inventory,
    NotEnoughDevicesError,
    Worker,
)
from outfitter_drivers.settings import SettingError
from outfitter_drivers.support.description import described_device, natural_order
from outfitter_proto.records import Health

# Host names have dots, too. A host's name ends before the first of these words.
_HOST_SETTING = re.compile(r"hosts\.(?P<host>.+?)\.(?P<key>count|devices|device\..+)")
_DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,252}", re.ASCII)


class StaticDriver(ExternalResourceDriver, Inventory):
    """Names the configured devices, which never change. `elsewhere`: the devices of hosts that are not in `hosts`."""

    looks_from_afar = True

    def __init__(self, hosts: Mapping[str, Sequence[Device]], *, elsewhere: Sequence[Device] = ()) -> None:
        self._hosts = dict(hosts)
        self._elsewhere = elsewhere

    async def retrieve_resource_info(self, amount: int, worker: Worker) -> Collection[ExternalResourceInfo]:
        settings.require_amount(amount)
        usable = [device.info() for device in self._devices(worker.host) if device.health is Health.HEALTHY]
        if len(usable) < amount:
            raise NotEnoughDevicesError(
                f"{amount} wanted, but the configuration gives host {worker.host} {len(usable)} healthy ones"
            )
        return usable[:amount]

    async def inventory(self, host: str) -> AsyncIterator[Sequence[Device]]:
        yield list(self._devices(host))
        await anyio.sleep_forever()

    def _devices(self, host: str) -> Sequence[Device]:
        return self._hosts.get(host, self._elsewhere)


def configured_hosts(params: Iterable[str]) -> list[str]:
    """The hosts that settings are for, by their keys."""
    return sorted({match["host"] for key in params if (match := _HOST_SETTING.fullmatch(key))})


class StaticDriverFactory(ExternalResourceDriverFactory):
    """Builds the driver from `count`, `devices` and `device.*`, per host or for all."""

    def create_external_resource_driver(self, config: DriverParams) -> StaticDriver:
        settings.reject_unknown(config, ("count", "devices"), prefixes=("device.", "hosts."))
        common: dict[str, str] = {}
        hosts: dict[str, dict[str, str]] = {}
        for key, value in config.items():
            if not key.startswith("hosts."):
                common[key] = value
                continue
            match = _HOST_SETTING.fullmatch(key)
            if match is None:
                raise SettingError(key, "is an unknown setting; valid are hosts.<host>.count, .devices and .device.…")
            hosts.setdefault(match["host"], {})[match["key"]] = value
        if not config:
            raise ValueError("no devices; valid is one of count, devices, device.<name>.<key>, or hosts.<host>.…")
        return StaticDriver(
            {host: _devices(own, prefix=f"hosts.{host}.") for host, own in hosts.items()},
            elsewhere=_devices(common, prefix=""),
        )


def _devices(written: Mapping[str, str], *, prefix: str) -> list[Device]:
    """One host's devices from its settings. The keys have no `prefix`; messages do."""
    descriptions: dict[str, dict[str, str]] = {}
    for key, value in written.items():
        if not key.startswith("device."):
            continue
        name, _, about = key.removeprefix("device.").partition(".")
        if not _DEVICE_NAME.fullmatch(name) or not about:
            raise SettingError(f"{prefix}{key}", f"is invalid; valid is {prefix}device.<name>.<key>, no dots in <name>")
        descriptions.setdefault(name, {})[about] = value
    names = _names(written, descriptions, prefix=prefix)
    devices: list[Device] = []
    for index, name in enumerate(names):
        try:
            device = described_device(descriptions.get(name, {}), name=name, index=index)
        except SettingError as error:
            raise SettingError(f"{prefix}device.{name}.{error.key}", error.problem) from None
        devices.append(device if "count" in written else structs.replace(device, name=name))
    _reject_duplicates(names, devices, descriptions, prefix=prefix)
    return devices


def _names(written: Mapping[str, str], described: Mapping[str, Collection[str]], *, prefix: str) -> list[str]:
    """The names of one host's devices, in the order of their indexes."""
    if "count" in written:
        key = f"{prefix}count"
        if "devices" in written:
            raise SettingError(key, f"is set, and so is {prefix}devices; valid is one of them")
        count = settings.whole_number({key: written["count"]}, key, minimum=0, maximum=settings.MAX_DEVICES) or 0
        names = [str(number) for number in range(count)]
    elif "devices" in written:
        names = settings.items(written["devices"])
    else:
        names = natural_order(described)
    declared: set[str] = set()
    for name in names:
        if not _DEVICE_NAME.fullmatch(name):
            raise SettingError(f"{prefix}devices", f"has {name!r}; valid are letters, digits, _ and -, split on ;")
        if name in declared:
            raise SettingError(f"{prefix}devices", f"names {name!r} twice")
        declared.add(name)
    for name, abouts in described.items():
        if name not in declared:
            some = ", ".join(names[:20]) or "none"
            key = f"{prefix}device.{name}.{next(iter(abouts))}"
            raise SettingError(key, f"describes {name!r}, which is not among the devices: {some}")
    return names


def _reject_duplicates(
    names: Sequence[str], devices: Sequence[Device], described: Mapping[str, Collection[str]], *, prefix: str
) -> None:
    """Refuse two devices with one index or one id, because the manager would treat them as one."""
    seen: dict[tuple[str, str], str] = {}
    for name, device in zip(names, devices, strict=True):
        ids = [("id", device.id)] if device.id else []
        for what, value in (("index", device.properties["index"]), *ids):
            other = seen.setdefault((what, value), name)
            if other == name:
                continue
            # blame the device whose description has the value
            wrong, first = (name, other) if what in described.get(name, ()) else (other, name)
            raise SettingError(f"{prefix}device.{wrong}.{what}", f"is {value!r}, which {first} has already")
