"""Placement: whether a request can be met now, with which devices, and which operator of a worker has which of them.

Placement reads one host and changes nothing. A worker gets all of its resources or none, in the driver's order of
preference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.clauses import Clauses
from outfitter_proto.records import OperatorShare, ReasonCode, ResolvedRequest
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.model import Devices, DriverFailure, KnownDevice, OnFailure, ResourceSpec, SpecState
from outfitter_service.core.placement.choice import DeviceChoice, same_device
from outfitter_service.core.placement.claims import Claims
from outfitter_service.core.placement.search import DEVICES_PER_STEP, BudgetError, is_feasible
from outfitter_service.core.state import matching
from outfitter_service.core.state.infos import grant_infos
from outfitter_service.core.state.lending import Block
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.resource_state import ResourceState
from outfitter_service.core.state.selections import Selection

_OK = SpecState.OK
_BLOCKED = frozenset({ReasonCode.INFEASIBLE, ReasonCode.CORDONED, ReasonCode.USED_BY_STRANGER})
"""What stands against a request where there are enough devices, and too few of them are lent to anybody."""


class Infeasibility(Struct, frozen=True):
    """Why a request is not granted now: `code` for programs, `reason` for people. `resource`: the one that is short, or
    whose driver is to blame. `final`: waiting will not help."""

    code: ReasonCode
    reason: str
    resource: str
    final: bool = False


def place(
    overlay: HostOverlay,
    specs: Mapping[str, ResourceSpec],
    amounts: Mapping[str, int],
    claims: Claims | None = None,
    clauses: Mapping[str, Clauses] = m.NO_ITEMS,
) -> Devices | Infeasibility:
    """The devices for a request, or the obstacle that weighs most, whatever the order of its resources.

    `claims`: of earlier waiters. Devices that could serve those waiters are left to them, unless both share the
    devices. `clauses`: what the request says of the devices of some resources. A final obstacle weighs most, then one
    that blocks nobody (not reported, infeasible, failed), then busy.
    """
    obstacle = infeasibility(overlay, specs, amounts, clauses)
    if obstacle is not None:
        return obstacle
    shared = [resource for resource in amounts if specs[resource].shared]
    alone = amounts if not shared else {name: amount for name, amount in amounts.items() if name not in shared}
    for resource, amount in alone.items():
        spec, asked = specs[resource], clauses.get(resource)
        free = _free_count(overlay, spec, asked)
        if free < amount:
            return _busy(overlay, spec, amount, free, asked)
    if claims is not None:
        for resource in alone:
            if resource in claims.resources:
                return Infeasibility(ReasonCode.BUSY, reasons.behind([resource]), resource)
    overlapping = overlay.devices.overlapping
    is_disjoint = not overlapping or overlapping.isdisjoint(amounts)
    is_plain = is_disjoint and not clauses and (claims is None or claims.chosen.keys().isdisjoint(amounts))
    choice = None if is_plain else DeviceChoice(overlay, specs, claims, clauses)
    chosen: Devices = {}
    for resource in shared:
        asked = clauses.get(resource)
        unlocked = overlay.sharable(resource, None if asked is None else _selection(overlay, resource, asked).lendable)
        chosen[resource] = unlocked if choice is None else choice.left_to_share(resource, unlocked)
        if len(chosen[resource]) < amounts[resource]:
            if len(unlocked) >= amounts[resource] and choice is not None:
                return Infeasibility(ReasonCode.BUSY, reasons.behind(choice.rivals), resource)
            return _busy(overlay, specs[resource], amounts[resource], len(unlocked), asked)
    if choice is None:
        chosen.update({resource: overlay.free(resource, amount) for resource, amount in alone.items()})
    elif alone:
        # in the order of the configuration, because the order within a request means nothing
        ordered = {resource: alone[resource] for resource in specs if resource in alone}
        try:
            devices = choice.choose(ordered)
        except BudgetError:
            return Infeasibility(ReasonCode.PLACEMENT_NOT_FOUND, reasons.not_found(ordered), next(iter(ordered)))
        if devices is None:
            return _not_chosen(overlay, specs, ordered, choice, clauses)
        chosen.update(devices)
    return {resource: chosen[resource] for resource in amounts}


def _selection(overlay: HostOverlay, resource: str, clauses: Clauses) -> Selection:
    """The devices of a resource that a request takes. Its driver has reported some."""
    return overlay.devices.free_lists[resource].selection(clauses)


def _free_count(overlay: HostOverlay, spec: ResourceSpec, clauses: Clauses | None) -> int:
    """How much of an exclusive resource, of what the request takes, one worker could have now."""
    among = None if clauses is None else _selection(overlay, spec.name, clauses).lendable
    if spec.replicas_same_device:
        return overlay.free_replicas(spec.name, among)
    if among is None:
        return overlay.free_count(spec.name)
    overlay.effort += overlay.free_count(spec.name) // DEVICES_PER_STEP
    return sum([position in among for position in overlay.free_positions(spec.name)])


def _not_chosen(
    overlay: HostOverlay,
    specs: Mapping[str, ResourceSpec],
    amounts: Mapping[str, int],
    choice: DeviceChoice,
    clauses: Mapping[str, Clauses],
) -> Infeasibility:
    """The obstacle where enough devices of each resource are free, but not for all of them, or not with something in
    common, or where they are left to earlier waiters."""
    first = next(iter(amounts))
    if choice.rivals:
        return Infeasibility(ReasonCode.BUSY, reasons.behind(choice.rivals), first)
    if len(amounts) > 1 or first not in clauses or not clauses[first].same:
        return Infeasibility(ReasonCode.BUSY, reasons.busy_together(amounts), first)
    free = _free_count(overlay, specs[first], clauses[first])
    return _busy(overlay, specs[first], amounts[first], free, clauses[first], apart=True)


def _busy(
    overlay: HostOverlay,
    spec: ResourceSpec,
    amount: int,
    free: int,
    clauses: Clauses | None = None,
    *,
    apart: bool = False,
) -> Infeasibility:
    if clauses is None:
        reason = reasons.busy(spec, amount, free, overlay.inventory(spec.name))
    else:
        selected = len(_selection(overlay, spec.name, clauses).positions)
        reason = reasons.busy_chosen(spec, amount, clauses, free, selected, apart=apart)
    return Infeasibility(ReasonCode.BUSY, reason, spec.name)


def infeasibility(
    overlay: HostOverlay,
    specs: Mapping[str, ResourceSpec],
    amounts: Mapping[str, int],
    clauses: Mapping[str, Clauses] = m.NO_ITEMS,
) -> Infeasibility | None:
    """Why a request cannot be met even if nobody held or claimed a device; None for a feasible one."""
    obstacle: Infeasibility | None = None
    for resource, amount in amounts.items():
        spec = specs.get(resource)
        if spec is None:
            # it was configured when the worker registered; its removal fails only workers that still wait
            return Infeasibility(
                ReasonCode.UNKNOWN_RESOURCE, reasons.unknown_resource(resource, specs), resource, final=True
            )
        inventory = overlay.inventory(resource)
        is_well = inventory.failure is None and inventory.refused is None and not inventory.asking
        if is_well and _capacity(spec, inventory.lendable) >= amount and spec.state == _OK:
            if resource not in clauses:
                continue
            candidate = _excluded(overlay, spec, amount, inventory, clauses[resource])
        else:
            candidate = _obstacle(overlay, spec, amount, inventory)
            is_blocked = candidate is not None and candidate.code in _BLOCKED and not candidate.final
            if is_blocked and resource in clauses and inventory.devices:
                excluded = _excluded(overlay, spec, amount, inventory, clauses[resource])
                candidate = excluded if excluded is not None and excluded.final else candidate
        if candidate is not None:
            if candidate.final:
                return candidate
            if obstacle is None or candidate.code == ReasonCode.NOT_REPORTED:
                obstacle = candidate
    overlapping = overlay.devices.overlapping
    if overlapping and not overlapping.isdisjoint(amounts):
        return _obstacle_together(overlay, specs, amounts, obstacle, clauses)
    return obstacle


def _excluded(
    overlay: HostOverlay, spec: ResourceSpec, amount: int, inventory: ResourceState, clauses: Clauses
) -> Infeasibility | None:
    """Why a request's clauses leave too few devices of a resource that has enough; None: they do not."""
    selection = _selection(overlay, spec.name, clauses)
    if _capacity(spec, selection.most(lendable=True)) >= amount:
        return None
    if amount > 1 and not selection.is_whole:
        return Infeasibility(ReasonCode.PLACEMENT_NOT_FOUND, reasons.not_found({spec.name: amount}), spec.name)
    most, total = selection.most(lendable=False), len(inventory.devices)
    if _capacity(spec, most) < amount:
        meeting = None if _capacity(spec, len(selection.positions)) < amount else most
        reason = reasons.excluded(spec, amount, clauses, len(selection.positions), total, selection.faults, meeting)
        waits = spec.on_failure == OnFailure.WAIT or _may_be_enough(overlay, spec, amount, clauses, selection)
        return Infeasibility(ReasonCode.INFEASIBLE, reason, spec.name, final=not waits)
    blocks = {overlay.devices.free_lists[spec.name].blocks[position] for position in selection.positions}
    cordoned, used = Block.CORDONED in blocks, Block.STRANGER in blocks
    lendable = selection.most(lendable=True)
    reason = reasons.excluded_ill(spec, amount, clauses, lendable, most, cordoned=cordoned)
    reason = f"{reason}{reasons.strangers(inventory)}" if used else reason
    return Infeasibility(_blocked_by(cordoned=cordoned, used=used), reason, spec.name)


