"""Each operator has its part of the worker's grant: devices of its own, or a view of shared ones."""

from __future__ import annotations

from collections.abc import Iterator

from outfitter_verify import wire
from outfitter_verify.wire import Allocation


def faults(record: Allocation) -> Iterator[str]:
    """The faults in the operators' shares of a grant, as text."""
    shared = record.body.get("shared") or ()
    devices = wire.devices(record.body)
    owners: dict[tuple[str, str], str] = {}
    for name, operator in record.operators.items():
        for resource, amount in operator.named.items():
            own = operator.own.get(resource, [])
            if resource in shared:
                if resource not in operator.sees:
                    yield f"operator {name} of {record.key} named {resource}, but does not see it"
            elif len(own) != amount:
                yield f"operator {name} of {record.key} named {amount} {resource}, but has {len(own)}"
            for device in own:
                if device not in devices.get(resource, ()):
                    yield f"operator {name} of {record.key} has {device}, which its worker does not have"
                elif (other := owners.setdefault((resource, device), name)) != name:
                    yield f"operator {name} of {record.key} has {device}, which belongs to operator {other}"
