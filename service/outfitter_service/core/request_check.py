"""Resolves a registration: amounts by resource, resources that stay without infos, or why it fails at once."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache

from msgspec import UNSET, Struct, UnsetType, structs

from outfitter_proto.clauses import Clauses, choice_of, chosen, clauses_of
from outfitter_proto.clauses import problem as problem_of
from outfitter_proto.records import (
    FINAL_STATES,
    Allocation,
    ReasonCode,
    Register,
    ResolvedRequest,
    ResourceChoice,
    ResourceRequest,
    Survivors,
    Unavailable,
)
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.decision import Rules
from outfitter_service.core.state import sizes
from outfitter_service.core.state.host_state import HostState

MOST_WARNINGS = 4
"""Most properties that nobody reports and that a registration's warnings name."""
_OK = m.SpecState.OK


class Resolved(Struct, gc=False):
    """A registration's `request` with an amount for each resource in effect. `unavailable`: resources that stay without
    infos, and why. `problem`: why the request can never be met, as a code and a reason; None: it may be met."""

    request: ResolvedRequest
    unavailable: dict[str, Unavailable]
    problem: tuple[ReasonCode, str] | None


def resolve(rules: Rules, message: Register) -> Resolved:
    """Resolve a registration against the configured resources (Flink's rule where it names none)."""
    specs, requests = rules.specs, message.resources
    said: Mapping[str, ResourceRequest] = m.NO_ITEMS
    unavailable: dict[str, Unavailable] = m.NO_ITEMS
    problem = None
    if requests is None:
        configured = {name: spec.amount for name, spec in specs.items()}
        amounts, unavailable, problem = _in_effect(specs, configured, explicit=False)
    else:
        for name, request in requests.items():
            spec = specs.get(name)
            is_plain = request.where is UNSET and request.same is UNSET
            if spec is None or spec.state is not _OK or not is_plain:
                said, requests = requests, _without_clauses(requests)
                amounts_by_name = {name: request.amount for name, request in requests.items()}
                amounts, unavailable, problem = _in_effect(specs, amounts_by_name, explicit=True)
                break
        else:
            amounts, requests = _alike(*requests.items())
    choices: dict[str, ResourceChoice] | UnsetType = UNSET
    if said or rules.choosing:
        choices, wrong = _choices(specs, amounts, said)
        problem = problem or wrong
    if message.operators:
        problem = problem or _operators_problem(message, amounts, unavailable, specs)
    resolved = ResolvedRequest(
        amounts=amounts,
        resources=requests,
        operators=message.operators,
        owner=message.owner,
        lease_s=rules.lease_s if message.lease_s is UNSET else message.lease_s,
        wait_s=message.wait_s,
        priority=message.priority,
        labels=message.labels,
        survivors=message.survivors or UNSET,
        heartbeats=False if message.heartbeats is False else UNSET,
        choices=choices,
    )
    return Resolved(resolved, unavailable, problem)


def _in_effect(
    specs: Mapping[str, m.ResourceSpec], requested: Mapping[str, int | None], *, explicit: bool
) -> tuple[dict[str, int], dict[str, Unavailable], tuple[ReasonCode, str] | None]:
    """The amounts of resources in effect, the resources that stay without infos, and why another one fails the worker.

    `requested`: amounts by resource. `explicit`: the worker names its resources itself.
    """
    amounts: dict[str, int] = {}
    unavailable: dict[str, Unavailable] = {}
    problem: tuple[ReasonCode, str] | None = None
    for name, amount in requested.items():
        spec = specs.get(name)
        if spec is None:
            problem = problem or (ReasonCode.UNKNOWN_RESOURCE, reasons.unknown_resource(name, specs))
        elif amount is not None and spec.state == _OK:
            amounts[name] = amount
        else:
            resource_problem = _not_in_effect(spec, unavailable, explicit=explicit)
            problem = problem or resource_problem
    return amounts, unavailable, problem


@lru_cache(maxsize=1024)
def _alike(*requests: tuple[str, ResourceRequest]) -> tuple[dict[str, int], dict[str, ResourceRequest]]:
    """The amounts and requests by resource, as one object for all workers with equal requests: a ledger has many."""
    return {name: request.amount for name, request in requests}, dict(requests)


