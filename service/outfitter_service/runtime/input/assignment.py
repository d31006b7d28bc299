"""The assignment of a processor: a partition, and the hosts that it serves there."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from outfitter_proto.bus import Bus, Reader
from outfitter_proto.names import Topics
from outfitter_proto.records import ManagerIdentity
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.scope import Scope


class Assignment(Struct, frozen=True, kw_only=True):
    """One `partition` of the `topics`, the writer `identity` for it, and the hosts to serve (`scope`). `partitions`:
    the number of partitions by which the scope's hosts belong to this one; None: the number at the first check.
    `since`: when this manager started."""

    bus: Bus
    topics: Topics
    partition: int
    partitions: int | None = None
    identity: Identity
    scope: Scope
    since: datetime

    def manager(self, stopped_at: datetime | None = None) -> ManagerIdentity:
        """This manager, as host records name it. `stopped_at`: since when it manages the host no more, or None."""
        return self.identity.manager(self.since, stopped_at)

    async def open_input(self, start: int) -> Reader:
        """Read the partition's registrations from `start` on.

        Raises:
            BusError: the bus did not answer.
        """
        return await self.bus.open_reader(self.topics.registrations, self.partition, start=start, committed=False)

    async def input_bounds(self) -> tuple[int, int]:
        """The first offset of the partition's registrations, and the one after the last.

        Raises:
            BusError: the bus did not answer.
        """
        return await self.bus.offsets(self.topics.registrations, self.partition)
