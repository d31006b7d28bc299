"""The meaning of an allocation record: its status in one of four words, and the infos of each operator.

Pure functions of one record.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable

from outfitter.errors import (
    AllocationEndedError,
    AllocationError,
    AllocationNotUsableError,
    UnknownResourceError,
    VariableNotAllowedError,
    failure,
)
from outfitter.infos import ExternalResourceInfos
from outfitter_drivers.api import ExternalResourceInfo
from outfitter_proto import environment as variables
from outfitter_proto.records import Allocation, AllocationState, ReasonCode


class AllocationStatus(enum.Enum):
    """The meaning of a record for its worker: it waits, may use the devices, may no longer use them, or gets none."""

    WAITING = "waiting"
    YOURS = "yours"
    OVER = "over"
    FAILED = "failed"


def status_of(record: Allocation) -> AllocationStatus:
    """The meaning of a record for its worker. A state of a later version counts as waiting: neither usable nor final.

    A grant superseded by a newer incarnation is over for its worker. No heartbeat renews it, and the manager holds its
    devices only until this worker is known to be dead.
    """
    match record.state:
        case AllocationState.ALLOCATED:
            return AllocationStatus.OVER if record.reason_code == ReasonCode.SUPERSEDED else AllocationStatus.YOURS
        case AllocationState.ENDED:
            return AllocationStatus.OVER
        case AllocationState.RELEASING:
            return AllocationStatus.FAILED if record.outcome == AllocationState.FAILED else AllocationStatus.OVER
        case AllocationState.FAILED:
            return AllocationStatus.FAILED
        case _:
            return AllocationStatus.WAITING


def refusal(record: Allocation) -> AllocationError | None:
    """Why the record's devices may not be used now, or None when they may."""
    why = f": {record.reason}" if record.reason else ""
    match status_of(record):
        case AllocationStatus.YOURS:
            return None
        case AllocationStatus.FAILED:
            return failure(record.reason_code, f"allocation {record.key} failed{why}", record)
        case AllocationStatus.OVER:
            return AllocationEndedError(f"allocation {record.key} is over{why}", code=record.reason_code, record=record)
        case AllocationStatus.WAITING:
            return AllocationNotUsableError(
                f"allocation {record.key} is {record.state!r}, not 'allocated'{why}",
                code=record.reason_code,
                record=record,
            )


def resource_names(record: Allocation, operator: str | None) -> list[str]:
    """The resources of `operator`, also those without infos, in the record's order."""
    share = record.operators.get(operator) if operator is not None else None
    if share is None:
        return list(dict.fromkeys((*record.resources, *record.unavailable, *record.request.amounts)))
    requested = (record.request.operators or {}).get(operator or "", {})
    return list(dict.fromkeys((*share.resources, *(share.shared or ()), *requested)))


def infos(record: Allocation, name: str, operator: str | None) -> ExternalResourceInfos:
    """The infos of resource `name` for `operator`.

    If the registration names operators, each of them sees its own devices, and all others (None too) see the rest.
    Otherwise every operator sees all devices. Shared resources are not divided: each of their operators sees all
    devices.

    Raises:
        UnknownResourceError: the operator does not have this resource; the message lists its resources.
        NoDriverError, ResourceDisabledError, AllocationFailedError: granted without infos, with the reason.
    """
    names = resource_names(record, operator)
    if name not in names:
        whose = f"operator {operator!r}" if operator in record.operators else f"worker {record.worker!r}"
        raise UnknownResourceError(
            f"{whose} has no external resource {name!r}; it has: {', '.join(names) or 'none'}", record=record
        )
    missing = record.unavailable.get(name)
    if missing is not None:
        raise failure(missing.code, f"external resource {name!r} has no infos: {missing.reason}", record)
    devices = record.resources.get(name, [])
    if not record.operators:
        return _infos(devices)
    share = record.operators.get(operator) if operator is not None else None
    if name in record.shared:
        return _infos(devices)
    if share is not None:
        if name not in share.resources:
            return _infos(devices)  # requested, but not divided: a fake's resource without a share
        own = set(share.resources.get(name, ()))
        return _infos(device for device in devices if device.get("id") in own)
    assigned = {id_ for other in record.operators.values() for id_ in other.resources.get(name, ())}
    return _infos(device for device in devices if device.get("id") not in assigned)


def environment(record: Allocation, operator: str | None, allowed: Collection[str] = ()) -> dict[str, str]:
    """The environment variables of a named operator's share, else of the whole worker, without those in `left_out`.
    `allowed`: the names that this worker allows besides those that select devices.

    Raises:
        VariableNotAllowedError: there are others. None is left out in silence: it may be the one that hides devices.
    """
    kept = variables.divide(_recorded_environment(record, operator))[0]
    if names := variables.unknown(kept, allowed):
        raise VariableNotAllowedError(
            f"allocation {record.key} sets {', '.join(names)}, and Outfitter does not know what that selects. If this "
            f"worker is to take it from a record, {variables.how_to_allow(names, allowed)}",
            record=record,
        )
    return kept


def _recorded_environment(record: Allocation, operator: str | None) -> dict[str, str]:
    """A record's variables for an operator.

    If its own devices and shared ones set the same variable, its value joins theirs with commas, each once.
    """
    share = record.operators.get(operator) if operator is not None else None
    if share is None:
        return record.env
    joined = dict(share.env)
    for name in share.shared or ():
        common = record.common.get(name) if record.common else None
        for variable, value in (common.env if common is not None else {}).items():
            own = joined.get(variable)
            joined[variable] = value if own is None else ",".join(dict.fromkeys(f"{own},{value}".split(",")))
    return joined


def left_out(record: Allocation) -> dict[str, str]:
    """The record's variables, of the worker and all operators, that no record may set, each with the reason."""
    shares = (*record.operators.values(), *(record.common or {}).values())
    reasons: dict[str, str] = {}
    for env in (record.env, *(share.env for share in shares)):
        reasons |= variables.divide(env)[1]
    return reasons


def _infos(devices: Iterable[dict[str, str]]) -> ExternalResourceInfos:
    return ExternalResourceInfos(map(ExternalResourceInfo, devices))