def _without_clauses(requests: Mapping[str, ResourceRequest]) -> dict[str, ResourceRequest]:
    """The requests with their amounts only: clauses stand elsewhere in the record."""
    return {name: ResourceRequest(amount=request.amount) for name, request in requests.items()}


def _choices(
    specs: Mapping[str, m.ResourceSpec], amounts: Mapping[str, int], said: Mapping[str, ResourceRequest]
) -> tuple[dict[str, ResourceChoice] | UnsetType, tuple[ReasonCode, str] | None]:
    """Which devices the worker takes, by resource, and why that can never be met. `said`: what it says itself."""
    clauses = {name: _clauses(specs[name], said.get(name)) for name in amounts}
    clauses = {name: each for name, each in clauses.items() if each}
    wrong = next(filter(None, [_unchoosable(specs[name], each) for name, each in clauses.items()]), None)
    choices = {name: choice_of(each) for name, each in clauses.items()}
    return choices or UNSET, (ReasonCode.INVALID_REQUEST, wrong) if wrong is not None else None


def _clauses(spec: m.ResourceSpec, request: ResourceRequest | None) -> Clauses:
    """The clauses of a resource. Of what the worker does not say, the configured ones count."""
    if request is None:
        return spec.clauses
    asked = clauses_of(request.where, request.same)
    return Clauses(
        where=spec.clauses.where if request.where in (UNSET, None) else asked.where,
        same=spec.clauses.same if request.same in (UNSET, None) else asked.same,
    )


def _unchoosable(spec: m.ResourceSpec, clauses: Clauses) -> str | None:
    """Why no device can be chosen by these clauses, or None."""
    if (wrong := problem_of(clauses)) is not None:
        return f"{spec.name}: {wrong}"
    if spec.on_demand:
        return reasons.on_demand_chosen(spec)
    return reasons.shared_same(spec) if spec.shared and clauses.same else None


def unknown_properties(host_state: HostState, request: ResolvedRequest) -> list[str]:
    """A warning about each property in a request's clauses that no driver reports."""
    warnings = []
    for resource, clauses in chosen(request).items():
        free_list = host_state.devices.free_lists.get(resource)
        if free_list is None:
            continue
        known = free_list.properties
        for name in dict.fromkeys([*[name for name, _ in clauses.where], *clauses.same]):
            if name not in known:
                near = get_close_matches(name, known, n=1, cutoff=0.6)
                warnings.append(reasons.unknown_property(resource, name, near[0] if near else None))
    return warnings[:MOST_WARNINGS]


def _not_in_effect(
    spec: m.ResourceSpec, unavailable: dict[str, Unavailable], *, explicit: bool
) -> tuple[ReasonCode, str] | None:
    """Why a resource that is not in effect fails the worker, or None: it goes into `unavailable`.

    It fails a worker that names it (`explicit`). If its setting is wrong, it also fails a worker that gets it by
    configuration. With `on-failure = no-info` it fails nobody.
    """
    state = m.SpecState.MISCONFIGURED if spec.state == m.SpecState.OK else spec.state
    code, reason = ReasonCode(state), reasons.not_in_effect(spec)
    wrong = explicit or state == m.SpecState.MISCONFIGURED
    if wrong and spec.on_failure != m.OnFailure.NO_INFO:
        return code, reason
    unavailable[spec.name] = Unavailable(code=code, reason=reason)
    return None


def _operators_problem(
    message: Register,
    amounts: Mapping[str, int],
    unavailable: dict[str, Unavailable],
    specs: Mapping[str, m.ResourceSpec],
) -> tuple[ReasonCode, str] | None:
    """Why operators ask for something that their worker does not ask for, or for more of it; None: they do not."""
    for operator, requests in (message.operators or {}).items():
        for resource, request in requests.items():
            spec = specs.get(resource)
            if request.where or request.same:
                return ReasonCode.INVALID_REQUEST, reasons.operator_chosen(operator, resource)
            if spec is None:
                return ReasonCode.UNKNOWN_RESOURCE, reasons.unknown_resource(resource, specs)
            if resource in amounts:
                continue
            if resource not in unavailable:
                return ReasonCode.INVALID_REQUEST, reasons.operator_without(operator, resource)
            if (problem := _not_in_effect(spec, unavailable, explicit=True)) is not None:
                return problem
    reason = excess(specs, amounts, message.operators)
    return (ReasonCode.INVALID_REQUEST, reason) if reason is not None else None


