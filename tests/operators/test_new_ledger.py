"""Somebody makes the ledger's topic anew while workers run: who is in the new one goes on, and who is not is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest
from msgspec import structs

from operators.conftest import HOST
from outfitter.errors import AllocationEndedError
from outfitter.session.worker_session import WorkerSession
from outfitter.testing import FakeOutfitter
from outfitter_proto.bus import Bus, connect
from outfitter_proto.names import topics
from outfitter_proto.records import Allocation, AllocationState, Register, Token
from support.bus.remaking import remake
from support.kafka.broker import KafkaBroker
from support.managers.scripted import ScriptedManager, host_record, publish_record

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(90)]

PATIENCE = 60.0


class Scene:
    """A worker with devices, whose process nobody watches, and a manager that answers no second registration."""

    def __init__(self, broker: KafkaBroker, fake: FakeOutfitter) -> None:
        self.fake = fake
        self.cluster = broker.new_cluster()
        self.url = broker.url
        self.asked = Register(host=HOST, worker="w", incarnation="1", lease_s=6.0)
        self.warned = anyio.Event()

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[tuple[Bus, WorkerSession, ScriptedManager, Allocation]]:
        with ScriptedManager(self.url, HOST, self.fake, cluster=self.cluster) as manager:
            async with connect(self.url) as bus:
                session = WorkerSession(
                    bus, self.asked, cluster=self.cluster, on_lease_at_risk=lambda _: self.warned.set()
                )
                async with session:
                    record = await session.wait()
                    self.fake.absent = True
                    with anyio.fail_after(PATIENCE):
                        yield bus, session, manager, record

    async def remake(self, bus: Bus) -> None:
        await remake(bus, self.cluster, [topics(self.cluster).allocations])


async def heard(manager: ScriptedManager) -> None:
    """Two heartbeats that were sent after this call began."""
    count = len(manager.heartbeats)
    await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.heartbeats) > count + 1)


async def test_while_the_ledger_is_empty_heartbeats_go_on_and_the_restored_one_is_followed(
    kafka_broker: KafkaBroker, fake: FakeOutfitter
) -> None:
    scene = Scene(kafka_broker, fake)
    async with scene.playing() as (bus, session, manager, record):
        await scene.remake(bus)
        manager.heartbeats.clear()
        await heard(manager)
        assert session.record == record
        await publish_record(bus, host_record(HOST), cluster=scene.cluster)
        await publish_record(bus, record, cluster=scene.cluster)
        await heard(manager)
        over = structs.replace(record, state=AllocationState.ENDED, reason="in the new ledger")
        await publish_record(bus, over, cluster=scene.cluster)
        while not (snapshot := session.allocation_watch.read()).over:
            await session.allocation_watch.changed(snapshot.version)
        assert session.record == over


async def test_whoever_a_manager_has_no_more_is_told_before_the_lease_ends(
    kafka_broker: KafkaBroker, fake: FakeOutfitter
) -> None:
    scene = Scene(kafka_broker, fake)
    async with scene.playing() as (bus, _, manager, _):
        await scene.remake(bus)
        await publish_record(bus, host_record(HOST), cluster=scene.cluster)
        await scene.warned.wait()
        # it asks the manager meanwhile
        await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.registrations) > 1)


@pytest.mark.parametrize("anew", ["another token", "waits"])
async def test_whoever_the_new_ledger_has_granted_anew_is_told_that_its_devices_are_gone(
    kafka_broker: KafkaBroker, fake: FakeOutfitter, anew: str
) -> None:
    """A manager that continues from a backup reads the same registration again, and lends to it what is free then."""
    scene = Scene(kafka_broker, fake)
    async with scene.playing() as (bus, session, manager, record):
        await scene.remake(bus)
        await publish_record(bus, host_record(HOST), cluster=scene.cluster)
        if anew == "another token":
            granted = structs.replace(record, token=Token((record.token or 0) + 2**32))
        else:
            granted = structs.replace(record, state=AllocationState.PENDING, token=None, resources={})
        await publish_record(bus, granted, cluster=scene.cluster)
        while not (snapshot := session.allocation_watch.read()).over:
            await session.allocation_watch.changed(snapshot.version)
        assert isinstance(snapshot.error, AllocationEndedError)
        assert "granted anew" in str(snapshot.error)
        assert snapshot.record == record
        await session.deregister()  # nobody uses what it was granted anew
        await anyio.to_thread.run_sync(manager.wait_until, lambda: manager.deregistrations != [])
