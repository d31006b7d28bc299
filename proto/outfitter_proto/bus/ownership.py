"""A member's partitions, and waiting for a change: the part of a membership that is the same on every bus."""

from __future__ import annotations

from abc import abstractmethod

import anyio

from outfitter_proto.bus.port import BusError, Membership


class Ownership:
    """A member's partitions. The adapter sets them, and one caller awaits changes (see `Membership.changed`)."""

    def __init__(self) -> None:
        self.partitions: frozenset[int] = frozenset()
        self.error: BusError | None = None
        """Why the membership has ended, if an error ended it."""
        self._returned: frozenset[int] = frozenset()  # by the last `changed`
        self._expelled = False
        self._change = anyio.Event()

    def assign(self, partitions: frozenset[int]) -> None:
        """Set the member's partitions."""
        self.partitions = partitions
        self._wake()

    def expel(self) -> None:
        """Note that the group has expelled the member. Others may have had its partitions since."""
        self._expelled = True
        self.assign(frozenset())

    def fail(self, error: BusError) -> None:
        """End the membership with an error. The first error stays."""
        self.error = self.error or error
        self.assign(frozenset())

    async def changed(self) -> frozenset[int]:
        """See `Membership.changed`."""
        while True:
            if self.error is not None:
                raise self.error
            expelled, self._expelled = self._expelled, False
            current = frozenset[int]() if expelled else self.partitions
            if current != self._returned:
                self._returned = current
                return current
            if not expelled:
                await self._change.wait()

    def _wake(self) -> None:
        self._change.set()
        self._change = anyio.Event()


class OwnedMembership(Membership):
    """A membership with an `Ownership`, which the adapter writes."""

    def __init__(self) -> None:
        self._ownership = Ownership()

    @property
    def partitions(self) -> frozenset[int]:
        """See `Membership.partitions`."""
        return self._ownership.partitions

    async def changed(self) -> frozenset[int]:
        """See `Membership.changed`."""
        return await self._ownership.changed()

    async def confirmed(self, partition: int) -> bool:
        """See `Membership.confirmed`."""
        return await self._ask_group(partition) and partition in self.partitions

    @abstractmethod
    async def _ask_group(self, partition: int) -> bool:
        """Whether the group has just confirmed this member, and so its partitions. An adapter need not ask the group if
        `partition` is not among them. Bounded, raises nothing."""
