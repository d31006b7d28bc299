"""Each operator has its part of the worker's grant: devices of its own, or a view of shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from outfitter_verify import wire
from outfitter_verify.wire import Allocation


def faults(record: Allocation) -> Iterator[str]:
    """The faults in the operators' shares of a grant, as text. A worker that has several replicas of a device has it
    several times, and so may its operators together."""
    shared = record.body.get("shared") or ()
    devices = wire.devices(record.body)
    owners: dict[tuple[str, str], list[str]] = {}
    for name, operator in record.operators.items():
        for resource, amount in operator.named.items():
            own = operator.own.get(resource, [])
            if resource in shared:
                if resource not in operator.sees:
                    yield f"operator {name} of {record.key} named {resource}, but does not see it"
            elif len(own) != amount:
                yield f"operator {name} of {record.key} named {amount} {resource}, but has {len(own)}"
            for device in own:
                had = owners.setdefault((resource, device), [])
                had.append(name)
                count = devices.get(resource, []).count(device)
                if not count:
                    yield f"operator {name} of {record.key} has {device}, which its worker does not have"
                elif len(had) > count:
                    yield f"operator {name} of {record.key} has {device}, which belongs to operator {had[0]}"
