"""How to read an allocation record: the four words a reader needs, and the infos of each operator.

Plain functions over one record; nobody here waits or talks to a bus.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from outfitter.errors import (
    AllocationEndedError,
    AllocationError,
    AllocationNotUsableError,
    UnknownResourceError,
    failure,
)
from outfitter.infos import ExternalResourceInfos
from outfitter_drivers.api import ExternalResourceInfo
from outfitter_proto import environment as variables
from outfitter_proto.records import Allocation, AllocationState, ReasonCode


class AllocationStatus(enum.Enum):
    """Waiting, yours, over, failed."""

    WAITING = "waiting"
    YOURS = "yours"
    OVER = "over"
    FAILED = "failed"


def standing(record: Allocation) -> AllocationStatus:
    """What a record means for its worker. A state of a later version is neither usable nor final: waiting.

    A grant that a newer incarnation has superseded is only held until this worker is known to be dead, and no
    heartbeat renews it any more: for its worker it is over.
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
    match standing(record):
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
    """The resources that `operator` may ask for, those without infos included, in the record's order."""
    share = record.operators.get(operator) if operator is not None else None
    if share is None:
        return list(dict.fromkeys((*record.resources, *record.unavailable, *record.request.amounts)))
    asked = (record.request.operators or {}).get(operator or "", {})
    return list(dict.fromkeys((*share.resources, *(share.shared or ()), *asked)))


def infos(record: Allocation, name: str, operator: str | None) -> ExternalResourceInfos:
    """The infos of resource `name` for `operator`.

    A named operator that the registration knows sees its own devices; when the registration knows any, all
    others (`operator` None included) see what is left over. Devices of shared resources are not divided: whoever may
    ask for such a resource sees all of it. When the registration knows no operators, everybody sees everything.

    Raises:
        UnknownResourceError: nothing of that name is there for the operator; the message lists what is.
        NoDriverError, ResourceDisabledError, AllocationFailedError: granted without infos, and why.
    """
    known = resource_names(record, operator)
    if name not in known:
        whose = f"operator {operator!r}" if operator in record.operators else f"worker {record.worker!r}"
        raise UnknownResourceError(
            f"{whose} has no external resource {name!r}; it has: {', '.join(known) or 'none'}", record=record
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
            return _infos(devices)  # asked for, yet not dealt out: a fake's resource without a share
        mine = set(share.resources.get(name, ()))
        return _infos(device for device in devices if device.get("id") in mine)
    taken = {id_ for other in record.operators.values() for id_ in other.resources.get(name, ())}
    return _infos(device for device in devices if device.get("id") not in taken)


def environment(record: Allocation, operator: str | None) -> dict[str, str]:
    """The environment variables of a named operator's share, else of the whole worker, without those that no record
    may set (`left_out`)."""
    return variables.divide(_said_environment(record, operator))[0]


def _said_environment(record: Allocation, operator: str | None) -> dict[str, str]:
    """The variables that a record has for an operator. One of its own devices and of shared ones has the values of all
    of them, joined with commas, each once."""
    share = record.operators.get(operator) if operator is not None else None
    if share is None:
        return record.env
    joined = dict(share.env)
    for name in share.shared or ():
        common = record.common.get(name) if record.common else None
        for variable, value in (common.env if common is not None else {}).items():
            known = joined.get(variable)
            joined[variable] = value if known is None else ",".join(dict.fromkeys(f"{known},{value}".split(",")))
    return joined


def left_out(record: Allocation) -> dict[str, str]:
    """The variables of a record that are not applied, the worker's and all operators', each with the reason why."""
    shares = (*record.operators.values(), *(record.common or {}).values())
    found: dict[str, str] = {}
    for env in (record.env, *(share.env for share in shares)):
        found |= variables.divide(env)[1]
    return found


def _infos(devices: Iterable[dict[str, str]]) -> ExternalResourceInfos:
    return ExternalResourceInfos(map(ExternalResourceInfo, devices))
