"""The holders of one host: its live records, which hold devices."""

from __future__ import annotations

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation
from outfitter_service.core.state.sizes import items, shared_devices


def has_exclusive(record: Allocation) -> bool:
    """Whether a record holds a device exclusively."""
    shared = record.shared
    return any(infos and resource not in shared for resource, infos in record.resources.items())


class HolderIndex:
    """The holders of one host. It is a function of the live records."""

    def __init__(self) -> None:
        self.live: dict[AllocationKey, Allocation] = {}
        """All of them, by key."""
        self.without_exclusive = 0
        """How many hold no exclusive device."""
        self.items = 0
        """Those of their requests, and their shared devices; see `sizes.items` and `sizes.shared_devices`."""

    def change(self, key: AllocationKey, before: Allocation | None, after: Allocation | None) -> None:
        """Replace a live record by another one. None: there is none."""
        if before is not None:
            del self.live[key]
            self._count(before, -1)
        if after is not None:
            self.live[key] = after
            self._count(after, 1)

    def _count(self, record: Allocation, count: int) -> None:
        self.items += count * (items(record.request) + shared_devices(record))
        if not has_exclusive(record):
            self.without_exclusive += count
