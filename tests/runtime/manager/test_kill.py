"""SIGKILL of a real manager at random points under load, on both adapters: the committed ledger keeps the promises.

Workers come, beat, go, come again and are never heard of again while the manager is killed and started. When it is
over, the checker reads the whole ledger, the history and the dead letters, and every registration has its answer.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.names import topics
from outfitter_verify import Report
from support.checker.verdict import verdict
from support.managers.process import Manager, StartManager, files_config

KILLS = 7
GPUS = 4
SEEDS = {"embedded": 20261121, "kafka": 20261122}

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


class Load:
    """Says what workers say, at random and without waiting for answers."""

    def __init__(self, bus: Bus, cluster: str, host: str, dice: random.Random) -> None:
        self.bus = bus
        self.topic = topics(cluster).registrations
        self.host = host
        self.dice = dice
        self.runs: dict[str, int] = {}
        self.live: list[tuple[str, str]] = []
        self.said = 0

    async def say(self, kind: str, worker: str, incarnation: str | None, **fields: Any) -> None:
        body = {"type": kind, "host": self.host, "worker": worker, "incarnation": incarnation, **fields}
        await self.publish(json.dumps(body).encode())

    async def publish(self, value: bytes) -> None:
        await self.bus.publish(self.topic, 0, Entry(self.host.encode(), value))
        self.said += 1

    async def register(self) -> None:
        worker = f"w{self.dice.randrange(60)}"
        self.runs[worker] = self.runs.get(worker, 0) + 1
        incarnation = str(self.runs[worker])
        await self.say(
            "register", worker, incarnation,
            resources={"gpu": {"amount": self.dice.choice([1, 1, 1, 1, 1, 1, 1, 1, 2, 3, GPUS + 1])}},
            lease_s=self.dice.choice([0.3, 0.3, 60.0]), wait_s=self.dice.choice([None, 0.2, 30.0]),
            priority=self.dice.choice([0, 0, 1]),
        )  # fmt: skip
        self.live.append((worker, incarnation))

    async def step(self) -> None:
        match self.dice.randrange(10):
            case 0 | 1 | 2:
                await self.register()
            case 3 if self.live:
                await self.say("heartbeat", *self.dice.choice(self.live))
            case 4 | 5 | 6 | 7 if self.live:
                # rather an old one, which may have been granted something
                await self.say("deregister", *self.live.pop(self.dice.randrange(1 + len(self.live) // 4)))
            case 8 if self.live:  # once more, or late
                worker, incarnation = self.dice.choice(self.live)
                await self.say("register", worker, incarnation, resources={"gpu": {"amount": 1}})
            case _:
                await self.publish(self.dice.randbytes(20))

    async def run(self) -> None:
        while True:
            for _ in range(self.dice.randrange(1, 8)):
                await self.step()
            await anyio.sleep(self.dice.random() * 0.04)


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Bus, str, str]]:
    """A bus with its topics made, its kind, and a cluster of its own."""
    kind = str(request.param)
    if kind == "embedded":
        url, cluster = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", "outfitter"
    else:
        broker = request.getfixturevalue("kafka_broker")
        url, cluster = broker.url, broker.new_cluster()
    async with connect(url) as bus:
        await all_topics.create(bus, cluster, partitions=1)
        yield bus, kind, cluster


async def test_killed_at_random_under_load_it_keeps_every_promise(
    place: tuple[Bus, str, str], start_manager: StartManager, tmp_path: Path
) -> None:
    bus, kind, cluster = place
    dice = random.Random(SEEDS[kind])
    manager: Manager = await anyio.to_thread.run_sync(
        lambda: start_manager(
            files_config(tmp_path / "gpus", gpus=GPUS, extra='lease-grace = "50ms"'), bus=bus.url, cluster=cluster
        )
    )
    load = Load(bus, cluster, manager.host, random.Random(SEEDS[kind] + 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        for _ in range(KILLS):
            await anyio.sleep(dice.random() * 0.6)
            await anyio.to_thread.run_sync(manager.kill9)
            # sometimes it is killed before it is ready, while it takes the partition and replays
            if dice.random() < 0.4:
                await anyio.to_thread.run_sync(lambda: manager.start(ready=False))
                await anyio.sleep(dice.random() * 0.8)
                await anyio.to_thread.run_sync(manager.kill9)
            await anyio.to_thread.run_sync(manager.start)
        await anyio.sleep(0.3)
        tasks.cancel_scope.cancel()

    await settled(bus, cluster)
    assert await anyio.to_thread.run_sync(manager.stop) == 0
    report = await verdict(bus.url, cluster)
    print(report)
    assert report.violations == ()
    # dead letters are rationed, and a quick machine is told more nonsense within a minute than there are letters for
    unseen = [
        why
        for check in report.checks
        for why in check.partial
        if "more messages were refused within a minute" not in why
    ]
    assert not unseen
    print(f"{kind}: {KILLS} kills and more, {dict(report.counts)}")
    assert report.counts["managers"] >= KILLS
    assert report.counts["grants"] > 10
    assert report.counts["registrations"] > 50


async def settled(bus: Bus, cluster: str) -> Report:
    """Wait until everything that was said is behind a checkpoint."""
    deadline = time.monotonic() + 60
    while True:
        report = await verdict(bus.url, cluster)
        if not report.counts["unread"]:
            return report
        assert time.monotonic() < deadline, f"{report.counts['unread']} registrations are not read: {report}"
        await anyio.sleep(0.1)
