"""A member's partitions, and waiting for a change: the part of a membership that is the same on every bus."""

from __future__ import annotations

import anyio

from outfitter_proto.bus.port import BusError


class Ownership:
    """The adapter sets it without waiting. One caller awaits changes (see `Membership.changed`)."""

    def __init__(self) -> None:
        self.partitions: frozenset[int] = frozenset()
        self.error: BusError | None = None
        self._told: frozenset[int] = frozenset()
        self._expelled = False
        self._news = anyio.Event()

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
            now = frozenset[int]() if expelled else self.partitions
            if now != self._told:
                self._told = now
                return now
            if not expelled:
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()
