"""A host-scope manager's part in sweeping messages for hosts without a manager.

A manager with the rights says in its signs of life that it sweeps (`Beat.sweeps`). Of the live ones in a partition's
`managers` records, the one with the lowest hash of its writer's name sweeps the partition, and the partitions before it
in which none lives. Where these records cannot be read, each manager sweeps all partitions. One writer sweeps a
partition at a time (partition_sweeper.py): whoever is fenced lets the other one sweep, at least for a minute. So two
that both believe to be the one harm nothing, and a sweeper of version 0.2 may be one of them.

This does not affect the manager's own host, and no error here ends the manager.
"""

from __future__ import annotations

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct

from outfitter_proto import rights
from outfitter_proto.bus import Bus, BusError, UnknownTopicError
from outfitter_proto.bus.port import BusAccessError
from outfitter_proto.bus.reading import read_to
from outfitter_proto.names import managers_topic, topics
from outfitter_proto.partitioning import murmur2, partition_of
from outfitter_proto.signs_of_life import MISSED, SignsOfLife
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper.partition_sweeper import GRACE_S, PartitionSweeper, SweepContext

log = structlog.get_logger("outfitter.sweeper")

LOOK_S = 20.0
"""Seconds between two looks at rights and signs, unless signs come more often."""


class PartitionSigns:
    """The signs of life in one partition of the managers' topic, as of the last `catch_up`."""

    def __init__(self, bus: Bus, topic: str, partition: int, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._partition = partition
        self._clock = clock
        self._position: int | None = None
        self._signs = self._none()

    def _none(self) -> SignsOfLife:
        return SignsOfLife(now_ms=lambda: self._clock.utc().timestamp() * 1000, monotonic=self._clock.monotonic)

    async def catch_up(self) -> None:
        """Read all signs that came since the last call.

        Raises:
            BusError: they cannot be read.
        """
        as_of = self._clock.monotonic()
        _, end = await self._bus.offsets(self._topic, self._partition)
        if self._position is not None and self._position > end:  # another topic of this name
            self._position, self._signs = None, self._none()
        if self._position != end:
            async with await self._bus.open_reader(
                self._topic, self._partition, start=self._position, committed=False
            ) as reader:
                async for messages in read_to(reader, end):
                    for message in messages:
                        self._signs.add(message)
                self._position = reader.position
        self._signs.has_read(self._partition, as_of)

    def sweepers(self, within_s: float) -> set[str]:
        """The writers whose managers sweep, by signs that are less than so many seconds old."""
        return set(self._signs.sweepers(self._partition, within_s))


class SweepingManager(Struct, frozen=True):
    """Takes part in sweeping while `run` runs."""

    bus: Bus
    partitions: int
    """How many partitions the topics have."""
    identity: Identity
    """The manager that sweeps."""
    instruments: Instruments
    beat_s: float | None = None
    """Seconds between two of its signs of life; None: it sends none, so it goes by nobody's."""
    grace_s: float = GRACE_S
    """Seconds that a message of a host without a manager waits for one."""
    _sweepers: dict[int, tuple[PartitionSweeper, anyio.CancelScope]] = {}
    _signs: dict[int, PartitionSigns] = {}
    _missing: list[str] = []
    """The rights that this manager lacks."""

    @property
    def sweeps(self) -> bool:
        """Whether others may leave the sweeping to this manager."""
        return not self._missing

    async def run(self) -> None:
        """Sweep what is this manager's to sweep, until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    try:
                        due = await self._due()
                    except BusError:
                        pass  # whoever sweeps says that the bus is away
                    else:
                        self._assign(due, tasks)
                    await anyio.sleep(min(LOOK_S, self.beat_s or LOOK_S))
        finally:
            self._sweepers.clear()
            self.instruments.metrics.swept_partitions.set(0)

    async def _due(self) -> set[int]:
        """The partitions that are this manager's to sweep now.

        Raises:
            BusError: the bus does not answer.
        """
        missing = await self.bus.missing_rights(rights.of_sweeper(self.identity.cluster))
        if missing and missing != self._missing:
            log.warning("this manager takes no part in sweeping", missing=missing)
        self._missing[:] = missing
        if not self.sweeps:
            return set()
        try:
            return await self._by_signs() if self.beat_s is not None else set(range(self.partitions))
        except (UnknownTopicError, BusAccessError):
            return set(range(self.partitions))

    async def _by_signs(self) -> set[int]:
        """The partitions that are this manager's to sweep by what managers say of themselves."""
        writer = self.identity.writer
        own = partition_of(self.identity.host or "", self.partitions)
        others = {each for each in await self._sweepers_of(own) if each != writer}
        if any(_rank(other) < _rank(writer) for other in others):
            return set()
        due = {own}
        for step in range(1, self.partitions):
            partition = (own - step) % self.partitions
            if await self._sweepers_of(partition):
                break
            due.add(partition)
        return due

    async def _sweepers_of(self, partition: int) -> set[str]:
        """The writers that live in a partition and sweep: their signs are less than three intervals old."""
        if partition not in self._signs:
            topic = managers_topic(self.identity.cluster)
            self._signs[partition] = PartitionSigns(self.bus, topic, partition, self.instruments.clock)
        signs = self._signs[partition]
        await signs.catch_up()
        return signs.sweepers(MISSED * (self.beat_s or LOOK_S))

    def _assign(self, partitions: set[int], tasks: TaskGroup) -> None:
        for lost in self._sweepers.keys() - partitions:
            self._sweepers.pop(lost)[1].cancel()
        for new in partitions - self._sweepers.keys():
            scope = anyio.CancelScope()
            sweeper = PartitionSweeper(self._context(new), served=self._hosts)
            self._sweepers[new] = sweeper, scope
            tasks.start_soon(self._sweep, sweeper, scope)
        swept = sum(not sweeper.cannot_sweep for sweeper, _ in self._sweepers.values())
        self.instruments.metrics.swept_partitions.set(swept)

    async def _sweep(self, sweeper: PartitionSweeper, scope: anyio.CancelScope) -> None:
        with scope:
            await sweeper.run()

    def _context(self, partition: int) -> SweepContext:
        return SweepContext(
            bus=self.bus,
            topics=topics(self.identity.cluster),
            partition=partition,
            partitions=self.partitions,
            identity=self.identity,
            instruments=self.instruments,
            grace_s=self.grace_s,
        )

    def _hosts(self) -> list[str]:
        """The hosts with a manager in the partitions that this manager sweeps."""
        return [
            host
            for sweeper, _ in self._sweepers.values()
            if sweeper.host_registry is not None
            for host in sweeper.host_registry.hosts
        ]


def _rank(writer: str) -> tuple[int, str]:
    return murmur2(writer.encode()), writer
