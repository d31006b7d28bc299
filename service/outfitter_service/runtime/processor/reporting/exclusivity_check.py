"""The self-check of exclusivity: an index of its own, built from committed records, of who holds which device.

It uses none of the indexes that decisions use: so it notices their defects. It gets each commit's records, and the
records that these replace. It only checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from msgspec import UNSET

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import HOLDING_STATES, Allocation, PoolUse


class ExclusivityViolation(NamedTuple):
    """A `device` that `key` was granted, or a part or replica of it, while `other` has too much of it for that."""

    device: str
    key: AllocationKey
    other: AllocationKey


class Holders:
    """The holder of each exclusive device, by host, as committed; and what records use of pools besides."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, AllocationKey]] = {}
        self._uses: dict[str, dict[str, dict[AllocationKey, PoolUse]]] = {}
        """Parts and replicas, by the pools' names."""

    def clear(self) -> None:
        """Drop all holders."""
        self._holders.clear()
        self._uses.clear()

    def held(self, host: str) -> Collection[str]:
        """The names of the devices of `host` that somebody holds exclusively, and not as a replica."""
        return self._holders.get(host, {}).keys()

    def used(self, host: str) -> Mapping[str, Mapping[AllocationKey, PoolUse]]:
        """What records use of devices of which they have parts or replicas, by these devices' names."""
        return self._uses.get(host, {})

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
            if old.uses:
                self._drop_uses(key, old)
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
            if record.uses or record.host in self._uses:
                violations += self._add_uses(key, record, holder)
        return violations

    def _drop_uses(self, key: AllocationKey, record: Allocation) -> None:
        of_host = self._uses.get(record.host, {})
        for name in _uses(record):
            of_device = of_host.get(name, {})
            of_device.pop(key, None)
            if not of_device:
                of_host.pop(name, None)
        if not of_host:
            self._uses.pop(record.host, None)

    def _add_uses(
        self, key: AllocationKey, record: Allocation, holder: Mapping[str, AllocationKey]
    ) -> Iterator[ExclusivityViolation]:
        """Add what a record uses of pools, and compare it with the holders of whole devices, both ways."""
        of_host = self._uses.setdefault(record.host, {})
        for device in _exclusive(record):
            for other in of_host.get(device, {}):
                if other != key:
                    yield ExclusivityViolation(device, key, other)
        for name, use in _uses(record).items():
            of_device = of_host.setdefault(name, {})
            others = {other: used for other, used in of_device.items() if other != key}
            whole = holder.get(name, key)
            if whole != key:
                yield ExclusivityViolation(name, key, whole)
            elif sum([used.amount for used in others.values()]) + use.amount > use.total:
                yield ExclusivityViolation(name, key, next(iter(others)))
            else:
                disagreeing = [other for other, used in others.items() if use.word and used.word not in {"", use.word}]
                if disagreeing:
                    yield ExclusivityViolation(name, key, disagreeing[0])
            of_device[key] = use
        if not of_host:
            del self._uses[record.host]


def _uses(record: Allocation) -> dict[str, PoolUse]:
    """What a record says that it uses of pools, of each device under every name that the record has for it."""
    uses = dict(record.uses or {})
    for device_id, names in (record.aliases or {}).items():
        own = [uses[name] for name in (device_id, *names) if name in uses]
        uses |= dict.fromkeys((device_id, *names), own[0]) if own else {}
    return uses


def _exclusive(record: Allocation) -> list[str]:
    """The exclusive devices of a record, under every name that it knows, but for those of which it has replicas."""
    shared = record.shared
    ids = []
    for resource, infos in record.resources.items():
        if resource not in shared:
            for info in infos:
                ids.append(info["id"])  # noqa: PERF401 - a comprehension is a call, and this is done for each record
    if record.aliases is not UNSET:
        ids = [name for device_id in ids for name in (device_id, *record.aliases.get(device_id, ()))]
    if record.uses:
        replicas = {name for name, use in _uses(record).items() if "replicas" in use.word}
        ids = [name for name in ids if name not in replicas]
    return ids
