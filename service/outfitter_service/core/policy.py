"""Who gets which devices: whether a request can be met now, and the grant if it can.

Placement looks at one host's book and says what it sees; it changes nothing. All of a worker's resources or
none; devices in the driver's order of preference.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from msgspec import Struct

from outfitter_proto.records import Health, OperatorShare, ReasonCode, ResolvedRequest
from outfitter_service.core import explain
from outfitter_service.core.ledger import HostBook, Inventory
from outfitter_service.core.model import KnownDevice, OnFailure, ResourceSpec


class Obstacle(Struct, frozen=True):
    """Why a request is not granted now. `final`: waiting will not help."""

    code: ReasonCode
    reason: str
    resource: str
    final: bool = False


class View:
    """One host's book as it will be after the decision so far: taken devices on top of what is held."""

    def __init__(self, book: HostBook) -> None:
        self.book = book
        self.taken: set[str] = set()
        self.freed: set[str] = set()
        self.inventories: dict[str, Inventory] = {}
        self._free: dict[str, list[int]] = {}

    def set_inventory(self, resource: str, inventory: Inventory) -> None:
        self.inventories[resource] = inventory
        self._free[resource] = [at for at, device in enumerate(inventory.devices) if not self._held(device)]

    def inventory(self, resource: str) -> Inventory:
        found = self.inventories.get(resource)
        return found if found is not None else self.book.inventory(resource)

    def held_count(self, resource: str) -> int:
        return sum(self._held(device) for device in self.inventory(resource).devices)

    def _held(self, device: KnownDevice) -> bool:
        return any(
            name in self.taken or (name in self.book.held and name not in self.freed)
            for name in (device.id, *device.aliases)
        )

    def candidates(self, resource: str) -> Iterator[KnownDevice]:
        """Healthy devices that nobody holds, in the driver's order."""
        devices = self.inventory(resource).devices
        positions: Iterable[int]
        if resource in self.inventories:
            positions = self._free[resource]
        else:
            positions = reversed(self.book.free.get(resource, ()))
            if self.freed:
                freed = {at for name in self.freed for at in self.book.positions(name, resource)}
                positions = heapq.merge(positions, sorted(freed))
        for position in positions:
            device = devices[position]
            if device.health == Health.HEALTHY and not self._held(device):
                yield device

    def free_count(self, resource: str, enough: int) -> int:
        """How many candidates there are, counted up to `enough`."""
        count = 0
        for _ in self.candidates(resource):
            count += 1
            if count >= enough:
                break
        return count


def place(
    view: View, specs: Mapping[str, ResourceSpec], request: ResolvedRequest, claimed: Collection[str]
) -> dict[str, tuple[KnownDevice, ...]] | Obstacle:
    """The devices for `request`, or the obstacle that weighs most.

    `claimed` are the exclusive resources that earlier waiters want. A final obstacle outweighs one that keeps
    the request out of the queue's way (not reported, infeasible, failed), and that one outweighs busy.
    """
    chosen: dict[str, tuple[KnownDevice, ...]] = {}
    busy: Obstacle | None = None
    stuck: Obstacle | None = None
    for resource, amount in request.amounts.items():
        spec = specs.get(resource)
        if spec is None:
            # an earlier configuration knew it; a restart with it removed fails only those who still wait
            return Obstacle(
                ReasonCode.UNKNOWN_RESOURCE, explain.unknown_resource(resource, specs), resource, final=True
            )
        obstacle = _obstacle(view, spec, amount)
        if obstacle is not None:
            if obstacle.final:
                return obstacle
            if obstacle.code == ReasonCode.BUSY:
                busy = busy or obstacle
            else:
                stuck = stuck or obstacle
        elif spec.shared:
            chosen[resource] = tuple(d for d in view.inventory(resource).devices if d.health == Health.HEALTHY)
        elif resource in claimed:
            busy = busy or Obstacle(ReasonCode.BUSY, explain.behind([resource]), resource)
        else:
            others = {device.id for devices in chosen.values() for device in devices}
            mine = tuple(islice((d for d in view.candidates(resource) if d.id not in others), amount))
            if len(mine) < amount:
                busy = busy or Obstacle(
                    ReasonCode.BUSY, explain.busy(spec, amount, len(mine), view.inventory(resource)), resource
                )
            else:
                chosen[resource] = mine
    return stuck or busy or chosen


