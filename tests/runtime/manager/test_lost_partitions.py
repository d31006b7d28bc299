"""A partition that another replica gets: its ledger may be gigabytes, and is gone here at once."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Entry, Membership
from outfitter_proto.names import topics
from outfitter_service.config import load
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.identity import replica_identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.cluster_member import Replica
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import CLUSTER, register


class Member(Membership):
    """Owns the one partition there is until it is `lost`."""

    def __init__(self) -> None:
        self.lost = anyio.Event()
        self._changes = self._tell()

    @property
    def partitions(self) -> frozenset[int]:
        return frozenset() if self.lost.is_set() else frozenset({0})

    async def changed(self) -> frozenset[int]:
        return await anext(self._changes)

    async def _tell(self) -> AsyncIterator[frozenset[int]]:
        yield self.partitions
        await self.lost.wait()
        yield self.partitions
        await anyio.sleep_forever()

    async def confirmed(self, partition: int) -> bool:
        return partition in self.partitions

    async def leave(self) -> None:
        self.lost.set()

    async def aclose(self) -> None:
        pass


class OneMemberBus(FaultyBus):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.member = Member()

    async def join(self, group: str, topic: str, **options: object) -> Membership:
        return self.member


def _serves(replica: Replica, key: str) -> bool:
    return any(key in server.processor.ledger.allocations for server in replica.servers.values())


async def test_nothing_large_is_left_of_a_partition_that_is_lost(tmp_path: Path) -> None:
    settings = load(None, {"scope": "cluster"}, {}, required=False)
    stopping = anyio.Event()
    async with OneMemberBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        await wanted_topics.create(bus, CLUSTER, partitions=1)
        replica = Replica(
            bus,
            settings,
            {},
            identity=replica_identity(CLUSTER),
            partitions=1,
            instruments=Instruments.of(Metrics()),
            stopping=stopping,
        )
        gc.disable()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replica.run)
                body = json.dumps(register("w", host="a", gpu=1)).encode()
                await bus.publish(topics(CLUSTER).registrations, 0, Entry(b"a", body))
                with anyio.fail_after(20):
                    while not _serves(replica, "a/w/1"):  # noqa: ASYNC110 - it tells nobody
                        await anyio.sleep(0.01)
                host_state = weakref.ref(replica.servers[0].processor.ledger.host_state("a"))
                state_gauges = replica.servers[0].processor.state_counts
                bus.member.lost.set()
                with anyio.fail_after(20):
                    while replica.servers:  # noqa: ASYNC110 - it tells nobody
                        await anyio.sleep(0.01)
                assert host_state() is None
                assert state_gauges().records == 0
                stopping.set()
        finally:
            gc.enable()
