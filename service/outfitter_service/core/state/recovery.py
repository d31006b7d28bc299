"""Devices that were ill, and are lent to nobody before they have been well for a stated time.

So a device that is ill and well in turns is lent to nobody, and one good look makes no device well. Whoever holds it is
told its driver's word at once. The host's record has these devices: a restart forgets no illness, and begins no time
anew. A device that its driver names for the first time, or names again, was never ill.

The core assesses it when a driver reports, and when a time is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import islice

from msgspec import UNSET

from outfitter_proto.records import Health, ResourceInventory
from outfitter_service.core.model import KnownDevice, ResourceSpec
from outfitter_service.core.state.lending import Block, block_of

Unwell = Mapping[str, datetime | None]
"""By id, the devices that are ill (None), or were so: from when each is lent again if it stays well."""

MOST_MISSING = 64
"""Most devices that were ill when their driver named them last, and that it names no longer. They are remembered: an
ill GPU may fall off the bus and come back."""


def is_damped(spec: ResourceSpec) -> bool:
    """Whether a resource's devices must be well for some time. An on-demand driver looks only when it is asked."""
    return spec.min_healthy_s > 0 and not spec.on_demand


def recorded(inventory: ResourceInventory | None) -> Unwell:
    """Those in a host's record. Earlier versions wrote only which devices are ill."""
    if inventory is None:
        return {}
    if inventory.unwell is not UNSET:
        return inventory.unwell
    ill = (Block.UNHEALTHY, Block.UNKNOWN)
    return {device.id: None for device in inventory.devices if block_of(device.health, device.reason) in ill}


def after_report(before: Unwell, devices: Iterable[KnownDevice], spec: ResourceSpec, now: datetime) -> Unwell:
    """Those after a driver's report. `before`: those before it."""
    if not is_damped(spec):
        return {}
    unwell: dict[str, datetime | None] = {}
    named: set[str] = set()
    soonest = now + timedelta(seconds=spec.min_healthy_s)
    for device in devices:
        if device.health != Health.HEALTHY:
            unwell[device.id] = None
        if not before:
            continue
        names = (device.id, *device.aliases)
        named.update(names)
        if device.id not in unwell and (earlier := [before[name] for name in names if name in before]):
            unwell[device.id] = max(soonest if lent is None else min(lent, soonest) for lent in earlier)
    missing = [name for name in before if name not in named]
    unwell.update(dict.fromkeys(missing[-MOST_MISSING:]))
    return still(unwell, spec, now)


def still(unwell: Unwell, spec: ResourceSpec | None, now: datetime) -> Unwell:
    """Those of which the time is not over. Where the clock was set back, no time is longer than it may be."""
    if spec is None or not is_damped(spec):
        return {}
    latest = now + timedelta(seconds=spec.min_healthy_s)
    return {name: lent and min(lent, latest) for name, lent in unwell.items() if lent is None or lent > now}


def earliest(unwell: Iterable[Unwell]) -> datetime | None:
    """When the first of all times is over; None: none runs."""
    return min((lent for each in unwell for lent in each.values() if lent is not None), default=None)


def shorter(unwell: Unwell) -> dict[str, datetime | None]:
    """The first half."""
    return dict(islice(unwell.items(), len(unwell) // 2))


def reason(lent: datetime) -> str:
    """Why a device is not lent that its driver calls healthy."""
    return f"it was not well, and is lent from {in_words(lent)} on if it stays well"


def in_words(lent: datetime) -> str:
    return f"{lent:%Y-%m-%d %H:%M:%S} UTC"
