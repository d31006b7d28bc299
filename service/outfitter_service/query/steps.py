"""The steps in history: which devices they are about."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from outfitter_proto.records import Allocation, Note, Refresh, Transition


def device_names(step: Transition | Refresh) -> set[str]:
    """All names of the devices in a step's record; for a refresh, of the changed devices."""
    if not isinstance(step, Transition):
        resources = step.changed.get("resources", {})
        return {name for infos in resources.values() for info in infos for name in (info.get("id"), info.get("uuid"))}
    record = step.record
    if not isinstance(record, Allocation):
        return set()
    names: set[str] = set()
    for infos in record.resources.values():
        for info in infos:
            names |= {info[key] for key in ("id", "uuid") if key in info}
            if record.aliases is not UNSET:
                names.update(record.aliases.get(info.get("id", ""), ()))
    return names


def labels_of(step: Transition | Refresh | Note) -> Mapping[str, str]:
    """The labels of the worker in a step's record; none if the step has no whole record."""
    record = step.record if isinstance(step, Transition) else None
    return record.request.labels if isinstance(record, Allocation) else {}
