"""Reasons in words: why a worker waits, and why it failed. It decides nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET

from outfitter_proto.clauses import Clauses, in_words
from outfitter_proto.records import MAX_REASON, Cordon
from outfitter_service.core.model import ResourceSpec, SpecState
from outfitter_service.core.state import recovery
from outfitter_service.core.state.lending import NOT_LENT_TO
from outfitter_service.core.state.resource_state import RefusedNames, ResourceState

NAMED_DEVICES = 8
"""Most devices that a reason names."""
NAMED_OPERATORS = 4
"""Most operators that a reason names: their names are long."""
NAMED_ORDERS = 3
"""Most orders of operators that a reason names."""
NAMED_STRANGERS = 3
"""Most processes that a reason names."""
HEALING = "granted when enough are healthy again"
"""What the reason says of a request that only illness makes infeasible."""
_FREE = re.compile(r"\d+( of \d+ free)")
NAMED_FAULTS = 6
"""Most kinds of excluded devices that a reason names."""
SHOWN = 8
"""Most resources of a request that a reason names."""


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def shortened(reason: str) -> str:
    """A worker's own words, shortened."""
    if len(reason) <= MAX_REASON:
        return reason
    return f"{reason[:MAX_REASON]}… (the first {MAX_REASON} of {len(reason)} characters)"


def differ(reason: str, earlier: str | None, *, free: bool) -> bool:
    """Whether two reasons say different things. `free`: another number of free devices alone counts as well."""
    if free or earlier is None or reason == earlier:
        return reason != earlier
    return _FREE.sub(r"\1", reason) != _FREE.sub(r"\1", earlier)


def too_many_live(most: int) -> str:
    return f"{most} live workers of this host have no exclusive device, which is the limit"


def too_many_items(items: int, most: int) -> str:
    return (
        f"the registration has {items} labels, resources and operators, and with it those of all workers that live or "
        f"wait on this host would be more than {most}, which is the limit; name fewer operators, or use fewer labels"
    )


def too_many_shared(devices: int, most: int) -> str:
    return (
        f"the worker would share {devices} devices, and with these the devices, labels, resources and operators of all "
        f"workers that live or wait on this host would be more than {most}, which is the limit; a driver that reports "
        "fewer shared devices, or more than one resource, leaves room for more workers"
    )


def unknown_resource(name: str, specs: Iterable[str]) -> str:
    return f"resource {name!r} is not configured on this host; configured: {listed(specs)}"


def not_in_effect(spec: ResourceSpec) -> str:
    """Why a configured resource hands out nothing."""
    if spec.state == SpecState.DISABLED:
        return spec.reason or f"{spec.name} is switched off on this host (external-resource.{spec.name}.amount is 0)"
    if spec.state == SpecState.NO_DRIVER:
        return spec.reason or (
            f"{spec.name} has no driver on this host; set external-resource.{spec.name}.driver-factory.class"
        )
    return spec.reason or f"the configuration of {spec.name} is wrong; see `outfitter config check`"


NEXT_COMMIT = "waits for the next commit: this one is full"
NEXT_EVALUATION = "waits until the workers before it have been evaluated again"
UNDECIDED = (NEXT_COMMIT, NEXT_EVALUATION)
"""Reasons of workers that wait only for the next decision, which says why they wait."""


