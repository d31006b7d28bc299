"""How many devices there are of each resource and each model, and who waits: the numbers that every view shows.

Whether a device is free is asked of `HostDevice`, and so of `core/state/lending.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator

from msgspec import Struct

from outfitter_proto.records import AllocationState
from outfitter_service.core.state.lending import Block, Use
from outfitter_service.query.device_lines import DeviceEntry, HostDevice, entries_of
from outfitter_service.query.ledger_view import LedgerView


class DeviceTotals(Struct, frozen=True, kw_only=True):
    """The devices of one resource or one model. By health: `total` is the sum of `healthy`, `unhealthy`, `unknown` and
    `held_back`. By use: `free` can be lent now, shared ones too; `held` are others that workers have, and `held_ill`
    those of them that are not healthy. `unserved` would be free, but no manager serves their hosts."""

    total: int = 0
    healthy: int = 0
    free: int = 0
    held: int = 0
    held_ill: int = 0
    unhealthy: int = 0
    unknown: int = 0
    held_back: int = 0
    unserved: int = 0


class ResourceTotals(DeviceTotals, frozen=True, kw_only=True):
    """The devices of one resource. `waiting`: how many workers wait that want any of it. `models`: the same numbers of
    the devices of each model that drivers name."""

    resource: str
    waiting: int
    models: dict[str, DeviceTotals]


def totals_of(
    devices: Iterable[HostDevice], waiting: Iterable[Collection[str]] = (), *, unserved: Container[str] = ()
) -> list[ResourceTotals]:
    """The numbers of each resource that is there or waited for, by its name. `waiting`: of each worker that waits, the
    resources that it wants. `unserved`: the hosts that no manager serves."""
    alike = Counter(
        (device.resource, device.model, device.not_lent, device.use, device.host in unserved) for device in devices
    )
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    models: defaultdict[str, defaultdict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for (resource, model, not_lent, use, is_unserved), number in alike.items():
        found = dict.fromkeys(_counts_as(not_lent, use, is_unserved=is_unserved), number)
        counts[resource].update(found)
        if model is not None:
            models[resource][model].update(found)
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


def _counts_as(not_lent: Block | Use | None, use: Use | None, *, is_unserved: bool) -> Iterator[str]:
    """The fields of `DeviceTotals` in which a device counts."""
    yield "total"
    yield not_lent.replace("-", "_") if isinstance(not_lent, Block) else "healthy"
    if not_lent is None:
        yield "unserved" if is_unserved else "free"
    elif use is not None:
        yield "held"
        if isinstance(not_lent, Block):
            yield "held_ill"


def devices_in(ledger: LedgerView, resource: str | None, model: str | None) -> list[DeviceEntry]:
    """The devices of all hosts of a ledger, by host and in the order of the machine. None selects everything."""
    return [
        device
        for _, record in sorted(ledger.hosts.items())
        for device in entries_of(ledger, record)
        if device.fits(resource, model)
    ]


def totals_in(
    ledger: LedgerView, devices: Collection[HostDevice], *, is_narrowed: bool, unserved: Container[str]
) -> list[ResourceTotals]:
    """The numbers of some devices of a ledger. `is_narrowed`: who waits counts for resources of these devices only."""
    there = {device.resource for device in devices}
    waiting = (
        {resource for resource in stored.record.request.amounts if resource in there or not is_narrowed}
        for stored in ledger.allocations
        if stored.record.state == AllocationState.PENDING
    )
    return totals_of(devices, waiting, unserved=unserved)


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
    parts = [
        f"{totals.free} of {totals.total} free",
        f"{totals.healthy} healthy" if totals.healthy < totals.total else "",
        f"{totals.held} held{ill}",
        f"{totals.unhealthy} unhealthy" if totals.unhealthy else "",
        f"{totals.unknown} unknown" if totals.unknown else "",
        f"{totals.held_back} held back" if totals.held_back else "",
        f"{totals.unserved} without manager" if totals.unserved else "",
        f"{waiting} {'worker waits' if waiting == 1 else 'workers wait'}" if waiting else "",
    ]
    return ", ".join(filter(None, parts))
