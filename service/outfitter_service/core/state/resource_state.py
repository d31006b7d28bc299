"""A driver's last report of one resource of one host."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, structs

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Health
from outfitter_service.core.model import DriverFailure, KnownDevice
from outfitter_service.core.state.device_names import one_name_each


class Suspect(Struct, frozen=True):
    """The record under `key` holds device `id`, granted as `resource`, which is no longer reported."""

    key: AllocationKey
    resource: str
    id: str

    def __str__(self) -> str:
        return f"{self.key} holds {self.id} of {self.resource}, which is no longer reported"


class ResourceState(Struct, frozen=True, kw_only=True):
    """A driver's last report of one resource of one host.

    `reported`: there is a report. `asked`: the amount of the last question to an on-demand driver; `asking`: that of
    the question under way (0: none); `least`: the amount that its worker wants. `is_retry_due`: the delay after a
    failure ended during a question. `healthy` counts the healthy devices. `linked`: names that earlier reports
    connected, until the records of all holders have them.

    `as_reported`: the devices as the driver named them. `devices`: the same for grants. Devices in `held_back` have
    unknown health there, because `suspect` may be one of them; `known` then has the names that were known before (None:
    all are known). See `held_back_devices`.
    """

    devices: tuple[KnownDevice, ...] = ()
    as_reported: tuple[KnownDevice, ...] = ()
    linked: tuple[tuple[str, ...], ...] = ()
    failure: DriverFailure | None = None
    reported: bool = False
    asked: int = 0
    asking: int = 0
    least: int = 0
    is_retry_due: bool = False
    healthy: int = 0
    known: tuple[str, ...] | None = None
    held_back: frozenset[str] = frozenset()
    suspect: Suspect | None = None

    @classmethod
    def of(cls, devices: tuple[KnownDevice, ...], *, asked: int = 0) -> ResourceState:
        """The inventory of a driver's report. Devices that share a name are one device."""
        distinct = _distinct(devices)
        return cls(devices=distinct, as_reported=distinct, reported=True, asked=asked, healthy=_count_healthy(distinct))

    def with_held_back(self, ids: frozenset[str], suspect: Suspect) -> ResourceState:
        """A copy with exactly these devices held back, because of `suspect`."""
        back = frozenset([one.id for one in self.as_reported if one.id in ids and one.health == Health.HEALTHY])
        reason = f"held back: {suspect} and may be this device"
        devices = tuple(
            [
                structs.replace(one, health=Health.UNKNOWN, reason=reason) if one.id in back else one
                for one in self.as_reported
            ]
        )
        if devices == self.devices:
            devices = self.devices
        healthy = _count_healthy(devices)
        return structs.replace(self, devices=devices, healthy=healthy, held_back=back, suspect=suspect)

    def with_all_known(self) -> ResourceState:
        """A copy with no device held back."""
        healthy = _count_healthy(self.as_reported)
        return structs.replace(
            self, devices=self.as_reported, healthy=healthy, known=None, held_back=frozenset(), suspect=None
        )

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of each device that has several: reported ones, then those that are only `linked`."""
        groups = [(device.id, *device.aliases) for device in self.devices if device.aliases]
        return [*groups, *self.linked] if self.linked else groups

    @property
    def names_of_all(self) -> tuple[str, ...]:
        """The names of all reported devices, and the names that are only `linked`."""
        reported = [name for device in self.as_reported for name in (device.id, *device.aliases)]
        return (*reported, *[name for names in self.linked for name in names])


def _count_healthy(devices: Iterable[KnownDevice]) -> int:
    well = Health.HEALTHY
    return sum(device.health == well for device in devices)


def _distinct(devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
    """Merge devices of a report that share a name, directly or through others: the first of them, with all their names,
    and unhealthy if any of them is."""
    if len({device.id for device in devices}) == len(devices) and not any(device.aliases for device in devices):
        return devices
    _, classes = one_name_each((device.id, *device.aliases) for device in devices)
    alike: dict[tuple[str, ...], list[KnownDevice]] = {}
    for device in devices:
        alike.setdefault(classes.get(device.id, (device.id,)), []).append(device)
    return tuple([_merged(each) if len(each) > 1 else each[0] for each in alike.values()])


def _merged(devices: list[KnownDevice]) -> KnownDevice:
    first = devices[0]
    names = dict.fromkeys(name for device in devices for name in (device.id, *device.aliases))
    del names[first.id]
    worst = next((device for device in devices if device.health != Health.HEALTHY), first)
    return structs.replace(first, aliases=tuple(names), health=worst.health, reason=worst.reason)


NOT_REPORTED = ResourceState()