def too_large(amounts: Mapping[str, int], size: int, most: int) -> str:
    """Why a grant does not fit into one record, and about how much does."""
    request = ", ".join(f"{amount} {name}" for name, amount in list(amounts.items())[:SHOWN]) or "nothing"
    devices = sum(amounts.values())
    fitting = max(1, devices * most * 9 // (size * 10))
    fewer = f" (about {fitting} of {devices} fit)" if devices > 1 else ""
    return (
        f"a grant of {request} would take {size} bytes of one record, and a record may have {most}; ask for fewer "
        f"devices{fewer} or operators, use shorter labels, or divide the work among several workers"
    )


def not_reported(spec: ResourceSpec) -> str:
    if spec.on_demand:
        return f"the manager is asking the driver of {spec.name}"
    return f"the driver of {spec.name} has not reported yet"


def not_configured(resource: str) -> str:
    """Why a host's record has a resource that is not configured."""
    return f"{resource} is not configured any more; the names of its devices count while somebody holds a device"


def names_refused(resource: str, refused: RefusedNames) -> str:
    """Why nothing of a resource is granted although its driver has reported, and what would be valid."""
    return (
        f"the report of the driver of {resource} is refused: the names of its devices take {refused.size} bytes, and "
        f"the host's record has {refused.room} of its {refused.most} left for them, after the resources that are "
        f"configured before it; let the driver report fewer or shorter aliases, or configure {resource} earlier"
    )


def driver_failed(spec: ResourceSpec, reason: str) -> str:
    return f"the driver of {spec.name} failed: {reason}"


def too_few(spec: ResourceSpec, amount: int, inventory: ResourceState) -> str:
    text = f"{amount} {spec.name} requested, {len(inventory.devices)} discovered"
    if spec.replicas_same_device:
        return f"{text}, with {spec.replicas} replicas each"
    return f"{text}; a worker gets replicas of different devices" if spec.replicas > 1 else text


def held_back(inventory: ResourceState) -> str:
    """How many devices of a resource are held back, and why."""
    if not inventory.held_back:
        return ""
    return f"; {len(inventory.held_back)} held back: {inventory.suspect} and may be one of these devices"


def too_ill(spec: ResourceSpec, amount: int, inventory: ResourceState, cordons: Mapping[str, Cordon]) -> str:
    ended = " and enough orders have ended" if inventory.cordoned else ""
    return (
        f"{amount} {spec.name} requested, {inventory.healthy} of {len(inventory.devices)} healthy"
        f"{taken_out(inventory, cordons)}{strangers(inventory)}; {HEALING}{ended}{recovering(inventory)}"
        f"{held_back(inventory)}"
    )


def recovering(inventory: ResourceState) -> str:
    """How many devices of a resource were ill, and when the first of them is lent again."""
    lent = recovery.earliest([inventory.unwell])
    if lent is None:
        return ""
    count = sum(each is not None for each in inventory.unwell.values())
    return f"; {count} well again, {'lent' if count == 1 else 'the first lent'} from {recovery.in_words(lent)} on"


def cordoned(spec: ResourceSpec, amount: int, inventory: ResourceState, cordons: Mapping[str, Cordon]) -> str:
    """Why a request waits that only operators' orders make infeasible."""
    lendable, total = inventory.lendable, len(inventory.devices)
    return (
        f"{amount} {spec.name} requested, {lendable} of {total} can be lent"
        f"{taken_out(inventory, cordons)}{strangers(inventory)}; granted when enough of these orders have ended"
    )


def used(spec: ResourceSpec, amount: int, inventory: ResourceState) -> str:
    """Why a request waits that only processes make infeasible to which nothing was lent."""
    return (
        f"{amount} {spec.name} requested, {inventory.lendable} of {len(inventory.devices)} can be lent"
        f"{strangers(inventory)}; granted when enough are used no more"
    )


def strangers(inventory: ResourceState) -> str:
    """How many devices are used by processes to which they were not lent, and by which."""
    if not inventory.used:
        return ""
    found = dict.fromkeys(device.used_by for device in inventory.devices if device.used_by is not None)
    named, more = list(found)[:NAMED_STRANGERS], ", …" if len(found) > NAMED_STRANGERS else ""
    return f"; {inventory.used} used by {', '.join(named)}{more}, {NOT_LENT_TO}"


def taken_out(inventory: ResourceState, cordons: Mapping[str, Cordon]) -> str:
    """How many devices operators' orders take out, and who gave them why."""
    if not inventory.cordoned:
        return ""
    orders = dict.fromkeys(inventory.cordoned.values())
    named = [order_of(cordons[order]) for order in list(orders)[:NAMED_ORDERS] if order in cordons]
    more = ", …" if len(orders) > NAMED_ORDERS else ""
    return f"; {len(inventory.cordoned)} cordoned by {', '.join(named)}{more}"


def order_of(cordon: Cordon) -> str:
    """An order: who gave it, its id, and why."""
    return f"{cordon.author} (order {cordon.order}: {cordon.reason})"


def what_of(cordon: Cordon) -> str:
    """What an order takes out."""
    if cordon.device is not UNSET:
        return f"device {cordon.device} of host {cordon.host}"
    return f"{cordon.resource} of host {cordon.host}" if cordon.resource is not UNSET else f"host {cordon.host}"


def too_few_together(amounts: Mapping[str, int], count: int, ids: Sequence[str]) -> str:
    named = ", ".join(ids[:NAMED_DEVICES]) + (", …" if len(ids) > NAMED_DEVICES else "")
    return f"{_amounts(amounts)} requested, but the host has only {_devices(count)} for them: {named}"


def too_few_lendable_together(amounts: Mapping[str, int], count: int, *, cordoned: bool, used: bool) -> str:
    short = f"{_amounts(amounts)} requested, but only {count} of the host's devices for them are healthy"
    return f"{short}{_nor_blocked(cordoned=cordoned, used=used)}"


def _nor_blocked(*, cordoned: bool, used: bool) -> str:
    """What healthy devices must be besides, and when a request is granted that lacks such."""
    by_nobody = " and used by no process to which they were not lent" if used else ""
    if cordoned:
        return f"{by_nobody} and not cordoned; granted when enough are, and enough orders have ended"
    return f"{by_nobody}; {'granted when enough are' if used else HEALING}"


def busy_together(amounts: Mapping[str, int]) -> str:
    return f"waits for {_amounts(amounts)}: these are the same devices, and too few of them are free"


def not_found(amounts: Mapping[str, int]) -> str:
    """Why a request waits whose search took too long. It claims nothing, because there may be no way."""
    return (
        f"no {_amounts(amounts)} found that can be lent together, and the search for them took too long; looked for "
        "again when devices come free"
    )


def _amounts(amounts: Mapping[str, int]) -> str:
    *others, last = [f"{amount} {name}" for name, amount in amounts.items()]
    return f"{', '.join(others)} and {last}" if others else last


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def busy(spec: ResourceSpec, amount: int, free: int, inventory: ResourceState) -> str:
    ill = len(inventory.devices) - inventory.healthy - len(inventory.held_back)
    unwell = f", {ill} not healthy" if ill else ""
    out = f", {len(inventory.cordoned)} cordoned" if inventory.cordoned else ""
    text = f"waits for {amount} {spec.name}: {free} of {len(inventory.devices)} free{unwell}{out}"
    text = f"{text}{strangers(inventory)}{held_back(inventory)}"
    return f"{text}; {spec.hint}" if spec.hint else text


# --- certain devices --------------------------------------------------------------------------------------


def _chosen(spec: ResourceSpec, amount: int, clauses: Clauses) -> str:
    said = in_words(clauses)
    return f"{amount} {spec.name} with {said}" if clauses.where else f"{amount} {spec.name}, {said}"


def busy_chosen(spec: ResourceSpec, amount: int, clauses: Clauses, free: int, total: int, *, apart: bool) -> str:
    """`free`, `total`: of the devices that meet the clauses. `apart`: those that are free have too little in common."""
    text = f"waits for {_chosen(spec, amount, clauses)}: {free} of {total} free"
    return f"{text}, but too few of one {' and one '.join(clauses.same)}" if apart else text


def excluded(
    spec: ResourceSpec,
    amount: int,
    clauses: Clauses,
    meeting: int,
    total: int,
    faults: Mapping[str, int],
    together: int | None,
) -> str:
    """Why a request's clauses leave too few devices, clause by clause. `meeting`: how many of `total` meet `where`;
    `together`: how many of these have something in common, if only that is too little."""
    most = sorted(faults.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join([f"{fault}: {count}" for fault, count in most[:NAMED_FAULTS]])
    named += ", …" if len(most) > NAMED_FAULTS else ""
    others = f"; {named}" if named else ""
    same = f"have one {' and one '.join(clauses.same)}"
    if not clauses.where and together is not None and meeting == total:
        return f"{_chosen(spec, amount, clauses)} requested, and at most {together} of {total} discovered {same}"
    common = "" if together is None else f", and at most {together} of these {same}"
    return f"{_chosen(spec, amount, clauses)} requested, {meeting} of {total} discovered are so{common}{others}"


def excluded_ill(
    spec: ResourceSpec, amount: int, clauses: Clauses, lendable: int, total: int, *, cordoned: bool
) -> str:
    """`lendable`: how many of the `total` devices that meet the clauses can be lent."""
    short = f"{_chosen(spec, amount, clauses)} requested, {lendable} of {total} such can be lent"
    return f"{short}; {HEALING}{' and enough orders have ended' if cordoned else ''}"


def too_few_chosen_together(amounts: Mapping[str, int], clauses: Mapping[str, Clauses]) -> str:
    said = "; ".join([f"{name}: {in_words(clauses[name])}" for name in amounts if name in clauses])
    return f"{_amounts(amounts)} requested ({said}): these are the same devices, and too few of them are so"


def too_few_chosen_lendable(
    amounts: Mapping[str, int], clauses: Mapping[str, Clauses], *, cordoned: bool, used: bool
) -> str:
    short = f"{too_few_chosen_together(amounts, clauses)} and healthy"
    return f"{short}{_nor_blocked(cordoned=cordoned, used=used)}"


def on_demand_chosen(spec: ResourceSpec) -> str:
    return (
        f"{spec.name} cannot be chosen by where or same: its driver names devices only when it is asked for some; "
        "leave them out, or configure a driver that lists its devices"
    )


def shared_same(spec: ResourceSpec) -> str:
    return f"{spec.name} is shared here, and a worker gets all of its devices: same has no meaning for it; leave it out"


def operator_chosen(operator: str, resource: str) -> str:
    return (
        f"operator {operator!r} says where or same of {resource!r}; only its worker can: say it in the worker's own "
        "request"
    )


def unknown_property(resource: str, name: str, near: str | None) -> str:
    hint = f"; did you mean {near}?" if near else ""
    return f"no driver of this host reports {name} of {resource}{hint}"


def behind(resources: Iterable[str]) -> str:
    return f"waits behind earlier workers that want {listed(resources)}"


def too_long(wait_s: float | None, reason: str | None) -> str:
    # abs: JSON has a -0.0, too
    waited = f"waited {abs(wait_s):g} s" if wait_s is not None else "waited too long"
    return f"{waited}; last: {reason}" if reason else waited


def operators_excess(spec: ResourceSpec, by_operator: Mapping[str, int], amount: int) -> str:
    """Operators ask for more of a resource than `amount`, the worker's request. Says what they may ask for, and names
    the operators that want most."""
    largest = sorted(by_operator.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name}: {each}" for name, each in largest[:NAMED_OPERATORS])
    more = ", …" if len(largest) > NAMED_OPERATORS else ""
    if spec.shared:
        most = largest[0][1]
        return (
            f"an operator asks for {most} {spec.name}, the worker for {amount}; let the worker ask for {most}, or each "
            f"operator for at most {amount} ({named}{more})"
        )
    total = sum(by_operator.values())
    return (
        f"the operators ask for {total} {spec.name} together, the worker for {amount}; {spec.name} is not shared here: "
        f"let the worker ask for {total}, or the operators for at most {amount} together ({named}{more})"
    )


def operator_without(operator: str, resource: str) -> str:
    return f"operator {operator!r} asks for {resource!r}, but its worker does not"
