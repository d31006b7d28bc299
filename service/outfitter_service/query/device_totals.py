"""How many devices there are of each resource and each model, and who waits: the numbers that every view shows.

Whether a device is free is asked of `HostDevice`, and so of `core/state/lending.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from outfitter_proto.records import AllocationState, Host
from outfitter_service.core.state.lending import Block, Use
from outfitter_service.query.device_lines import DeviceEntry, HostDevice, LeftOut, counted_only, entries_of
from outfitter_service.query.ledger_view import LedgerView

LeftOuts = Mapping[tuple[str, str], LeftOut]
"""The devices that hosts' records count and do not list, by host and resource."""


class DeviceTotals(Struct, frozen=True, kw_only=True):
    """The devices of one resource or one model. By health: `total` is the sum of `healthy`, `unhealthy`, `unknown` and
    `held_back`. By use: `free` can be lent now, shared ones too; `held` are others that workers have, and `held_ill`
    those of them that are not healthy. `cordoned` are those that operators take out, whatever their health and use, and
    `held_cordoned` those of them that workers have. `used_by_stranger` are those that a process uses to which they were
    not lent, whatever their health and use. `unserved` would be free, but no manager serves their hosts."""

    total: int = 0
    healthy: int = 0
    free: int = 0
    held: int = 0
    held_ill: int = 0
    unhealthy: int = 0
    unknown: int = 0
    held_back: int = 0
    cordoned: int = 0
    held_cordoned: int = 0
    used_by_stranger: int = 0
    unserved: int = 0


class ResourceTotals(DeviceTotals, frozen=True, kw_only=True):
    """The devices of one resource. `waiting`: how many workers wait that want any of it. `models`: the same numbers of
    the devices of each model that drivers name."""

    resource: str
    waiting: int
    models: dict[str, DeviceTotals]


def totals_of(
    devices: Iterable[HostDevice],
    waiting: Iterable[Collection[str]] = (),
    *,
    unserved: Container[str] = (),
    left_out: LeftOuts | None = None,
) -> list[ResourceTotals]:
    """The numbers of each resource that is there or waited for, by its name. `waiting`: of each worker that waits, the
    resources that it wants. `unserved`: the hosts that no manager serves. `left_out`: what counts besides `devices`;
    those that workers hold are among both. Of these no model is known, and those that are not healthy count as unknown.
    """
    devices = list(devices)
    alike = Counter(
        _Alike(
            device.resource, device.model, device.illness, device.not_lent, device.use, device.cordon is not None,
            device.used_by is not None, device.host in unserved,
        )
        for device in devices
    )  # fmt: skip
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    models: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for kind, number in alike.items():
        found = dict.fromkeys(_counts_as(kind), number)
        counts[kind.resource].update(found)
        if kind.model is not None:
            models[kind.resource][kind.model].update(found)
    if left_out:
        for (host, resource), rest in _without(left_out, devices).items():
            counts[resource].update(_counts_of(rest, is_unserved=host in unserved))
    waiters = Counter(resource for wanted in waiting for resource in wanted)
    return [
        ResourceTotals(
            resource=resource,
            waiting=waiters[resource],
            models={model: DeviceTotals(**found) for model, found in sorted(models[resource].items())},
            **counts[resource],
        )
        for resource in sorted({*counts, *waiters})
    ]


class _Alike(NamedTuple):
    """What devices have in common that count alike."""

    resource: str
    model: str | None
    illness: Block | None
    not_lent: Block | Use | None
    use: Use | None
    is_cordoned: bool
    has_stranger: bool
    is_unserved: bool


def _counts_as(kind: _Alike) -> Iterator[str]:
    """The fields of `DeviceTotals` in which a device counts."""
    yield "total"
    yield "healthy" if kind.illness is None else kind.illness.replace("-", "_")
    if kind.is_cordoned:
        yield "cordoned"
    if kind.has_stranger:
        yield "used_by_stranger"
    if kind.not_lent is None:
        yield "unserved" if kind.is_unserved else "free"
    elif kind.use is not None:
        yield "held"
        if kind.illness is not None:
            yield "held_ill"
        if kind.is_cordoned:
            yield "held_cordoned"


