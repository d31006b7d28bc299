"""One picture of a cluster: what the API's pages say at one moment, and what follows from it for each host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime

from msgspec import Struct

from outfitter_service.api.items import HostItem, QueueItem, Trouble
from outfitter_service.core.state.lending import Block, Use
from outfitter_service.query.device_lines import DeviceLine

STATES = ("unhealthy", "unknown", "held back", "held", "free")
"""A device's states, the worst first."""
FAILING = frozenset({"driver-failed", "misconfigured", "no-driver"})
"""The states of a resource of which nobody gets a device."""


class Picture(Struct, frozen=True, kw_only=True):
    """What the pages say. `as_of`: it has everything up to this moment."""

    cluster: str
    as_of: datetime | None
    hosts: Sequence[HostItem]
    devices: Sequence[DeviceLine]
    queue: Sequence[QueueItem]
    troubles: Sequence[Trouble]


class HostView(Struct, frozen=True, kw_only=True):
    """A host with its devices, their states in the same order, and who waits there. `failing`: the names of its
    resources in a state of `FAILING`."""

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
        unserved = 0 if self.item.managed else 1 + self.item.missed
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
    for device in picture.devices:
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
