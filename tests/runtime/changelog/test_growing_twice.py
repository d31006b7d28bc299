"""`outfitter topics grow` twice in a row, of many hosts, killed anywhere and run again: as if nothing had happened.

Hosts move out of one partition together, move twice, stay, come back to a partition that they had left, or have no
manager yet; each has a holder, a waiter, and messages that nobody has read. Episodes differ in the points at which the
command is killed, and in who works in between. `GROWTH_EPISODES=500` plays so many for each scope.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Entry
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.cli._lib import ledger_location
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.growth.grow import grow
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError
from outfitter_service.runtime.changelog.shape import TopicsChangedError
from outfitter_service.runtime.identity import host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.processor.processor import Limits
from outfitter_service.runtime.sweeper.group_member import SweeperMember
from support.bus.committed import committed
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import ledger
from support.checker.verdict import verdict
from support.managers.in_process import InProcessManager, serving, static

pytestmark = pytest.mark.slow

EPISODES = int(os.environ.get("GROWTH_EPISODES", "5"))
SIZES = 2, 3, 5
CLUSTER = "outfitter"
TOPICS = topics(CLUSTER)
WITHIN_S = 60.0


def _host(*of_places: int) -> Iterator[str]:
    """Hosts whose places these are among so many partitions."""
    return (f"h{n}" for n in count() if tuple(partition_of(f"h{n}", size) for size in SIZES) == of_places)


TOGETHER = _host(0, 2, 4)
SERVED = [next(TOGETHER), next(TOGETHER), *map(next, (_host(0, 2, 3), _host(1, 1, 4), _host(0, 0, 0), _host(0, 2, 0)))]
NEW = next(_host(1, 2, 3))
"""Nobody has served it before all is over."""
HOSTS = [*SERVED, NEW]


class Town:
    """All hosts of a cluster, each with one GPU, and what their workers have said so far."""

    def __init__(self, bus: FaultyBus, scope: str, folder: Path) -> None:
        self.bus = bus
        self._scope = scope
        self._folder = folder
        self._said: dict[str, list[tuple[str, str]]] = {host: [] for host in HOSTS}

    async def say(self, size: int, host: str, *words: str) -> None:
        """Say of workers of `host`, where it belongs among `size` partitions: `+a` registers, `-a` deregisters, and
        `~a` is a heartbeat."""
        for kind, worker in words:
            body: dict[str, Any] = {"host": host, "worker": worker, "incarnation": "1"}
            match kind:
                case "+":
                    body |= {"type": "register", "resources": {"gpu": {"amount": 1}}, "lease_s": 3600}
                    body |= {"operators": {"map": {"gpu": {"amount": 1}}}}
                case "-":
                    body |= {"type": "deregister"}
                case _:
                    body |= {"type": "heartbeat"}
            self._said[host].append((kind, worker))
            entry = Entry(host.encode(), json.dumps(body).encode())
            await self.bus.publish(TOPICS.registrations, partition_of(host, size), entry)

    def _expected(self, hosts: list[str]) -> dict[str, tuple[str, int | None]]:
        """The state and token of each allocation when all has been answered."""
        found: dict[str, tuple[str, int | None]] = {}
        for host in hosts:
            queue: list[str] = []
            tokens: dict[str, int] = {}
            for kind, worker in self._said[host]:
                queue += [worker] if kind == "+" else []
                if kind == "-":
                    queue.remove(worker)
                    found[f"{host}/{worker}/1"] = "ended", tokens.get(worker)
                if queue:
                    tokens.setdefault(queue[0], len(tokens) + 1)
            for worker in queue:
                found[f"{host}/{worker}/1"] = "allocated" if worker == queue[0] else "pending", tokens.get(worker)
        return found

    async def _records(self) -> dict[str, tuple[str, int | None]]:
        found: dict[str, tuple[str, int | None]] = {}
        for records in (await ledger(self.bus, CLUSTER)).values():
            for key, value in records.items():
                if not key.startswith(b"@"):
                    body = json.loads(value)
                    assert key.decode() not in found
                    token = body.get("token") if self._scope == "host" else None  # a partition's are for all hosts
                    found[key.decode()] = body["state"], token
        return found

    async def answered(self, hosts: list[str]) -> None:
        """Wait until all that was said of `hosts` is answered, and as it must be."""
        expected = self._expected(hosts)
        if self._scope == "cluster":
            expected = {key: (state, None) for key, (state, _) in expected.items()}
        records: dict[str, tuple[str, int | None]] = {}
        with anyio.move_on_after(WITHIN_S):
            while records != expected:
                await anyio.sleep(0.02)
                records = {key: told for key, told in (await self._records()).items() if key.split("/")[0] in hosts}
        assert records == expected

    # --- managers ---

    def _who(self, hosts: list[str], size: int) -> Iterator[dict[str, Any]]:
        async def always() -> bool:
            return True

        if self._scope == "host":
            for host in hosts:
                yield {"identity": host_identity(CLUSTER, host), "partition": partition_of(host, size)}
            return
        for number in range(size):
            identity = of_partition(replica_identity(CLUSTER), number)
            scope = PartitionScope(number, size, identity.writer)
            yield {"identity": identity, "partition": number, "scope": scope, "owns_partition": always}

    @asynccontextmanager
    async def served(self, hosts: list[str], *, ready: bool = True) -> AsyncIterator[list[InProcessManager]]:
        """All managers of `hosts`, and who looks after what is nobody's; they are stopped in the end."""
        size = (await self.bus.topic(TOPICS.allocations)).partitions
        async with AsyncExitStack() as stack:
            managers = [
                await stack.enter_async_context(
                    serving(
                        self.bus, static(count=1), self._folder, limits=Limits(lease_grace_s=0.1), cluster=CLUSTER,
                        ready=ready, **each,
                    )
                )
                for each in self._who(hosts, size)
            ]  # fmt: skip
            tasks = await stack.enter_async_context(anyio.create_task_group())
            if self._scope == "host" and ready:
                sweeper = SweeperMember(
                    self.bus, partitions=size, identity=host_identity(CLUSTER, "sweeping"),
                    instruments=Instruments.of(Metrics([])), grace_s=WITHIN_S,
                )  # fmt: skip
                tasks.start_soon(sweeper.run)
            yield managers
            for manager in managers:
                if manager.failure is None:
                    await manager.stop()
            tasks.cancel_scope.cancel()

    async def tried(self, hosts: list[str]) -> None:
        """Start managers while growing is not done: each refuses, or it serves, and knows all that there is."""
        async with self.served(hosts, ready=False) as managers:
            for manager in managers:
                with anyio.fail_after(WITHIN_S):
                    while not manager.ended.is_set() and not manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                        await anyio.sleep(0.005)
                assert manager.processor.ready or isinstance(manager.failure, TopicsChangedError), manager.failure

    async def strays(self, size: int) -> None:
        """Say something everywhere that is nobody's, and wait until somebody has said so of this and of no more."""
        for number in range(size):
            await self.bus.publish(TOPICS.registrations, number, Entry(b"?", b"{}"))
        letters: list[Any] = []
        with anyio.move_on_after(WITHIN_S):
            while len(letters) < size:
                await anyio.sleep(0.02)
                letters = await self._letters(size)
        assert len(letters) == size, [letter["reason"] for letter in letters]

    async def _letters(self, size: int) -> list[Any]:
        found: list[Any] = []
        for number in range(size):
            letters = await committed(self.bus, TOPICS.dead_letters, number)
            found += [json.loads(message.value or b"") for message in letters]
        return found


