"""What a member knows of its partitions, and how its holder hears of a change: the half of a membership that is the
same on every bus. It talks to nobody.
"""

from __future__ import annotations

import anyio

from outfitter_proto.bus.port import BusError


class Ownership:
    """Set by the adapter, in plain calls that never wait; awaited by one holder (see `Membership.changed`)."""

    def __init__(self) -> None:
        self.partitions: frozenset[int] = frozenset()
        self.error: BusError | None = None
        self._told: frozenset[int] = frozenset()
        self._expelled = False
        self._news = anyio.Event()

    def assign(self, partitions: frozenset[int]) -> None:
        """These are the member's now."""
        self.partitions = partitions
        self._wake()

    def expel(self) -> None:
        """The member was taken for dead: whatever it had, others may have had since."""
        self._expelled = True
        self.assign(frozenset())

    def fail(self, error: BusError) -> None:
        """The member cannot go on. The first reason stays."""
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
