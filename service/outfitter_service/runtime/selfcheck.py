"""The self-check of exclusivity: who holds what, kept from committed records by means of its own.

It shares nothing with the indexes that decisions are made by, so that a defect there is seen here. It only looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from outfitter_proto.records import HOLDING_STATES, Allocation


class Violation(NamedTuple):
    """A device that `key` was given to itself while `other` has it to itself."""

    device: str
    key: str
    other: str


class Holders:
    """The holder of each exclusive device, by host and what was committed."""

    def __init__(self) -> None:
        self._holder: dict[tuple[str, str], str] = {}

    def replay(self, records: Iterable[Allocation]) -> list[Violation]:
        """Begin anew with all records of a ledger."""
        self._holder.clear()
        return self.take({record.key: record for record in records}, before={})

    def take(self, changed: Mapping[str, Allocation | None], *, before: Mapping[str, Allocation]) -> list[Violation]:
        """Take in one commit's allocations by key (None: deleted), what lets go first, as the ledger has them.
        `before` are those of them that there were already, as they were."""
        for key, record in before.items():
            for device in _exclusive(record):
                if self._holder.get(device) == key:
                    del self._holder[device]
        found: list[Violation] = []
        for key, taking in changed.items():
            if taking is not None:
                for device in _exclusive(taking):
                    other = self._holder.setdefault(device, key)
                    if other != key:
                        found.append(Violation(device[1], key, other))
        return found


def _exclusive(record: Allocation) -> list[tuple[str, str]]:
    """The devices that a live record has to itself: host and id."""
    if record.state not in HOLDING_STATES:
        return []
    host, shared = record.host, record.shared
    return [
        (host, info["id"]) for resource, infos in record.resources.items() if resource not in shared for info in infos
    ]