def _may_be_enough(
    overlay: HostOverlay, spec: ResourceSpec, amount: int, clauses: Clauses, selection: Selection
) -> bool:
    """Whether there may be enough devices once drivers name the properties that some devices lack: nvidia-smi answers
    before NVML while a machine starts, and NVLink comes up later still."""
    devices = overlay.inventory(spec.name).devices
    same = [name for name in clauses.same if name != "id"]  # every device has one
    lacks_same = any(not all(map(devices[position].properties.get, same)) for position in selection.positions)
    is_open = selection.unsaid > 0 or lacks_same
    return is_open and _capacity(spec, len(selection.positions) + selection.unsaid) >= amount


def _obstacle(overlay: HostOverlay, spec: ResourceSpec, amount: int, inventory: ResourceState) -> Infeasibility | None:
    name = spec.name
    if spec.state != _OK:
        return Infeasibility(ReasonCode(spec.state), reasons.not_in_effect(spec), name, final=True)
    if inventory.asking:
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    waits = spec.on_failure == OnFailure.WAIT
    failure = inventory.failure
    if failure is not None and amount >= failure.at_least:
        return _failed(spec, failure)
    if not inventory.reported:
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    if inventory.refused is not None:
        reason = reasons.names_refused(spec.name, inventory.refused)
        return Infeasibility(ReasonCode.DRIVER_FAILED, reason, name, final=not waits)
    if _capacity(spec, inventory.lendable) >= amount:
        return None
    if spec.on_demand and may_name_more(overlay, spec, amount, inventory):
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    if _capacity(spec, len(inventory.devices)) < amount:
        return Infeasibility(ReasonCode.INFEASIBLE, reasons.too_few(spec, amount, inventory), name, final=not waits)
    cordons = overlay.host_state.cordons
    if _capacity(spec, inventory.lendable + inventory.used) >= amount:
        return Infeasibility(ReasonCode.USED_BY_STRANGER, reasons.used(spec, amount, inventory), name)
    if _capacity(spec, inventory.healthy) >= amount:
        return Infeasibility(ReasonCode.CORDONED, reasons.cordoned(spec, amount, inventory, cordons), name)
    return Infeasibility(ReasonCode.INFEASIBLE, reasons.too_ill(spec, amount, inventory, cordons), name)


