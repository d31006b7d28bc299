"""Somebody who looks on, and judges by signs of life which managers live: never one that works for dead, and in time
each that was killed or stands still."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio
from msgspec import UNSET

from outfitter_proto import codec
from outfitter_proto.keys import CHECKPOINT, is_sweeper
from outfitter_proto.names import managers_topic
from outfitter_proto.records import Checkpoint
from outfitter_proto.signs_of_life import MISSED, Life, SignsOfLife, follow_signs
from simulation.hosts.managers import CLUSTER, TOPICS, Manager
from simulation.loop import Process
from simulation.model.client import ModelBus
from simulation.model.network import Link

if TYPE_CHECKING:
    from simulation.world.world import World

LOOK_S = 1.0
SLACK_S = 10.0
"""How much longer than two silences it may take until silence shows: one more interval, and a fetch that the network
has lost. A sign's age goes by the newest sign of any manager, which may just not be too old itself."""


class Onlooker:
    """Looks on while managers say that they live. `complaints`: what it judged wrongly."""

    def __init__(self, world: World) -> None:
        self.complaints: list[str] = []
        self.judged = 0
        self._world = world
        self._loop = world.loop
        self._signs = SignsOfLife(now_ms=lambda: world.loop.time() * 1000, monotonic=world.loop.time)
        self._seen_at: dict[tuple[str, str], float] = {}
        self._serves_since: dict[tuple[Manager, int], float] = {}
        """Since when a manager serves a partition, and nothing keeps its signs from the broker."""

    async def run(self, over: Callable[[], bool]) -> None:
        world = self._world
        bus = ModelBus(world.broker, Link(world.network, Process("onlooker")))
        async with anyio.create_task_group() as tasks:
            for partition in range(world.setting.partitions):
                tasks.start_soon(partial(follow_signs, bus, CLUSTER, partition, self._signs))
            while not over():
                await anyio.sleep(LOOK_S)
                self._look()
            tasks.cancel_scope.cancel()

    def _look(self) -> None:
        world, now = self._world, self._loop.time()
        by_instance = {manager.process.name: manager for manager in world.managers}
        for manager in world.managers:
            is_able = manager.up and not manager.process.stopped and not manager.link.cut and not world.network.down
            serves = {partition for partition, _ in manager.serving()} if is_able else set()
            for partition in range(world.setting.partitions):
                if partition in serves:
                    self._serves_since.setdefault((manager, partition), now)
                else:
                    self._serves_since.pop((manager, partition), None)
        for checkpoint in self._checkpoints():
            manager = by_instance.get(checkpoint.instance.partition("-")[2])
            if manager is None or checkpoint.beat_s is UNSET:
                continue
            seen_at = self._seen_at.setdefault((checkpoint.writer, checkpoint.instance), now)
            life, silence_s = self._signs.of(checkpoint, seen_at=seen_at).life, MISSED * checkpoint.beat_s
            self.judged += life is not Life.UNKNOWN
            serves_s = now - self._serves_since.get((manager, checkpoint.input.partition), math.inf)
            if life is Life.DEAD and serves_s > silence_s:
                self.complaints.append(f"{checkpoint.writer} of {checkpoint.instance} serves, and counts as dead")
            read_to = self._signs._as_of.get(checkpoint.input.partition, -math.inf)
            if life is Life.DEAD and now - self._last_sign(checkpoint, by=read_to) < silence_s:
                self.complaints.append(f"{checkpoint.writer} of {checkpoint.instance} was heard, and counts as dead")
            if life is Life.LIVES and now - self._last_sign(checkpoint, by=now) > 2 * silence_s + SLACK_S:
                self.complaints.append(f"{checkpoint.writer} of {checkpoint.instance} is silent, and counts as living")

    def _last_sign(self, checkpoint: Checkpoint, *, by: float) -> float:
        """When the broker took the last sign of this instance until then, which a process may send between two
        stops."""
        log = self._world.broker.logs[managers_topic(CLUSTER), checkpoint.input.partition]
        for record, at in reversed(log.committed()):
            beat = codec.decode_beat(record.value or b"", key=record.key)
            if at <= by and (beat.writer, beat.instance) == (checkpoint.writer, checkpoint.instance):
                return at
        return -math.inf

    def _checkpoints(self) -> list[Checkpoint]:
        """The newest committed checkpoint of each writer."""
        found: dict[bytes, Checkpoint] = {}
        for partition in range(self._world.setting.partitions):
            for record, _ in reversed(self._world.broker.logs[TOPICS.allocations, partition].committed()):
                key = record.key or b""
                if key.startswith(CHECKPOINT) and key not in found and record.value is not None:
                    decoded = codec.decode_ledger(record.value)
                    if isinstance(decoded, Checkpoint) and not is_sweeper(decoded.writer):
                        found[key] = decoded
        return list(found.values())
