"""Worlds whose registrations are deleted by retention, read or not, and what nobody can be blamed for then."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import anyio

from outfitter_proto.keys import checkpoint_key, host_writer, partition_writer, sweeper_writer
from outfitter_proto.names import Topics
from simulation.model.broker import Broker
from simulation.model.log import Log, Record

LEFT = (0, 0, 1, 5, 20)
"""How many of the newest offsets stay at least."""
EVERY_S = 6.0


class Retention:
    """Deletes the oldest registrations now and then. `lost` are those (by partition and offset) that were deleted
    before whoever answers for them had committed past them; `missed` are those of a manager that had begun."""

    def __init__(self, broker: Broker, topics: Topics, dice: random.Random, *, many: bool) -> None:
        """`many`: a manager serves whole partitions."""
        self._broker = broker
        self._topics = topics
        self._dice = dice
        self._many = many
        self.lost: set[tuple[int, int]] = set()
        self.missed: dict[tuple[int, int], Record] = {}

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Delete until the world is at rest."""
        while True:
            await anyio.sleep(self._dice.expovariate(1 / EVERY_S))
            if is_over():
                return
            partition = self._dice.randrange(self._broker.partitions)
            self.delete(partition, left=self._dice.choice(LEFT))

    def delete(self, partition: int, *, left: int) -> None:
        """Delete all but the newest registrations of a partition, whoever has read them."""
        log = self._broker.logs[self._topics.registrations, partition]
        read = dict(self._checkpoints(partition))
        for record in log.records:
            if record.offset >= log.end - left:
                break
            own = read.get(self.writer(record, partition))
            is_swept = own is None or record.offset < own.get("begin", 0)
            reader = read.get(sweeper_writer(partition)) if is_swept else own
            if reader is None or not _is_read(record, reader):
                self.lost.add((partition, record.offset))
                if not is_swept:
                    self.missed[partition, record.offset] = record
        log.expire(log.end - left)

    def writer(self, record: Record, partition: int) -> str:
        """Who answers for a registration."""
        return partition_writer(partition) if self._many else host_writer((record.key or b"").decode())

    def _checkpoints(self, partition: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each writer's newest input."""
        ledger: Log = self._broker.logs[self._topics.allocations, partition]
        for record, _ in ledger.committed():
            if record.value is not None and (record.key or b"").startswith(checkpoint_key("").encode()):
                found = json.loads(record.value)
                yield found["writer"], found["input"]


def _is_read(record: Record, reader: dict[str, Any]) -> bool:
    ahead: int = reader.get("ahead", {}).get((record.key or b"").decode(), 0)
    return record.offset < max(int(reader["to"]), ahead)


def retention(broker: Broker, topics: Topics, seed: int, *, many: bool) -> Retention | None:
    """A quarter of the worlds have it."""
    dice = random.Random(f"{seed}/retention")
    return Retention(broker, topics, dice, many=many) if dice.random() < 0.25 else None