def _capacity(spec: ResourceSpec, devices: int) -> int:
    """How much of a resource one worker can have of so many devices."""
    return devices * spec.replicas if spec.replicas_same_device else devices


def unanswered(overlay: HostOverlay, wanted: Mapping[str, tuple[ResourceSpec, int]]) -> Infeasibility:
    """The obstacle where drivers have named no devices for this worker: one failed, or is to be asked."""
    obstacle: Infeasibility | None = None
    for name, (spec, amount) in wanted.items():
        failure = overlay.inventory(name).failure
        if failure is not None and amount >= failure.at_least and not overlay.inventory(name).asking:
            found = _failed(spec, failure)
            if found.final:
                return found
        else:
            found = Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
        obstacle = found if obstacle is None or found.code == ReasonCode.NOT_REPORTED else obstacle
    if obstacle is None:
        raise AssertionError("each driver has answered")
    return obstacle


def _failed(spec: ResourceSpec, failure: DriverFailure) -> Infeasibility:
    final = failure.permanent and spec.on_failure != OnFailure.WAIT
    reason = reasons.driver_failed(spec, failure.reason)
    return Infeasibility(ReasonCode.DRIVER_FAILED, reason, spec.name, final=final)


def _obstacle_together(
    overlay: HostOverlay,
    specs: Mapping[str, ResourceSpec],
    amounts: Mapping[str, int],
    single: Infeasibility | None,
    clauses: Mapping[str, Clauses],
) -> Infeasibility | None:
    """Why overlapping resources cannot all be granted, or else `single`: the obstacle of one resource. A final obstacle
    outweighs `single`."""
    demands = {
        resource: amounts[resource]
        for resource, spec in specs.items()
        if resource in amounts
        and resource in overlay.devices.overlapping
        and not spec.shared
        and _has_answered(overlay.inventory(resource), amounts[resource])
    }
    if not clauses.keys().isdisjoint(demands):
        return single or _obstacle_among_chosen(overlay, specs, demands, clauses)
    if not overlay.devices.layered.isdisjoint(demands):
        return _obstacle_in_layers(overlay, specs, demands, single)
    if _is_plenty(overlay, demands):
        return single
    shortage = matching.match(demands, overlay.devices.device_counts(lendable=False))
    if isinstance(shortage, matching.Shortage):
        obstacle = _shortage(overlay, specs, amounts, shortage)
        return obstacle if obstacle.final or single is None else single
    if single is not None:
        return single
    shortage = matching.match(demands, overlay.devices.device_counts(lendable=True))
    if isinstance(shortage, matching.Shortage):
        short = {name: demands[name] for name in demands if name in shortage.resources}
        return _too_few_lendable(overlay, short, shortage.devices)
    return None