def _without(left_out: LeftOuts, devices: Iterable[HostDevice]) -> LeftOuts:
    """What records count and do not list, without these devices, which workers hold."""
    total, ill, cordoned = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for device in devices:
        if not device.listed:
            place = device.host, device.resource
            total[place] += 1
            ill[place] += device.illness is not None
            cordoned[place] += device.cordon is not None
    return {
        place: LeftOut(
            total=(number := max(0, counted.total - total[place])),
            healthy=min(number, max(0, counted.healthy - total[place] + ill[place])),
            cordoned=min(number, max(0, counted.cordoned - cordoned[place])),
        )
        for place, counted in left_out.items()
    }


def _counts_of(rest: LeftOut, *, is_unserved: bool) -> dict[str, int]:
    """The fields of `DeviceTotals` in which devices count that nobody holds. How many of the cordoned ones are healthy
    is not known: all, so that no more are free than can be had."""
    return {
        "total": rest.total,
        "healthy": rest.healthy,
        "unknown": rest.total - rest.healthy,
        "cordoned": rest.cordoned,
        "unserved" if is_unserved else "free": max(0, rest.healthy - rest.cordoned),
    }


def left_outs(hosts: Iterable[Host], resource: str | None = None) -> LeftOuts:
    """The devices that the hosts' records count and do not list, of one resource or of all."""
    return {
        (host.host, name): counted
        for host in hosts
        for name, inventory in host.resources.items()
        if resource in {None, name} and (counted := counted_only(inventory)) is not None
    }


def devices_in(ledger: LedgerView, resource: str | None, model: str | None) -> list[DeviceEntry]:
    """The devices of all hosts of a ledger, by host and in the order of the machine. None selects everything."""
    return [
        device
        for _, record in sorted(ledger.hosts.items())
        for device in entries_of(ledger, record)
        if device.fits(resource, model)
    ]


def totals_in(
    ledger: LedgerView,
    devices: Collection[HostDevice],
    *,
    resource: str | None,
    model: str | None,
    unserved: Container[str],
) -> list[ResourceTotals]:
    """The numbers of some devices of a ledger: those of `resource` and `model`. Where one is named, only who waits for
    resources of these devices counts."""
    is_narrowed = resource is not None or model is not None
    there = {device.resource for device in devices}
    waiting = (
        {resource for resource in stored.record.request.amounts if resource in there or not is_narrowed}
        for stored in ledger.allocations
        if stored.record.state == AllocationState.PENDING
    )
    left_out = left_outs(ledger.hosts.values(), resource) if model is None else None
    return totals_of(devices, waiting, unserved=unserved, left_out=left_out)


def rows_of(found: Iterable[ResourceTotals]) -> Iterator[tuple[str, str]]:
    """Name and numbers of each resource, and below it those of each of its models, indented, if there are several."""
    for totals in found:
        yield totals.resource, in_words(totals, totals.waiting)
        if len(totals.models) > 1:
            for model, of_model in totals.models.items():
                yield f"  {model}", in_words(of_model)


def in_words(totals: DeviceTotals, waiting: int = 0) -> str:
    """`5 of 16 free, 14 healthy, 9 held, 2 unhealthy`. What can be had comes first, so that nothing cuts it off."""
    ill = f" ({totals.held_ill} of them ill)" if totals.held_ill else ""
    still_held = f" ({totals.held_cordoned} of them held)" if totals.held_cordoned else ""
    parts = [
        f"{totals.free} of {totals.total} free",
        f"{totals.healthy} healthy" if totals.healthy < totals.total else "",
        f"{totals.held} held{ill}",
        f"{totals.cordoned} cordoned{still_held}" if totals.cordoned else "",
        f"{totals.used_by_stranger} used by strangers" if totals.used_by_stranger else "",
        f"{totals.unhealthy} unhealthy" if totals.unhealthy else "",
        f"{totals.unknown} unknown" if totals.unknown else "",
        f"{totals.held_back} held back" if totals.held_back else "",
        f"{totals.unserved} without manager" if totals.unserved else "",
        f"{waiting} {'worker waits' if waiting == 1 else 'workers wait'}" if waiting else "",
    ]
    return ", ".join(filter(None, parts))
