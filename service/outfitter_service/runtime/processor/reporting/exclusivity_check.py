"""The self-check of exclusivity: an index of its own, built from committed records, of who holds which device.

It uses none of the indexes that decisions use: so it notices their defects. It gets each commit's records, and the
records that these replace. It only checks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation


class ExclusivityViolation(NamedTuple):
    """A `device` that `key` was granted exclusively while `other` holds it exclusively."""

    device: str
    key: AllocationKey
    other: AllocationKey


class Holders:
    """The holder of each exclusive device, by host, as committed."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, AllocationKey]] = {}

    def clear(self) -> None:
        """Drop all holders."""
        self._holders.clear()

    def held(self, host: str) -> Collection[str]:
        """The names of the devices of `host` that somebody holds exclusively."""
        return self._holders.get(host, {}).keys()

    def update(
        self, changed: Mapping[AllocationKey, Allocation | None], *, before: Mapping[AllocationKey, Allocation]
    ) -> list[ExclusivityViolation]:
        """Add one commit's allocations by key (None: deleted), releases first, as in the ledger. `before`: the records
        that they replace. Returns the violations."""
        for key, old in before.items():
            holder = self._holders.get(old.host, {})
            for device in _exclusive(old):
                if holder.get(device) == key:
                    del holder[device]
            if not holder:
                self._holders.pop(old.host, None)
        violations: list[ExclusivityViolation] = []
        holders = self._holders
        for key, record in changed.items():
            if record is None or record.state not in HOLDING_STATES:
                continue
            holder = holders.setdefault(record.host, {})
            for device in _exclusive(record):
                other = holder.setdefault(device, key)
                if other != key:
                    violations.append(ExclusivityViolation(device, key, other))
        return violations


def _exclusive(record: Allocation) -> list[str]:
    """The exclusive devices of a record, under every name that it knows."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each record
    if record.aliases is UNSET:
        return ids
    return [name for device_id in ids for name in (device_id, *record.aliases.get(device_id, ()))]