def _too_few_lendable(overlay: HostOverlay, short: Mapping[str, int], count: int) -> Infeasibility:
    """The obstacle where blocks leave too few devices, `count`, for several resources together."""
    cordoned = any(overlay.inventory(name).cordoned for name in short)
    used = any(overlay.inventory(name).used for name in short)
    reason = reasons.too_few_lendable_together(short, count, cordoned=cordoned, used=used)
    return Infeasibility(_blocked_by(cordoned=cordoned, used=used), reason, next(iter(short)))


def _blocked_by(*, cordoned: bool, used: bool) -> ReasonCode:
    """The code where blocks leave too few devices. `cordoned`, `used`: some of them by an order, or by a stranger."""
    if cordoned:
        return ReasonCode.CORDONED
    return ReasonCode.USED_BY_STRANGER if used else ReasonCode.INFEASIBLE


def _obstacle_in_layers(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], demands: Mapping[str, int], single: Infeasibility | None
) -> Infeasibility | None:
    """As `_obstacle_together`, where devices are parts of others, or have replicas."""
    known = {name: amount for name, amount in demands.items() if name in overlay.devices.free_lists}
    repeats = same_device(specs)
    if is_feasible(overlay, known, repeats, lendable=False) is False:
        shortage = matching.Shortage(frozenset(known), len(_ids(overlay, known)))
        obstacle = _shortage(overlay, specs, known, shortage)
        return obstacle if obstacle.final or single is None else single
    if single is not None or is_feasible(overlay, known, repeats, lendable=True) is not False:
        return single
    return _too_few_lendable(overlay, known, sum(overlay.inventory(name).lendable for name in known))