def _obstacle(view: View, spec: ResourceSpec, amount: int) -> Obstacle | None:
    """Why `amount` devices of one resource cannot be had now, claims of others aside."""
    name = spec.name
    inventory = view.inventory(name)
    wait = spec.on_failure == OnFailure.WAIT
    if inventory.asking or (spec.on_demand and not inventory.reported and inventory.failure is None):
        return Obstacle(ReasonCode.NOT_REPORTED, explain.not_reported(spec), name)
    if inventory.failure is not None and amount >= inventory.failure.at_least:
        reason = explain.driver_failed(spec, inventory.failure.reason)
        return Obstacle(ReasonCode.DRIVER_FAILED, reason, name, final=inventory.failure.permanent and not wait)
    if not inventory.reported:
        return Obstacle(ReasonCode.NOT_REPORTED, explain.not_reported(spec), name)
    if len(inventory.devices) < amount:
        return Obstacle(ReasonCode.INFEASIBLE, explain.too_few(spec, amount, inventory), name, final=not wait)
    free = len(inventory.devices) if spec.shared else view.free_count(name, amount)
    if free >= amount and not spec.shared:
        return None
    if inventory.healthy < amount:
        return Obstacle(ReasonCode.INFEASIBLE, explain.too_ill(spec, amount, inventory), name)
    if spec.shared:
        return None
    return Obstacle(ReasonCode.BUSY, explain.busy(spec, amount, free, inventory), name)


def infos(devices: Mapping[str, tuple[KnownDevice, ...]]) -> dict[str, list[dict[str, str]]]:
    """The infos of a grant: each device's properties with its `id`, and `local_index` in the granted order."""
    return {
        resource: [info(device, ordinal) for ordinal, device in enumerate(chosen)]
        for resource, chosen in devices.items()
    }


def info(device: KnownDevice, ordinal: int) -> dict[str, str]:
    told = {"id": device.id, **device.properties}
    told["id"] = device.id
    told.setdefault("index", str(ordinal))
    told["local_index"] = str(ordinal)
    if device.health != Health.HEALTHY:
        told["health"] = device.health
        if device.reason:
            told["health.reason"] = device.reason
    return told


def environment(devices: Mapping[str, tuple[KnownDevice, ...]]) -> tuple[dict[str, str], list[str]]:
    """The variables and CDI names of a grant: values of several devices joined with commas, equal ones once."""
    values: dict[str, dict[str, None]] = {}
    cdi: dict[str, None] = {}
    for chosen in devices.values():
        for device in chosen:
            for variable, value in device.env.items():
                values.setdefault(variable, {})[value] = None
            for name in device.cdi:
                cdi[name] = None
    return {variable: ",".join(items) for variable, items in values.items()}, list(cdi)


def shares(request: ResolvedRequest, devices: Mapping[str, tuple[KnownDevice, ...]]) -> dict[str, OperatorShare]:
    """Each named operator's own devices, in the order in which the request names the operators.

    What is left over is in no share: it goes to the operators that are not named. Shared resources have no
    own devices to give: every operator sees them all.
    """
    if not request.operators:
        return {}
    used = dict.fromkeys(devices, 0)
    result: dict[str, OperatorShare] = {}
    for operator, wanted in request.operators.items():
        own: dict[str, tuple[KnownDevice, ...]] = {}
        for resource, asked in wanted.items():
            if resource in devices:
                start = used[resource]
                used[resource] = start + asked.amount
                own[resource] = devices[resource][start : used[resource]]
        env, cdi = environment(own)
        result[operator] = OperatorShare(
            resources={resource: [device.id for device in chosen] for resource, chosen in own.items()}, env=env, cdi=cdi
        )
    return result
