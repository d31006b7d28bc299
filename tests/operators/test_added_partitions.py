"""Partitions are added while workers run: they speak and listen where their host's manager does from then on."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from msgspec import structs

from operators.conftest import HOST
from outfitter.session.worker_session import WorkerSession
from outfitter.testing import FakeOutfitter
from outfitter_proto.bus import Bus, Entry, connect
from outfitter_proto.codec import decode_registration, encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import AllocationState, Deregister, Heartbeat, Register, Registration
from support.bus.remaking import add_partitions
from support.managers.scripted import ScriptedManager

FEW, MANY = 3, 7
CLUSTER = "outfitter"


async def said(bus: Bus, enough: Callable[[list[Registration]], object]) -> list[Registration]:
    """What was said in the host's new partition, once that is `enough`."""
    found: list[Registration] = []
    async with await bus.open_reader(
        topics().registrations, partition_of(HOST, MANY), start=None, committed=False
    ) as reader:
        with anyio.fail_after(20):
            while not enough(found):
                found += [decode_registration(message.value) for message in await reader.fetch()]
    return found


def of_kind(kind: type) -> Callable[[list[Registration]], bool]:
    return lambda found: any(isinstance(each, kind) for each in found)


@pytest.fixture
def manager(url: str, fake: FakeOutfitter) -> ScriptedManager:
    assert partition_of(HOST, FEW) != partition_of(HOST, MANY)
    return ScriptedManager(url, HOST, fake, partitions=FEW)


async def test_heartbeats_and_the_farewell_go_to_the_new_partition(url: str, manager: ScriptedManager) -> None:
    asked = Register(host=HOST, worker="w", incarnation="1", lease_s=0.6)
    with manager:
        async with connect(url) as bus:
            async with WorkerSession(bus, asked) as session:
                await session.wait()
                await add_partitions(bus, CLUSTER, MANY)
                await said(bus, of_kind(Heartbeat))
            assert isinstance((await said(bus, of_kind(Deregister)))[-1], Deregister)
    assert not manager.deregistrations


async def test_a_record_that_was_moved_has_not_ended_and_is_followed_where_it_is(
    url: str, manager: ScriptedManager
) -> None:
    asked = Register(host=HOST, worker="w", incarnation="1", lease_s=None)
    with manager:
        async with connect(url) as bus, WorkerSession(bus, asked) as session:
            record = await session.wait()
            key, ledger = record.key.encode(), topics().allocations
            await add_partitions(bus, CLUSTER, MANY)
            moved = Entry(key, encode(record))
            await bus.publish(ledger, partition_of(HOST, MANY), moved)
            await bus.publish(ledger, partition_of(HOST, FEW), Entry(key, None))
            await bus.publish(
                ledger,
                partition_of(HOST, MANY),
                Entry(key, encode(structs.replace(record, state=AllocationState.ENDED, reason="here"))),
            )
            with anyio.fail_after(20):
                while not session.allocation_watch.read().over:
                    await session.allocation_watch.changed(session.allocation_watch.read().version)
            found = session.record
            assert found is not None
            assert (found.state, found.reason) == ("ended", "here")
