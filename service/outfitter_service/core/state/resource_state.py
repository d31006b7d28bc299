"""The state of one resource on one host, by its driver's last report."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Health
from outfitter_service.core.model import DriverFailure, KnownDevice
from outfitter_service.core.state import recovery
from outfitter_service.core.state.device_names import NO_LINKS, Links, one_name_each
from outfitter_service.core.state.lending import HELD_BACK, block_of


class Suspect(Struct, frozen=True):
    """The record under `key` holds device `id`, granted as `resource`, which is no longer reported."""

    key: AllocationKey
    resource: str
    id: str

    def __str__(self) -> str:
        return f"{self.key} holds {self.id} of {self.resource}, which is no longer reported"


class RefusedNames(Struct, frozen=True):
    """Why a report is refused: the names of its devices take `size` bytes, and the host's record has `room` for them.
    `most`: its room for the names of all resources. `kept`: what it has all the same, because somebody holds a device
    under one of these names, and the holder's record lacks another one; or holds a part or its whole."""

    size: int
    room: int
    most: int
    kept: Links = NO_LINKS


class ResourceState(Struct, frozen=True, kw_only=True):
    """The state of one resource on one host: its inventory, by its driver's last report."""

    devices: tuple[KnownDevice, ...] = ()
    """The devices for grants. Those that are `held_back` or were ill have unknown health here, and `cordoned` ones say
    so."""
    as_reported: tuple[KnownDevice, ...] = ()
    """The devices as the driver named them."""
    linked: Links = NO_LINKS
    """What earlier reports connected: names until the records of all holders have them, parts while somebody holds them
    or their whole."""
    replicas: int = 1
    """To how many workers each device is lent at once."""
    failure: DriverFailure | None = None
    """Why the driver's last report counts for nothing, or None."""
    reported: bool = False
    """The driver has reported."""
    healthy: int = 0
    """How many devices are healthy, and not held back."""
    lendable: int = 0
    """How many devices nothing blocks; see `lending`."""
    used: int = 0
    """How many devices nothing blocks but a process to which they were not lent."""
    cordoned: Mapping[str, str] = {}
    """The devices to which an operator's order applies, by id, each with the id of such an order; see `cordons`."""
    unwell: recovery.Unwell = {}
    """The devices that are ill, or were so a moment ago; see `recovery`."""
    refused: RefusedNames | None = None
    """Why the host's record has no room for the names, so that nobody is granted a device; see `names_room`."""

    # --- devices that are held back, see `held_back_devices` ---

    known: tuple[str, ...] | None = None
    """The names that were known before. None: all are known."""
    held_back: frozenset[str] = frozenset()
    """The ids of these devices."""
    suspect: Suspect | None = None
    """The held device that may be one of them."""

    # --- of an on-demand driver ---

    asked: int = 0
    """The amount of the last question that it answered."""
    asking: int = 0
    """The amount of the question under way; 0: there is none."""
    least: int = 0
    """The amount that the worker of that question wants."""
    asking_for: AllocationKey | None = None
    """The worker of the last question."""
    asked_for: AllocationKey | None = None
    """The worker for whom the devices were named."""
    is_retry_due: bool = False
    """The delay after a failure ended during a question."""

    @classmethod
    def of(
        cls,
        devices: tuple[KnownDevice, ...],
        *,
        earlier: tuple[KnownDevice, ...] = (),
        asked: int = 0,
        replicas: int = 1,
    ) -> ResourceState:
        """The state after a driver's report. Devices that share a name are one device. `earlier`: those of its report
        before. A device that has not changed stays the same object, and what free lists know of it stays. `asked`: the
        amount that the manager asked an on-demand driver for. `replicas`: as the resource's configuration has it."""
        known = {device.id: device for device in earlier}
        distinct = tuple([
            same if (same := known.get(device.id)) == device else device for device in _distinct(devices)
        ])  # fmt: skip
        return cls(as_reported=distinct, reported=True, asked=asked, replicas=replicas)._marked()

    def with_held_back(self, ids: frozenset[str], suspect: Suspect) -> ResourceState:
        """A copy with exactly these devices held back, because of `suspect`."""
        held_back = frozenset(
            [device.id for device in self.as_reported if device.id in ids and device.health == Health.HEALTHY]
        )
        return structs.replace(self, held_back=held_back, suspect=suspect)._marked()

    def with_all_known(self) -> ResourceState:
        """A copy with no device held back."""
        return structs.replace(self, known=None, held_back=frozenset(), suspect=None)._marked()

    def with_cordoned(self, cordoned: Mapping[str, str]) -> ResourceState:
        """A copy to whose devices exactly these orders apply: each device's id with the id of an order."""
        return structs.replace(self, cordoned=cordoned)._marked()

    def with_unwell(self, unwell: recovery.Unwell) -> ResourceState:
        """A copy in which exactly these devices are ill, or were so."""
        return structs.replace(self, unwell=unwell)._marked()

    def is_recovering(self, device: str) -> bool:
        """Whether a device is healthy by its driver's word, and is not lent because it was ill."""
        return self.unwell.get(device) is not None and device not in self.held_back

    def _marked(self) -> ResourceState:
        """A copy whose devices say what is held back, what was ill, and what is cordoned, with their numbers."""
        devices = self.as_reported
        if self.held_back or self.unwell or self.cordoned:
            devices = tuple([self._mark(device) for device in devices])
        if devices == self.devices:
            devices = self.devices
        healths = [block_of(device.health, device.reason) for device in devices]
        well = [d for d, health in zip(devices, healths, strict=True) if health is None and d.cordon is None]
        used = sum(device.used_by is not None for device in well)
        healthy = healths.count(None)
        return structs.replace(self, devices=devices, healthy=healthy, lendable=len(well) - used, used=used)

    def _mark(self, device: KnownDevice) -> KnownDevice:
        if device.id in self.held_back:
            reason = f"{HELD_BACK}{self.suspect} and may be this device"
            device = structs.replace(device, health=Health.UNKNOWN, reason=reason)
        elif (lent := self.unwell.get(device.id)) is not None:
            device = structs.replace(device, health=Health.UNKNOWN, reason=recovery.reason(lent))
        cordon = self.cordoned.get(device.id)
        return device if cordon is None else structs.replace(device, cordon=cordon)

    def serves(self, amount: int) -> bool:
        """Whether neither a failure nor a refused report stands against a worker that wants `amount` devices."""
        return self.refused is None and (self.failure is None or amount < self.failure.at_least)

    @property
    def names(self) -> list[tuple[str, ...]]:
        """The names of each device that has several: reported ones, then those that are only `linked`."""
        return [*[(device.id, *device.aliases) for device in self.devices if device.aliases], *self.linked.names]

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Each part with its whole: reported ones, then those that are only `linked`."""
        reported = [(device.id, device.part_of) for device in self.devices if device.part_of is not None]
        return [*reported, *self.linked.parts]

    @property
    def links(self) -> Links:
        """What this resource connects."""
        return Links(tuple(self.names), tuple(self.parts))

    @property
    def names_of_all(self) -> tuple[str, ...]:
        """The names of all reported devices, and the names that are only `linked`."""
        reported = [name for device in self.as_reported for name in (device.id, *device.aliases)]
        return (*reported, *[name for names in self.linked.names for name in names])


def _distinct(devices: tuple[KnownDevice, ...]) -> tuple[KnownDevice, ...]:
    """Merge devices of a report that share a name, directly or through others. The first of them stays, with all their
    names. It is as ill as any of them, and used by whom any of them is."""
    names = [name for device in devices for name in (device.id, *device.aliases)]
    if len(set(names)) == len(names):
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
    part_of = next((device.part_of for device in devices if device.part_of is not None), None)
    used_by = next(filter(None, [device.used_by for device in devices]), None)
    untold = next(filter(None, [device.untold for device in devices]), None)
    return structs.replace(
        first,
        aliases=tuple(names),
        health=worst.health,
        reason=worst.reason,
        part_of=part_of,
        used_by=used_by,
        untold=untold,
    )


NOT_REPORTED = ResourceState()
