"""Who gets which devices: whether a request can be met now, and which operator of a worker has which.

Placement looks at one host and says what it sees; it changes nothing. All of a worker's resources or none;
devices in the driver's order of preference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import UNSET, Struct, UnsetType

from outfitter_proto.records import Health, OperatorShare, ReasonCode, ResolvedRequest
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.model import Devices, KnownDevice, OnFailure, ResourceSpec, SpecState
from outfitter_service.core.placement.shared_devices import Scene
from outfitter_service.core.state import matching
from outfitter_service.core.state.host_state import Inventory
from outfitter_service.core.state.infos import grant_infos
from outfitter_service.core.state.overlay import HostOverlay

_HEALTHY = Health.HEALTHY
_OK = SpecState.OK


class Infeasibility(Struct, frozen=True):
    """Why a request is not granted now. `final`: waiting will not help."""

    code: ReasonCode
    reason: str
    resource: str
    final: bool = False


def place(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], claimed: Collection[str] = ()
) -> Devices | Infeasibility:
    """The devices for a request, or the obstacle that weighs most, whatever the order of its resources.

    `claimed` are the resources that earlier waiters want: devices that could serve those are left to them, unless both
    share them. A final obstacle outweighs one that keeps the request out of the queue's way (not reported, infeasible,
    failed), and that one outweighs busy.
    """
    stuck = infeasibility(overlay, specs, amounts)
    if stuck is not None:
        return stuck
    shared = [resource for resource in amounts if specs[resource].shared]
    alone = amounts if not shared else {name: amount for name, amount in amounts.items() if name not in shared}
    for resource, amount in alone.items():
        free = overlay.free_count(resource)
        if free < amount:
            return _busy(overlay, specs[resource], amount, free)
    for resource in alone:
        if resource in claimed:
            return Infeasibility(ReasonCode.BUSY, reasons.behind([resource]), resource)
    overlapping = overlay.host_state.overlapping
    apart = not overlapping or overlapping.isdisjoint(amounts)
    scene = None if apart else Scene(overlay, specs, claimed)
    chosen: Devices = {}
    for resource in shared:
        every = _unlocked(overlay, resource)
        chosen[resource] = every if scene is None else scene.left_to_share(every)
        if len(chosen[resource]) < amounts[resource]:
            if len(every) >= amounts[resource] and scene is not None:
                return Infeasibility(ReasonCode.BUSY, reasons.behind(scene.rivals), resource)
            return _busy(overlay, specs[resource], amounts[resource], len(every))
    if scene is None:
        chosen.update({resource: overlay.free(resource, amount) for resource, amount in alone.items()})
    elif alone:
        # in the order of the configuration: that of a request's resources means nothing
        wanted = {resource: alone[resource] for resource in specs if resource in alone}
        found = scene.choose(wanted)
        if found is None:
            reason = reasons.behind(scene.rivals) if scene.rivals else reasons.busy_together(wanted)
            return Infeasibility(ReasonCode.BUSY, reason, next(iter(wanted)))
        chosen.update(found)
    return {resource: chosen[resource] for resource in amounts}


def _unlocked(overlay: HostOverlay, resource: str) -> tuple[KnownDevice, ...]:
    """The healthy devices of a shared resource that nobody has alone."""
    return tuple(
        [one for one in overlay.inventory(resource).devices if one.health == _HEALTHY and not overlay.locked(one)]
    )


def _busy(overlay: HostOverlay, spec: ResourceSpec, amount: int, free: int) -> Infeasibility:
    return Infeasibility(ReasonCode.BUSY, reasons.busy(spec, amount, free, overlay.inventory(spec.name)), spec.name)


def infeasibility(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int]
) -> Infeasibility | None:
    """Why a request cannot be met whatever others hold or claim; None for a feasible one."""
    stuck: Infeasibility | None = None
    for resource, amount in amounts.items():
        spec = specs.get(resource)
        if spec is None:
            # an earlier configuration knew it; a restart with it removed fails only those who still wait
            return Infeasibility(
                ReasonCode.UNKNOWN_RESOURCE, reasons.unknown_resource(resource, specs), resource, final=True
            )
        inventory = overlay.inventory(resource)
        if inventory.healthy >= amount and inventory.failure is None and not inventory.asking and spec.state == _OK:
            continue
        found = _trouble(overlay, spec, amount, inventory)
        if found is not None:
            if found.final:
                return found
            if stuck is None or found.code == ReasonCode.NOT_REPORTED:
                stuck = found
    overlapping = overlay.host_state.overlapping
    if overlapping and not overlapping.isdisjoint(amounts):
        return _trouble_together(overlay, specs, amounts, stuck)
    return stuck


def _trouble(overlay: HostOverlay, spec: ResourceSpec, amount: int, inventory: Inventory) -> Infeasibility | None:
    name = spec.name
    if spec.state != _OK:
        return Infeasibility(ReasonCode(spec.state), reasons.not_in_effect(spec), name, final=True)
    if inventory.asking:
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    waits = spec.on_failure == OnFailure.WAIT
    failure = inventory.failure
    if failure is not None and amount >= failure.at_least:
        reason = reasons.driver_failed(spec, failure.reason)
        return Infeasibility(ReasonCode.DRIVER_FAILED, reason, name, final=failure.permanent and not waits)
    if not inventory.reported:
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    if inventory.healthy >= amount:
        return None
    if spec.on_demand and may_name_more(overlay, spec, amount, inventory):
        return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), name)
    if len(inventory.devices) < amount:
        return Infeasibility(ReasonCode.INFEASIBLE, reasons.too_few(spec, amount, inventory), name, final=not waits)
    return Infeasibility(ReasonCode.INFEASIBLE, reasons.too_ill(spec, amount, inventory), name)


def _trouble_together(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], stuck: Infeasibility | None
) -> Infeasibility | None:
    """Why resources that show the same devices can not all be had, or `stuck`: what is known to be in the way
    already, which only what is final outweighs."""
    demands = {
        resource: amounts[resource]
        for resource, spec in specs.items()
        if resource in amounts
        and resource in overlay.host_state.overlapping
        and not spec.shared
        and _is_settled(overlay.inventory(resource), amounts[resource])
    }
    if _is_plenty(overlay, demands):
        return stuck
    shortage = matching.match(demands, overlay.host_state.device_counts(healthy=False))
    if isinstance(shortage, matching.Shortage):
        found = _shortage(overlay, specs, amounts, shortage)
        return found if found.final or stuck is None else stuck
    if stuck is not None:
        return stuck
    shortage = matching.match(demands, overlay.host_state.device_counts(healthy=True))
    if isinstance(shortage, matching.Shortage):
        short = {name: demands[name] for name in demands if name in shortage.resources}
        return Infeasibility(
            ReasonCode.INFEASIBLE, reasons.too_ill_together(short, shortage.devices), next(iter(short))
        )
    return None


def rival_amount(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], resource: str
) -> int:
    """How many devices of a resource the same request may get as others that show them as well."""
    overlapping = overlay.host_state.overlapping
    if resource not in overlapping:
        return 0
    return sum(
        amount
        for other, amount in amounts.items()
        if other != resource and other in overlapping and other in specs and not specs[other].shared
    )


def _is_settled(inventory: Inventory, amount: int) -> bool:
    """Its driver has said what there is, as far as that amount is concerned."""
    failure = inventory.failure
    return inventory.reported and not inventory.asking and (failure is None or amount < failure.at_least)


def _is_plenty(overlay: HostOverlay, demands: Mapping[str, int]) -> bool:
    """Whether each resource has enough healthy devices even if all the others took theirs from them first."""
    total = sum(demands.values())
    shelves = overlay.host_state.shelves
    for resource in demands:
        free_list = shelves.get(resource)
        if free_list is None or free_list.repeats or overlay.inventory(resource).healthy < total:
            return False
    return True


def _shortage(
    overlay: HostOverlay, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], shortage: matching.Shortage
) -> Infeasibility:
    """Resources that show fewer devices between them than is wanted of them: what `on-failure` says of any decides."""
    short = {resource: amounts[resource] for resource in specs if resource in shortage.resources}
    for resource, amount in short.items():
        spec = specs[resource]
        most = amount + rival_amount(overlay, specs, amounts, resource)
        if spec.on_demand and may_name_more(overlay, spec, most, overlay.inventory(resource)):
            return Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), resource)
    reason = reasons.too_few_together(short, shortage.devices, _ids(overlay, short))
    by_choice = {specs[resource].on_failure: resource for resource in short}
    # who goes on without one of them need not wait for it; of several that is the last of the configuration
    for choice in (OnFailure.NO_INFO, OnFailure.WAIT, OnFailure.FAIL_WORKER):
        if choice in by_choice:
            return Infeasibility(ReasonCode.INFEASIBLE, reason, by_choice[choice], final=choice != OnFailure.WAIT)
    raise AssertionError("a shortage of nothing")


def _ids(overlay: HostOverlay, resources: Iterable[str]) -> list[str]:
    """The devices that resources show, each by one id."""
    ids: dict[str, str] = {}
    for resource in resources:
        for device in overlay.inventory(resource).devices:
            ids.setdefault(overlay.host_state.canonical(device.id), device.id)
    return list(ids.values())


def may_name_more(overlay: HostOverlay, spec: ResourceSpec, amount: int, inventory: Inventory) -> bool:
    """An on-demand driver has not been asked for as many as `amount` more than are held, and named all it was
    asked for so far: asked for more it may name more."""
    if inventory.asking or (inventory.failure is not None and amount >= inventory.failure.at_least):
        return False
    if not inventory.reported:
        return True
    return inventory.asked <= len(inventory.devices) and inventory.asked < overlay.held_count(spec.name) + amount


def least_bytes(overlay: HostOverlay, amounts: Mapping[str, int]) -> int:
    """What a grant of so many devices takes at least: as many of the smallest infos that each driver has reported."""
    shelves = overlay.host_state.shelves
    return sum([free_list.least_bytes(amount) for name, amount in amounts.items() if (free_list := shelves.get(name))])


def shares(
    request: ResolvedRequest, devices: Mapping[str, tuple[KnownDevice, ...]], shared: Collection[str]
) -> tuple[dict[str, OperatorShare], dict[str, OperatorShare] | UnsetType]:
    """Each named operator's own devices, in the order in which the request names the operators; and what all of them
    see that name a shared resource, said once.

    What is left over is in no share: it goes to the operators that are not named.
    """
    if not request.operators:
        return m.NO_ITEMS, UNSET
    used = dict.fromkeys(devices, 0)
    alike: dict[tuple[str, ...], OperatorShare] = {}
    named: dict[str, None] = {}
    result: dict[str, OperatorShare] = {}
    for operator, wanted in request.operators.items():
        own: dict[str, tuple[KnownDevice, ...]] = {}
        seen = tuple([resource for resource in wanted if resource in shared])
        named.update(dict.fromkeys(seen))
        for resource, asked in wanted.items():
            if resource in devices and resource not in shared:
                start = used[resource]
                used[resource] = start + asked.amount
                own[resource] = devices[resource][start : used[resource]]
        if own:
            result[operator] = _share(own, seen)
            continue
        if seen not in alike:
            alike[seen] = _share({}, seen)
        result[operator] = alike[seen]
    common = {name: _share({name: devices[name]}) for name in named}
    return result, common or UNSET


def _share(devices: Devices, shared: Collection[str] = ()) -> OperatorShare:
    said = grant_infos(devices)
    return OperatorShare(
        resources={resource: [device.id for device in chosen] for resource, chosen in devices.items()},
        env=said.env,
        cdi=said.cdi,
        shared=list(shared) or UNSET,
    )
