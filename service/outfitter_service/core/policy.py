"""Who gets which devices: whether a request can be met now, and which operator of a worker has which.

Placement looks at one host and says what it sees; it changes nothing. All of a worker's resources or none;
devices in the driver's order of preference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from outfitter_proto.records import Health, OperatorShare, ReasonCode, ResolvedRequest
from outfitter_service.core import explain
from outfitter_service.core.book import Inventory
from outfitter_service.core.model import KnownDevice, OnFailure, ResourceSpec, SpecState
from outfitter_service.core.terms import terms
from outfitter_service.core.view import View

_HEALTHY = Health.HEALTHY
_OK = SpecState.OK

Devices = dict[str, tuple[KnownDevice, ...]]
"""A grant's devices by resource."""


class Obstacle(Struct, frozen=True):
    """Why a request is not granted now. `final`: waiting will not help."""

    code: ReasonCode
    reason: str
    resource: str
    final: bool = False


def place(
    view: View, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int], claimed: Collection[str] = ()
) -> Devices | Obstacle:
    """The devices for a request, or the obstacle that weighs most.

    `claimed` are the exclusive resources that earlier waiters want. A final obstacle outweighs one that keeps
    the request out of the queue's way (not reported, infeasible, failed), and that one outweighs busy.
    """
    stuck = hindrance(view, specs, amounts)
    if stuck is not None:
        return stuck
    chosen: Devices = {}
    for resource, amount in amounts.items():
        spec = specs[resource]
        if spec.shared:
            every = view.inventory(resource).devices
            mine = tuple([device for device in every if device.health == _HEALTHY and not view.locked(device)])
        elif chosen:
            mine = _unchosen(view, resource, amount, chosen)
        else:
            mine = view.free(resource, amount)
        if len(mine) < amount:
            reason = explain.busy(spec, amount, len(mine), view.inventory(resource))
            return Obstacle(ReasonCode.BUSY, reason, resource)
        if resource in claimed and not spec.shared:
            return Obstacle(ReasonCode.BUSY, explain.behind([resource]), resource)
        chosen[resource] = mine
    return chosen


def _unchosen(view: View, resource: str, amount: int, chosen: Devices) -> tuple[KnownDevice, ...]:
    """Free devices that the same request does not get as another resource already."""
    canonical = view.book.canonical
    others = {canonical(device.id) for devices in chosen.values() for device in devices}
    free = view.free(resource, amount + len(others))
    return tuple([device for device in free if canonical(device.id) not in others][:amount])


def hindrance(view: View, specs: Mapping[str, ResourceSpec], amounts: Mapping[str, int]) -> Obstacle | None:
    """Why a request cannot be met whatever others hold or claim; None for a feasible one."""
    stuck: Obstacle | None = None
    for resource, amount in amounts.items():
        spec = specs.get(resource)
        if spec is None:
            # an earlier configuration knew it; a restart with it removed fails only those who still wait
            return Obstacle(
                ReasonCode.UNKNOWN_RESOURCE, explain.unknown_resource(resource, specs), resource, final=True
            )
        inventory = view.inventory(resource)
        if inventory.healthy >= amount and inventory.failure is None and not inventory.asking and spec.state == _OK:
            continue
        found = _trouble(view, spec, amount, inventory)
        if found is not None:
            if found.final:
                return found
            stuck = stuck or found
    return stuck


def _trouble(view: View, spec: ResourceSpec, amount: int, inventory: Inventory) -> Obstacle | None:
    name = spec.name
    if spec.state != _OK:
        return Obstacle(ReasonCode(spec.state), explain.not_in_effect(spec), name, final=True)
    if inventory.asking:
        return Obstacle(ReasonCode.NOT_REPORTED, explain.not_reported(spec), name)
    waits = spec.on_failure == OnFailure.WAIT
    failure = inventory.failure
    if failure is not None and amount >= failure.at_least:
        reason = explain.driver_failed(spec, failure.reason)
        return Obstacle(ReasonCode.DRIVER_FAILED, reason, name, final=failure.permanent and not waits)
    if not inventory.reported:
        return Obstacle(ReasonCode.NOT_REPORTED, explain.not_reported(spec), name)
    if inventory.healthy >= amount:
        return None
    if spec.on_demand and may_name_more(view, spec, amount, inventory):
        return Obstacle(ReasonCode.NOT_REPORTED, explain.not_reported(spec), name)
    if len(inventory.devices) < amount:
        return Obstacle(ReasonCode.INFEASIBLE, explain.too_few(spec, amount, inventory), name, final=not waits)
    return Obstacle(ReasonCode.INFEASIBLE, explain.too_ill(spec, amount, inventory), name)


def may_name_more(view: View, spec: ResourceSpec, amount: int, inventory: Inventory) -> bool:
    """An on-demand driver has not been asked for as many as `amount` more than are held, and named all it was
    asked for so far: asked for more it may name more."""
    if inventory.asking or (inventory.failure is not None and amount >= inventory.failure.at_least):
        return False
    if not inventory.reported:
        return True
    return inventory.asked <= len(inventory.devices) and inventory.asked < view.held_count(spec.name) + amount


def shares(
    request: ResolvedRequest, devices: Mapping[str, tuple[KnownDevice, ...]], shared: Collection[str]
) -> dict[str, OperatorShare]:
    """Each named operator's own devices, in the order in which the request names the operators.

    What is left over is in no share: it goes to the operators that are not named. Shared resources are not
    divided: an operator that names one sees all of its devices.
    """
    used = dict.fromkeys(devices, 0)
    result: dict[str, OperatorShare] = {}
    for operator, wanted in (request.operators or {}).items():
        own: dict[str, tuple[KnownDevice, ...]] = {}
        for resource, asked in wanted.items():
            if resource in shared:
                own[resource] = devices[resource]
            elif resource in devices:
                start = used[resource]
                used[resource] = start + asked.amount
                own[resource] = devices[resource][start : used[resource]]
        said = terms(own)
        result[operator] = OperatorShare(
            resources={resource: [device.id for device in chosen] for resource, chosen in own.items()},
            env=said.env,
            cdi=said.cdi,
        )
    return result