def _obstacle_among_chosen(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], demands: Mapping[str, int], clauses: Mapping[str, Clauses]
) -> Infeasibility | None:
    """As `_obstacle_together`, where a request takes certain devices only. Each resource alone has enough."""
    free_lists, first = overlay.devices.free_lists, next(iter(demands))

    def are_found(*, lendable: bool) -> bool | None:
        """Whether there is a choice of devices for all; None: the search gave up."""

        def free(resource: str) -> list[int]:
            blocks = free_lists[resource].blocks
            return [position for position, block in enumerate(blocks) if block is None or not lendable]

        try:
            return DeviceChoice(overlay, specs, None, clauses, free=free).choose(demands) is not None
        except BudgetError:
            return None

    found = are_found(lendable=True)
    if found:
        return None
    ever = are_found(lendable=False) if found is False else None
    if ever is None:
        return Infeasibility(ReasonCode.PLACEMENT_NOT_FOUND, reasons.not_found(demands), first)
    if not ever:
        blamed = _to_blame(specs, demands)
        reason = reasons.too_few_chosen_together(demands, clauses)
        return Infeasibility(ReasonCode.INFEASIBLE, reason, blamed.name, final=blamed.on_failure != OnFailure.WAIT)
    cordoned = any(overlay.inventory(name).cordoned for name in demands)
    used = any(overlay.inventory(name).used for name in demands)
    reason = reasons.too_few_chosen_lendable(demands, clauses, cordoned=cordoned, used=used)
    return Infeasibility(_blocked_by(cordoned=cordoned, used=used), reason, first)


def rival_amount(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], resource: str
) -> int:
    """How many devices of a resource the same request may get as devices of other, overlapping resources."""
    overlapping = overlay.devices.overlapping
    if resource not in overlapping:
        return 0
    return sum(
        amount
        for other, amount in amounts.items()
        if other != resource and other in overlapping and other in specs and not specs[other].shared
    )


def _has_answered(inventory: ResourceState, amount: int) -> bool:
    """Whether the driver has answered a request for that amount."""
    return inventory.reported and not inventory.asking and inventory.serves(amount)


def _is_plenty(overlay: HostOverlay, demands: Mapping[str, int]) -> bool:
    """Whether each resource has enough devices that nothing blocks for all demands together."""
    total = sum(demands.values())
    free_lists = overlay.devices.free_lists
    for resource in demands:
        free_list = free_lists.get(resource)
        if free_list is None or free_list.repeats or overlay.inventory(resource).lendable < total:
            return False
    return True


def _shortage(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], shortage: matching.Shortage
) -> Infeasibility:
    """The obstacle where overlapping resources have too few devices together. `on-failure` of any of them decides."""
    short = {resource: amounts[resource] for resource in specs if resource in shortage.resources}
    for resource, amount in short.items():
        spec = specs[resource]
        enough = amount + rival_amount(overlay, specs, amounts, resource)
        if spec.on_demand and may_name_more(overlay, spec, enough, overlay.inventory(resource)):
            return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), resource)
    reason = reasons.too_few_together(short, shortage.devices, _ids(overlay, short))
    blamed = _to_blame(specs, short)
    return Infeasibility(ReasonCode.INFEASIBLE, reason, blamed.name, final=blamed.on_failure != OnFailure.WAIT)


