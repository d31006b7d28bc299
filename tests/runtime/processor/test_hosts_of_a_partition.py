"""The hosts of a partition: how many there may be, and that one that is forgotten is looked at no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio

from outfitter_proto.bus import CommitUnknownError, Membership
from outfitter_service.config import load
from outfitter_service.core.model import DriverReport
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.cluster_member import Replica
from outfitter_service.runtime.processor.limits import Limits
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import CLUSTER, InProcessManager, register, serving, static

IDENTITY = of_partition(replica_identity(CLUSTER), 0)


async def say(manager: InProcessManager, body: dict[str, Any]) -> None:
    await manager.publish(json.dumps(body).encode(), body["host"].encode())


async def test_hosts_beyond_the_bound_are_dead_letters_and_those_that_are_known_are_served_on(tmp_path: Path) -> None:
    limits = Limits(lease_grace_s=0.1, hosts=2)
    scope = PartitionScope(0, 1, IDENTITY.writer)
    async with (
        FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus,
        serving(bus, static(2), tmp_path, identity=IDENTITY, scope=scope, limits=limits) as manager,
    ):
        for host in ("a", "b", "c", "a"):
            await say(manager, register(f"w{host}", host=host, gpu=1))
        await say(manager, register("last", host="a", gpu=1))
        await manager.until(lambda records: "a/last/1" in records)
        assert "b/wb/1" in await manager.records()
        assert not {"c/wc/1", "@host/c"} & (await manager.records()).keys()
        await manager.reported()
        assert manager.metric("outfitter_dead_letters_total") == 1


async def test_a_host_that_was_forgotten_by_a_commit_without_an_answer_is_looked_at_no_more(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    scope = PartitionScope(0, 1, IDENTITY.writer)
    forgotten = anyio.Event()
    async with (
        FaultyBus(url) as said,
        FaultyBus(url) as bus,
        serving(
            bus, static(2), tmp_path, identity=IDENTITY, scope=scope, retention_s=0.3, forgets_hosts=True
        ) as manager,
    ):
        manager.bus = said

        async def lose_the_answer(point: str) -> None:
            if point == "commit:after" and not forgotten.is_set() and "@host/a" not in await manager.records():
                forgotten.set()
                raise CommitUnknownError("no answer")

        await say(manager, register("w", host="a", gpu=1))
        await manager.until(lambda records: records.get("a/w/1", {}).get("state") == "allocated")
        bus.script = lose_the_answer
        await say(manager, {"type": "deregister", "host": "a", "worker": "w", "incarnation": "1"})
        with anyio.fail_after(20):
            await forgotten.wait()
        with anyio.fail_after(20):
            while "a" in manager.drivers.hosts:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.01)
        await say(manager, register("again", host="a", gpu=1))
        await manager.until(lambda records: records.get("a/again/1", {}).get("state") == "allocated")


class Unassigned(Membership):
    """A member that has heard of no assignment yet."""

    partitions = frozenset()

    async def changed(self) -> frozenset[int]:
        await anyio.sleep_forever()
        raise AssertionError

    async def confirmed(self, partition: int) -> bool:
        return False

    async def leave(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class WaitingBus(FaultyBus):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.joined = anyio.Event()

    async def join(self, group: str, topic: str, **options: object) -> Membership:
        self.joined.set()
        return Unassigned()


async def test_a_replica_without_its_first_assignment_is_not_ready_and_says_what_it_waits_for(tmp_path: Path) -> None:
    bus = WaitingBus(f"sqlite://{tmp_path}/bus.db")
    settings = load(None, {"scope": "cluster", "shutdown-timeout": "0.1s"}, {}, required=False)
    stopping = anyio.Event()
    replica = Replica(
        bus, settings, {}, identity=IDENTITY, partitions=1, instruments=Instruments.of(Metrics()), stopping=stopping
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replica.run)
        await bus.joined.wait()
        await anyio.wait_all_tasks_blocked()
        assert not replica.ready
        assert "joining" in replica.condition
        stopping.set()


async def test_what_a_driver_says_of_a_host_that_is_not_known_any_more_is_not_kept(tmp_path: Path) -> None:
    """Its driver was being asked while the host was forgotten."""
    scope = PartitionScope(0, 1, IDENTITY.writer)
    async with (
        FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus,
        serving(bus, static(2), tmp_path, identity=IDENTITY, scope=scope) as manager,
    ):
        event_queue = manager.processor.event_queue
        event_queue.add(DriverReport(host="gone", resource="gpu", devices=(), asked=1))
        await say(manager, register("w", host="a", gpu=1))
        await manager.until(lambda records: records.get("a/w/1", {}).get("state") == "allocated")
        await manager.reported()
        assert set(manager.processor.ledger.hosts) == {"a"}
        assert not [place for place in event_queue._reports if place[0] == "gone"]
