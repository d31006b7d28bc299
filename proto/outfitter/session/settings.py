"""A context's settings, from its arguments and the environment, checked before anything connects.

An argument wins over `OUTFITTER_BUS`, `OUTFITTER_CLUSTER`, `OUTFITTER_HOST`, `OUTFITTER_WORKER` and
`OUTFITTER_OPERATOR`. `outfitter run` sets `OUTFITTER_INCARNATION` for the program that it starts. A context in that
program attaches to the allocation of `outfitter run`, unless its arguments say something else than the environment.
Then it is another worker, with a name of its own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from types import EllipsisType
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from outfitter.errors import InvalidRequestError
from outfitter.session import identity
from outfitter_proto import clauses, codec, names
from outfitter_proto import environment as variables
from outfitter_proto.bus import DEFAULT_BUS
from outfitter_proto.records import Owner, Register, ResourceRequest
from outfitter_proto.support.processes import process_owner, survivors_of

Wanted = int | Mapping[str, Any] | ResourceRequest
"""What is wanted of a resource: an amount, or `amount`, `where` and `same`."""
Amounts = Mapping[str, int]
Requests = Mapping[str, Wanted]


class SessionSettings(Struct, frozen=True, kw_only=True):
    """A context's settings."""

    bus: str
    """Its URL."""
    cluster: str
    registration: Register
    """What the worker publishes, or the allocation that it attaches to."""
    operator: str | None
    """Whose share the context shows. None: the whole worker's."""
    attach: bool
    """Publish nothing and follow the existing allocation."""
    allowed_variables: frozenset[str] = frozenset()
    """See `outfitter_proto.environment`."""


def resolve(
    *,
    resources: Requests | None,
    operators: Mapping[str, Amounts] | None,
    operator: str | None,
    bus: str | None,
    cluster: str | None,
    host: str | None,
    worker: str | None,
    lease: float | EllipsisType | None,
    wait: float | None,
    priority: int,
    labels: Mapping[str, str] | None,
    owner: bool | Owner,
    survivors: bool,
) -> SessionSettings:
    """Combine arguments and environment.

    Raises:
        InvalidNameError: the name of a host, worker, operator or cluster is not valid.
        InvalidRequestError: every manager would refuse the request; the message names the field.
    """
    environment = os.environ
    attach, incarnation = False, environment.get("OUTFITTER_INCARNATION")
    if incarnation:
        arguments = (("BUS", bus), ("CLUSTER", cluster), ("HOST", host), ("WORKER", worker))
        attach = all(value is None or value == environment.get(f"OUTFITTER_{name}") for name, value in arguments)
    # this process's own worker goes on: another context must not take its name, or it would end it
    named = environment.get("OUTFITTER_WORKER") if attach or not incarnation else None
    operator = operator or environment.get("OUTFITTER_OPERATOR") or None
    if operator is not None:
        names.check_name(operator, "operator")
    process = _owner(owner)
    if survivors and process is None:
        raise InvalidRequestError("survivors needs an owner: leave owner=False out", code="invalid-request")
    registration = Register(
        host=names.check_name(host or names.default_host(), "host"),
        worker=names.check_name(worker or named or identity.new_worker_name(), "worker"),
        incarnation=incarnation if attach and incarnation else identity.new_incarnation(),
        resources=None if resources is None else {name: _request(name, wanted) for name, wanted in resources.items()},
        operators=None if operators is None else {name: _amounts(amounts) for name, amounts in operators.items()},
        owner=process,
        lease_s=UNSET if isinstance(lease, EllipsisType) else lease,
        wait_s=wait,
        priority=priority,
        labels=dict(labels or {}),
        survivors=survivors_of(process) if survivors and process is not None else UNSET,
    )
    for name, seconds in (("lease", lease), ("wait", wait)):
        if isinstance(seconds, float) and not math.isfinite(seconds):  # in JSON it would be null, that is, for ever
            raise InvalidRequestError(f"{name} is {seconds}; write seconds, or None", code="invalid-request")
    try:
        codec.decode_registration(codec.encode(registration))
    except UnicodeEncodeError as error:
        problem = f"{error.object[:80]!a} has half of a character (a lone surrogate)"
        raise InvalidRequestError(
            f"no manager would take this registration: {problem}", code="invalid-request"
        ) from error
    except (codec.WireError, TypeError) as error:
        raise InvalidRequestError(f"no manager would take this {error}", code="invalid-request") from error
    return SessionSettings(
        bus=bus or environment.get("OUTFITTER_BUS") or DEFAULT_BUS,
        cluster=names.check_name(cluster or environment.get("OUTFITTER_CLUSTER") or names.DEFAULT_CLUSTER, "cluster"),
        registration=registration,
        operator=operator,
        attach=attach,
        allowed_variables=_allowed_variables(environment.get(variables.ALLOWING, "")),
    )


def _allowed_variables(text: str) -> frozenset[str]:
    try:
        return variables.allowed_by(text)
    except ValueError as error:
        raise InvalidRequestError(f"{variables.ALLOWING}: {error}", code="invalid-request") from error


def _amounts(amounts: Amounts) -> dict[str, ResourceRequest]:
    return {name: ResourceRequest(amount=amount) for name, amount in amounts.items()}


def _request(name: str, wanted: Wanted) -> ResourceRequest:
    """The request of a resource.

    Raises:
        InvalidRequestError: its clauses cannot be judged.
    """
    try:
        request = _converted(wanted)
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequestError(f"resources.{name}: {error}", code="invalid-request") from error
    if (problem := clauses.problem(clauses.clauses_of(request.where, request.same))) is not None:
        raise InvalidRequestError(f"resources.{name}: {problem}", code="invalid-request")
    return request


def _converted(wanted: Wanted) -> ResourceRequest:
    if isinstance(wanted, ResourceRequest):
        return wanted
    if not isinstance(wanted, Mapping):
        return ResourceRequest(amount=wanted)  # the codec checks it
    return msgspec.convert(dict(wanted), ResourceRequest)


def _owner(owner: bool | Owner) -> Owner | None:
    if isinstance(owner, Owner):
        return owner
    return process_owner() if owner else None
