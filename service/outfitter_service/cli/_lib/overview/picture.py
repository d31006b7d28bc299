"""One picture of a cluster: what the API's pages say at one moment, and what follows from it for each host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct, structs

from outfitter_service.api.items import HostItem, QueueItem, Trouble
from outfitter_service.core.state.lending import Block, Use
from outfitter_service.query import labels
from outfitter_service.query.device_lines import DeviceLine
from outfitter_service.query.device_totals import LeftOuts, ResourceTotals, totals_of

STATES = ("unhealthy", "unknown", "held back", "used by stranger", "cordoned", "held", "free")
"""A device's states, the worst first."""
FAILING = frozenset({"driver-failed", "misconfigured", "no-driver"})
"""The states of a resource of which nobody gets a device."""


class Picture(Struct, frozen=True, kw_only=True):
    """What the pages say. `as_of`: it has everything up to this moment. `left_out`: devices that count besides."""

    cluster: str
    as_of: datetime | None
    hosts: Sequence[HostItem]
    devices: Sequence[DeviceLine]
    queue: Sequence[QueueItem]
    troubles: Sequence[Trouble]
    left_out: LeftOuts = {}


class Only(Struct, frozen=True, kw_only=True):
    """What a picture is narrowed to; None is everything. `model`: a part of its name. `labelled`: what workers with
    these labels hold, and which of them wait."""

    resource: str | None = None
    model: str | None = None
    health: str | None = None
    labelled: labels.Wanted = ()

    def of(self, picture: Picture) -> Picture:
        """The devices and waiters that fit, and their hosts. What needs a person stays."""
        if self == EVERYTHING:
            return picture
        devices = [device for device in picture.devices if self._fits(device)]
        there = {device.host for device in devices}
        queue = [
            item
            for item in picture.queue
            if (self.resource is None or self.resource in item.amounts)
            and labels.has_all(item.labels, self.labelled)
            and (item.host in there or (self.model is None and self.health is None))
        ]
        there |= {item.host for item in queue}
        is_counted = self.model is self.health is None and not self.labelled
        left_out = {
            (host, resource): counted
            for (host, resource), counted in picture.left_out.items()
            if is_counted and self.resource in {None, resource}
        }
        hosts = [host for host in picture.hosts if host.host in there]
        return structs.replace(picture, devices=devices, queue=queue, hosts=hosts, left_out=left_out)

    def _fits(self, device: DeviceLine) -> bool:
        return device.fits(self.resource, self.model, self.health) and (
            not self.labelled or any(labels.has_all(each.labels, self.labelled) for each in device.holders)
        )


EVERYTHING = Only()


class HostView(Struct, frozen=True, kw_only=True):
    """A host with its devices in the order of the machine, their states in that order, and who waits there. `failing`:
    the names of its resources in a state of `FAILING`."""

    item: HostItem
    devices: list[DeviceLine]
    states: list[str]
    waiting: list[QueueItem]
    failing: list[str]

    @property
    def name(self) -> str:
        """The host's name."""
        return self.item.host

    @property
    def holders(self) -> set[str]:
        """The workers that hold devices there."""
        return {holder.worker for device in self.devices for holder in device.holders}

    @property
    def urgency(self) -> tuple[int, ...]:
        """How urgent the host is: what is compared first counts most."""
        counts = Counter(self.states)
        unserved = 0 if self.item.managed or self.item.planned else 1 + self.item.missed
        return unserved, len(self.failing), counts["unhealthy"], counts["unknown"], len(self.waiting)


def state_of(device: DeviceLine, host: HostItem) -> str:
    """The worst that is true of a device, in the words of `STATES`."""
    match device.not_lent:
        case Block() as block:
            return block.replace("-", " ")
        case Use():
            return "held"
    return "free" if host.managed else "unknown"


def views_of(picture: Picture) -> list[HostView]:
    """The hosts of a picture, the most urgent first."""
    devices: defaultdict[str, list[DeviceLine]] = defaultdict(list)
    for device in sorted(picture.devices, key=lambda device: (device.place, device.id)):
        devices[device.host].append(device)
    waiting: defaultdict[str, list[QueueItem]] = defaultdict(list)
    for item in picture.queue:
        waiting[item.host].append(item)
    views = [
        HostView(
            item=host,
            devices=devices[host.host],
            states=[state_of(device, host) for device in devices[host.host]],
            waiting=waiting[host.host],
            failing=sorted(name for name, each in (host.resources or {}).items() if each.state in FAILING),
        )
        for host in picture.hosts
    ]
    return sorted(views, key=lambda view: ([-number for number in view.urgency], view.name))


def totals_in(picture: Picture) -> list[ResourceTotals]:
    """How many devices a picture has, by resource and model, and who waits."""
    unserved = {host.host for host in picture.hosts if not host.managed}
    waiting = (item.amounts for item in picture.queue)
    return totals_of(picture.devices, waiting, unserved=unserved, left_out=picture.left_out)
