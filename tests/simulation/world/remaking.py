"""Topics that are deleted and made anew, while managers serve or while they are all down."""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

import anyio
from msgspec import structs

from outfitter_proto.bus import Entry
from outfitter_proto.keys import checkpoint_key, host_writer, partition_writer
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.partitioning import partition_of
from simulation.hosts.managers import CLUSTER, TOPICS, Manager
from simulation.model.broker import Broker
from simulation.model.network import LATEST_S, SLOWEST

if TYPE_CHECKING:
    from simulation.world.world import World

BEYOND = 5
ENDS_WITHIN_S = 15.0
"""How long after it has looked a manager may take to end."""


class Remaking(NamedTuple):
    """What becomes of a world's topics: which one is made anew, after how many seconds, whether no manager runs then,
    and after how many more seconds the registrations reach further than they did before (None: they need not)."""

    topic: str
    after_s: float
    down: bool
    fill_s: float | None
    look_s: float

    @property
    def of_ledger(self) -> bool:
        return self.topic.endswith(".allocations")


SHARE = 0.2
"""The worlds in which a topic is made anew."""


def remaking(topics: Topics, seed: int, trouble_s: float) -> Remaking | None:
    """What becomes of the topics of a seed's world."""
    dice = random.Random(f"{seed}/remaking")
    if dice.random() >= SHARE:
        return None
    ledger = dice.random() < 0.5
    down = dice.random() < 0.5
    # who reads on where another topic stood cannot know it before he looks: managers that run do not meet that here
    fill_s = dice.uniform(0.0, 4.0) if down and not ledger else None
    return Remaking(
        topics.allocations if ledger else topics.registrations,
        trouble_s * dice.uniform(0.3, 0.9),
        down,
        fill_s,
        dice.choice((1.0, 5.0, 30.0)),
    )


def is_told(broker: Broker, identities: Collection[str]) -> bool:
    """Whether the broker tells of each of these writers that is not new that it has committed something: that is what
    a manager knows of a ledger that is gone."""
    return all(broker.has_committed(each) for each in identities if each in broker.transactions)


def fill(broker: Broker, topics: Topics, partition: int, end: int) -> None:
    """Have the registrations of a partition reach further than `end`, with what nobody answers."""
    host = next(
        name for name in map("filler-{}".format, range(1000)) if partition_of(name, broker.partitions) == partition
    )
    log = broker.logs[topics.registrations, partition]
    body = json.dumps({"type": "heartbeat", "host": host, "worker": "w", "incarnation": "1"}).encode()
    while log.end < end + BEYOND:
        broker.publish(log, Entry(host.encode(), body))


def _identities(world: World) -> list[str]:
    """The writers of all partitions, or of all hosts."""
    if world.setting.replicas:
        return [transactional_id(CLUSTER, partition_writer(number)) for number in range(world.setting.partitions)]
    return [transactional_id(CLUSTER, host_writer(host.name)) for host in world.hosts]


def _written(broker: Broker) -> set[str]:
    """The writers of which the ledger has a checkpoint: it has nothing to lose of the others."""
    prefix = checkpoint_key("").encode()
    keys = {
        record.key or b""
        for number in range(broker.partitions)
        for record, _ in broker.logs[TOPICS.allocations, number].committed()
    }
    return {transactional_id(CLUSTER, key.removeprefix(prefix).decode()) for key in keys if key.startswith(prefix)}


def _numbers(world: World, manager: Manager) -> list[int]:
    """The partitions, or the host, that a manager serves."""
    served = [number for number, _ in manager.serving()]
    return served if world.setting.replicas or not served else [world.jobs.index(manager.job)]


async def remake(world: World, plan: Remaking) -> None:
    """Delete a topic and make it anew, while managers serve or while all are down."""
    await anyio.sleep(plan.after_s)
    identities = _identities(world)
    weather = world.setting.weather
    # a killed manager's last requests arrive before the ledger is gone
    late_s = (LATEST_S + 1 if weather.late else weather.latency_s * SLOWEST) if plan.of_ledger else 0.0
    # without history nobody can tell a ledger made anew within a transaction, which that aborts, from a new one
    between_transactions = plan.of_ledger and any(job.limits.history is None for job in world.jobs)
    if plan.down or between_transactions:
        for job in world.jobs:
            job.begins_at = world.loop.time() + late_s + (plan.fill_s or 0.0) + 1.0
            world.later(job.begins_at - world.loop.time(), world.ensure, job)
        for manager in world.managers:
            world.loop.kill(manager.process)
        await anyio.sleep(late_s)
    while plan.of_ledger and not is_told(world.broker, identities):
        if between_transactions:
            return
        await anyio.sleep(0.05)
    if world.over:
        return
    world.written = _written(world.broker)
    ends = [world.broker.logs[plan.topic, number].end for number in range(world.broker.partitions)]
    world.broker.remake(plan.topic)
    world.remade_at = world.loop.time()
    world.note("world", f"{plan.topic} is made anew")
    if world.strangers is not None and not plan.of_ledger:
        world.strangers.said.clear()
    if plan.fill_s is not None:
        await anyio.sleep(plan.fill_s)
        for number, end in enumerate(ends):
            fill(world.broker, TOPICS, number, end)


async def adopt(world: World, plan: Remaking) -> None:
    """Do as managers say whose ledger was made anew: once no worker has anything, put devices back as they were,
    and start managers to adopt the ledger."""
    await anyio.sleep(plan.look_s + ENDS_WITHIN_S)
    names = _identities(world)
    for manager in world.managers:
        if manager.up and any(names[number] in world.written for number in _numbers(world, manager)):
            world.complaints.append(f"PROMISE 3: {manager.process.name} serves on although its ledger was made anew")
    ends = [held.until for worker in world.workers for held in worker.holdings]
    while max(ends, default=0.0) > world.loop.time():
        await anyio.sleep(1.0)
        ends = [held.until for worker in world.workers for held in worker.holdings]
    for job in [*world.jobs, *world.usual.values()]:
        job.limits = structs.replace(job.limits, adopt=True)
    for manager in world.managers:
        world.loop.kill(manager.process)
    for host in world.hosts:
        host.bench.reset()
    world.note("world", "the new ledger is adopted")