def excess(
    specs: Mapping[str, m.ResourceSpec],
    amounts: Mapping[str, int],
    operators: Mapping[str, Mapping[str, ResourceRequest]] | None,
) -> str | None:
    """Why operators ask for more than their worker does, or None.

    All operators see a shared device; an exclusive one belongs to one operator. So the result may change when a manager
    starts with another configuration. Resources that are not in effect have a problem of their own.
    """
    shares: dict[str, dict[str, int]] = {}
    for operator, requests in (operators or m.NO_ITEMS).items():
        for resource, request in requests.items():
            shares.setdefault(resource, {})[operator] = request.amount
    for resource, by_operator in shares.items():
        spec = specs.get(resource)
        if spec is None or spec.state != _OK or resource not in amounts:
            continue
        together = max if spec.shared else sum
        if together(by_operator.values()) > amounts[resource]:
            return reasons.operators_excess(spec, by_operator, amounts[resource])
    return None


def unchoosable(specs: Mapping[str, m.ResourceSpec], request: ResolvedRequest) -> str | None:
    """Why nothing can be chosen by a record's clauses any more, or None: the configuration may have changed."""
    for name, clauses in chosen(request).items():
        spec = specs.get(name)
        if spec is not None and name in request.amounts and (reason := _unchoosable(spec, clauses)) is not None:
            return reason
    return None


def differences(earlier: Allocation, message: Register) -> list[str]:
    """The fields in which a repeated registration differs from the first one of its incarnation.

    A lease that is left out means the default, and is no difference. Neither is "no lease" if the manager has set one
    because it cannot watch the owner. Nor is what a final record leaves out.
    """
    request = earlier.request
    left_out = earlier.state in FINAL_STATES and (sizes.items(message) > sizes.FINAL_ITEMS or sizes.is_long(message))
    plain = message
    if message.resources is not None:
        plain = structs.replace(message, resources=_without_clauses(message.resources))
    fields = [
        name
        for name in ("resources", "operators", "owner", "wait_s", "priority", "labels")
        if getattr(request, name) != getattr(plain, name)
        and not (left_out and name in ("resources", "operators", "labels"))
    ]
    if not left_out and "resources" not in fields and _chooses_otherwise(request, message):
        fields.append("resources")
    set_by_manager = earlier.unwatched is not UNSET and message.lease_s is None
    if message.lease_s is not UNSET and message.lease_s != request.lease_s and not set_by_manager:
        fields.append("lease_s")
    if not _are_same_survivors(request.survivors, message.survivors):
        fields.append("survivors")
    if request.heartbeats is False and message.heartbeats is True:  # earlier versions do not know it
        fields.append("heartbeats")
    return fields


def _chooses_otherwise(earlier: ResolvedRequest, message: Register) -> bool:
    """Whether a repeated registration says other clauses than the record has. What it does not say is no difference."""
    choices = chosen(earlier)
    for name, request in (message.resources or m.NO_ITEMS).items():
        asked, before = clauses_of(request.where, request.same), choices.get(name, m.NO_CLAUSES)
        if request.where not in (UNSET, None) and asked.where != before.where:
            return True
        if request.same not in (UNSET, None) and asked.same != before.same:
            return True
    return False


def _are_same_survivors(earlier: Survivors | UnsetType, message: Survivors | UnsetType | None) -> bool:
    """Whether a registration repeats its record's survivors, as far as the record's version knew them."""
    if earlier and message and earlier.user_ns is UNSET:
        message = structs.replace(message, user_ns=UNSET)
    return earlier is UNSET or earlier == message
