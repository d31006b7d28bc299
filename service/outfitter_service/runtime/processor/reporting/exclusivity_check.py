"""The self-check of exclusivity: who holds what, kept from committed records by means of its own.

It keeps no index that decisions are made by, so that a defect there is seen here: it is told each commit's records, and
what was under their keys before. It only looks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation


class Violation(NamedTuple):
    """A `device` that `key` was given to itself while `other` has it to itself."""

    device: str
    key: AllocationKey
    other: AllocationKey


class Holders:
    """The holder of each exclusive device, by host and what was committed."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, AllocationKey]] = {}

    def clear(self) -> None:
        """Nobody holds anything."""
        self._holders.clear()

    def held(self, host: str) -> Collection[str]:
        """The names of the devices of `host` that somebody has alone."""
        return self._holders.get(host, {}).keys()

    def take(
        self, changed: Mapping[AllocationKey, Allocation | None], *, before: Mapping[AllocationKey, Allocation]
    ) -> list[Violation]:
        """Take in one commit's allocations by key (None: deleted), what lets go first, as the ledger has them.
        `before` are those of them that there were already, as they were."""
        for key, left in before.items():
            holder = self._holders.get(left.host, {})
            for device in _exclusive(left):
                if holder.get(device) == key:
                    del holder[device]
            if not holder:
                self._holders.pop(left.host, None)
        found: list[Violation] = []
        holders = self._holders
        for key, record in changed.items():
            if record is None or record.state not in HOLDING_STATES:
                continue
            holder = holders.setdefault(record.host, {})
            for device in _exclusive(record):
                other = holder.setdefault(device, key)
                if other != key:
                    found.append(Violation(device, key, other))
        return found


def _exclusive(record: Allocation) -> list[str]:
    """The devices that a record has to itself, or had, under every name that it knows them by."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each record
    if record.aliases is UNSET:
        return ids
    return [name for device_id in ids for name in (device_id, *record.aliases.get(device_id, ()))]
