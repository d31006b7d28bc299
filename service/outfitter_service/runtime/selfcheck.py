"""The self-check of exclusivity: who holds what, kept from committed records by means of its own.

It shares nothing with the indexes that decisions are made by, so that a defect there is seen here. It only looks.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self._devices: dict[str, list[tuple[str, str]]] = {}

    def replay(self, records: Iterable[Allocation]) -> list[Violation]:
        """Begin anew with all records of a ledger."""
        self._holder.clear()
        self._devices.clear()
        return self.take({record.key: record for record in records})

    def take(self, changed: dict[str, Allocation | None]) -> list[Violation]:
        """Take in one commit's allocations by key (None: deleted), what lets go first, as the ledger has them."""
        taking: list[tuple[str, Allocation]] = []
        for key, record in changed.items():
            for device in self._devices.pop(key, ()):
                if self._holder.get(device) == key:
                    del self._holder[device]
            if record is not None and record.state in HOLDING_STATES:
                taking.append((key, record))
        found: list[Violation] = []
        for key, record in taking:
            devices = self._devices[key] = [
                (record.host, info["id"])
                for resource, infos in record.resources.items()
                if resource not in record.shared
                for info in infos
            ]
            for device in devices:
                other = self._holder.setdefault(device, key)
                if other != key:
                    found.append(Violation(device[1], key, other))
        return found