@pytest.mark.parametrize("scope", ["host", "cluster"])
@pytest.mark.parametrize("episode", range(EPISODES))
async def test_two_growths_that_are_killed_anywhere_are_as_if_nothing_had_been(
    scope: str, episode: int, tmp_path: Path
) -> None:
    dice = random.Random(episode)
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    async with FaultyBus(url) as bus:
        await wanted.create(bus, CLUSTER, partitions=SIZES[0])
        town = Town(bus, scope, tmp_path)
        async with town.served(SERVED):
            for host in SERVED:
                await town.say(SIZES[0], host, "+a", "+b")
            await town.answered(SERVED)
        for host in SERVED:
            await town.say(SIZES[0], host, *dice.sample(["+c", "-a", "~b"], 3))
        await town.say(SIZES[0], NEW, "+n")
        for before, size in pairwise(SIZES):
            await interrupted(town, size, dice)
            if (await bus.topic(TOPICS.allocations)).partitions == size:
                await town.say(size, dice.choice(HOSTS), f"+{before}")
            await grow(bus, CLUSTER, size)
            for host in HOSTS:
                assert await ledger_location.check(bus, CLUSTER, host) == []
            assert (await grow(bus, CLUSTER, size)).hosts == []
            if dice.random() < 0.5:
                async with town.served(SERVED):
                    await town.answered(SERVED)
            if size != SIZES[-1]:
                for host in SERVED:
                    await town.say(size, host, "+d", "-b")
        async with town.served(HOSTS):
            for host in HOSTS:
                await town.say(SIZES[-1], host, "+z", *(["~d"] if host in SERVED else []))
            await town.answered(HOSTS)
            await town.strays(SIZES[-1])
    found = await verdict(url, CLUSTER)
    assert found.ok, str(found)


async def interrupted(town: Town, size: int, dice: random.Random) -> None:
    """Grow to `size`, killed up to twice, with another number and with managers in between."""
    for _ in range(dice.choice([1, 1, 2])):
        point = dice.randrange(1, 45)
        if await town.bus.killed(partial(grow, town.bus, CLUSTER, size), point) < point:
            return
        if dice.random() < 0.3:
            await town.tried(SERVED)
        counts = {shape.partitions for shape in (await town.bus.shapes(TOPICS)).values()}
        if len(counts) > 1 or await ledger_location.check(town.bus, CLUSTER, NEW):
            with pytest.raises(CannotGrowError, match=f"outfitter topics grow --partitions {size}"):
                await grow(town.bus, CLUSTER, size + 3, force=True)
