"""What a registration comes to: amounts by resource, resources that stay without infos, or why it fails at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from msgspec import UNSET, Struct

from outfitter_proto.records import Allocation, ReasonCode, Register, ResolvedRequest, ResourceRequest, Unavailable
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.decision import Rules

_OK = m.SpecState.OK


class Resolved(Struct, gc=False):
    """`problem` is why the request can never be met: a code and a reason."""

    request: ResolvedRequest
    unavailable: dict[str, Unavailable]
    problem: tuple[ReasonCode, str] | None


def resolve(rules: Rules, message: Register) -> Resolved:
    """Resolve a registration against the configured resources (Flink's rule where it names none)."""
    specs, asked = rules.specs, message.resources
    unavailable: dict[str, Unavailable] = {}
    problem = None
    if asked is None:
        configured = {name: spec.amount for name, spec in specs.items()}
        amounts, unavailable, problem = _in_effect(specs, configured, explicit=False)
    else:
        for name in asked:
            spec = specs.get(name)
            if spec is None or spec.state != _OK:
                wanted = {name: one.amount for name, one in asked.items()}
                amounts, unavailable, problem = _in_effect(specs, wanted, explicit=True)
                break
        else:
            amounts, asked = _alike(*asked.items())
    if message.operators:
        problem = problem or _operators_problem(message, amounts, unavailable, specs)
    request = ResolvedRequest(
        amounts=amounts,
        resources=asked,
        operators=message.operators,
        owner=message.owner,
        lease_s=rules.lease_s if message.lease_s is UNSET else message.lease_s,
        wait_s=message.wait_s,
        priority=message.priority,
        labels=message.labels,
    )
    return Resolved(request, unavailable or m.NO_ITEMS, problem)


def _in_effect(
    specs: Mapping[str, m.ResourceSpec], wanted: Mapping[str, int | None], *, explicit: bool
) -> tuple[dict[str, int], dict[str, Unavailable], tuple[ReasonCode, str] | None]:
    """What is in effect of that which is wanted, what stays without infos, and why the rest fails the worker."""
    amounts: dict[str, int] = {}
    unavailable: dict[str, Unavailable] = {}
    problem: tuple[ReasonCode, str] | None = None
    for name, amount in wanted.items():
        spec = specs.get(name)
        if spec is None:
            problem = problem or (ReasonCode.UNKNOWN_RESOURCE, reasons.unknown_resource(name, specs))
        elif amount is not None and spec.state == _OK:
            amounts[name] = amount
        else:
            found = _not_in_effect(spec, unavailable, explicit=explicit)
            problem = problem or found
    return amounts, unavailable, problem


@lru_cache(maxsize=1024)
def _alike(*wanted: tuple[str, ResourceRequest]) -> tuple[dict[str, int], dict[str, ResourceRequest]]:
    """What workers have in common that want the same: a ledger has many of them."""
    return {name: asked.amount for name, asked in wanted}, dict(wanted)


def _not_in_effect(
    spec: m.ResourceSpec, unavailable: dict[str, Unavailable], *, explicit: bool
) -> tuple[ReasonCode, str] | None:
    """A resource that is not in effect fails the worker that names it, and, where its setting is wrong, the one
    that gets it by configuration, too; unless its failures mean no infos."""
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
    """Operators may ask for no more than their worker does, and for nothing else."""
    for operator, wanted in (message.operators or {}).items():
        for resource in wanted:
            spec = specs.get(resource)
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
    """What operators ask for beyond what their worker does, in words; None: nothing.

    Every operator sees a shared device, and an exclusive one is one operator's. So the answer may change when a manager
    starts with another configuration. Resources that are not in effect now have a problem of their own.
    """
    shares: dict[str, dict[str, int]] = {}
    for operator, wanted in (operators or m.NO_ITEMS).items():
        for resource, asked in wanted.items():
            shares.setdefault(resource, {})[operator] = asked.amount
    for resource, by_operator in shares.items():
        spec = specs.get(resource)
        if spec is None or spec.state != _OK or resource not in amounts:
            continue
        together = max if spec.shared else sum
        if together(by_operator.values()) > amounts[resource]:
            return reasons.operators_excess(spec, by_operator, amounts[resource])
    return None


def differences(known: Allocation, message: Register) -> list[str]:
    """In what a repeated registration asks for something else than the first one of its incarnation.

    A lease left out is the default, whatever that is by now: never a difference. Nor is none, where the manager has
    given one because nobody watches the owner.
    """
    request = known.request
    different = [
        name
        for name in ("resources", "operators", "owner", "wait_s", "priority", "labels")
        if getattr(request, name) != getattr(message, name)
    ]
    given = known.unwatched is not UNSET and message.lease_s is None
    if message.lease_s is not UNSET and message.lease_s != request.lease_s and not given:
        different.append("lease_s")
    return different