def _to_blame(specs: Mapping[str, ResourceSpec], short: Iterable[str]) -> ResourceSpec:
    """Of resources that have too few devices together, in the order of the configuration, the one whose `on-failure`
    decides. A worker that continues without a resource need not wait for it; of several it is the last one."""
    by_choice = {specs[resource].on_failure: specs[resource] for resource in short}
    order = (OnFailure.NO_INFO, OnFailure.WAIT, OnFailure.FAIL_WORKER)
    return next(by_choice[choice] for choice in order if choice in by_choice)


def _ids(overlay: HostOverlay, resources: Iterable[str]) -> list[str]:
    """The devices of resources, each by one id."""
    ids: dict[str, str] = {}
    for resource in resources:
        for device in overlay.inventory(resource).devices:
            ids.setdefault(overlay.devices.canonical(device.id), device.id)
    return list(ids.values())


def may_name_more(overlay: HostOverlay, spec: ResourceSpec, amount: int, inventory: ResourceState) -> bool:
    """Whether an on-demand driver may name more devices. It has named as many as the manager asked for, and the manager
    has not asked it for the held devices and `amount` more."""
    if inventory.asking or not inventory.serves(amount):
        return False
    if not inventory.reported:
        return True
    held = overlay.held_count(spec.name)
    # a driver that knows the holders does not name what they hold
    named = held + sum(not overlay.locked(device) for device in inventory.devices)
    return inventory.asked <= named and inventory.asked < held + amount


def least_bytes(overlay: HostOverlay, amounts: Mapping[str, int]) -> int:
    """The least bytes of a grant of `amounts`: with the smallest infos of each resource."""
    free_lists = overlay.devices.free_lists
    return sum(
        [free_list.least_bytes(amount) for name, amount in amounts.items() if (free_list := free_lists.get(name))]
    )


def shares(
    request: ResolvedRequest, devices: Mapping[str, tuple[KnownDevice, ...]], shared: Collection[str]
) -> tuple[dict[str, OperatorShare], dict[str, OperatorShare] | UnsetType]:
    """The share of each named operator, in the order of the request; and the shared resources that operators name, once
    for all of them.

    `devices`: the grant. `shared`: its shared resources. Devices in no share go to the operators that are not named.
    """
    if not request.operators:
        return m.NO_ITEMS, UNSET
    used = dict.fromkeys(devices, 0)
    alike: dict[tuple[str, ...], OperatorShare] = {}
    common_names: dict[str, None] = {}
    result: dict[str, OperatorShare] = {}
    for operator, requests in request.operators.items():
        own: dict[str, tuple[KnownDevice, ...]] = {}
        visible = tuple([resource for resource in requests if resource in shared])
        common_names.update(dict.fromkeys(visible))
        for resource, resource_request in requests.items():
            if resource in devices and resource not in shared:
                start = used[resource]
                used[resource] = start + resource_request.amount
                own[resource] = devices[resource][start : used[resource]]
        if own:
            result[operator] = _share(own, visible)
            continue
        if visible not in alike:
            alike[visible] = _share({}, visible)
        result[operator] = alike[visible]
    common = {name: _share({name: devices[name]}) for name in common_names}
    return result, common or UNSET


def _share(devices: Devices, shared: Collection[str] = ()) -> OperatorShare:
    infos = grant_infos(devices)
    return OperatorShare(
        resources={resource: [device.id for device in chosen] for resource, chosen in devices.items()},
        env=infos.env,
        cdi=infos.cdi,
        shared=list(shared) or UNSET,
    )
