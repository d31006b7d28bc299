"""Grants that a worker reads late: after it was frozen, after an outage, in any order with what came of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from msgspec import structs

import outfitter
from operators.conftest import HOST
from outfitter.session.lease import Lease, boot_time
from outfitter.session.watch import AllocationWatch
from outfitter.session.worker_session import WorkerSession
from outfitter.testing import FakeOutfitter
from outfitter_proto import names
from outfitter_proto.bus import BusUnavailableError, connect
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Register
from outfitter_proto.support.processes import process_owner
from support.bus.faulty_bus import FaultyBus
from support.managers.scripted import ScriptedManager, host_record, publish_record

pytestmark = pytest.mark.timeout(60)

LONG = 3600.0
PATIENCE = 50.0


class FreezableClock:
    """The boot time of a worker that may have been frozen, or cut off, for longer than its test takes."""

    missed = 0.0

    def __call__(self) -> float:
        return boot_time() + self.missed


class Scene:
    """A worker with a lease of a minute on a bus that does as it is told, and a manager that grants at once."""

    def __init__(self, url: str, manager: ScriptedManager, *, owned: bool = False) -> None:
        self.clock = FreezableClock()
        self.manager = manager
        self.bus = FaultyBus(url, self._meet)
        owner = process_owner() if owned else None
        asked = Register(host=HOST, worker="w", incarnation="1", lease_s=60.0, owner=owner)
        self.session = WorkerSession(
            self.bus, asked, allocation_watch=AllocationWatch(Lease(self.clock)), manager_patience=None
        )
        self.away = False
        self.at: dict[str, Callable[[], Awaitable[None]]] = {}
        """What happens when a point of the bus is come to for the first time."""

    async def _meet(self, point: str) -> None:
        if self.away and point.endswith(":before"):
            raise BusUnavailableError("cut off")
        if (act := self.at.pop(point, None)) is not None:
            await act()

    async def ledger_end(self) -> int:
        async with connect(self.bus.url) as bus:
            topic = names.topics().allocations
            partition = partition_of(HOST, (await bus.topic(topic)).partitions)
            return (await bus.offsets(topic, partition))[1]

    async def until_committed(self, act: Callable[[], object]) -> None:
        """Do something that makes the manager write a record, and wait until it has."""
        end = await self.ledger_end()
        act()
        while await self.ledger_end() < end + 2:  # noqa: ASYNC110 - it is told by nobody
            await anyio.sleep(0.01)

    async def outage(self) -> None:
        """The bus is away for long."""
        self.away = True
        self.clock.missed += LONG


@pytest.fixture
def scene(url: str, manager: ScriptedManager) -> Scene:
    return Scene(url, manager)


async def test_a_worker_that_was_frozen_before_its_answer_does_not_take_a_grant_that_is_over_for_its_own(
    scene: Scene, fake: FakeOutfitter
) -> None:
    believed = anyio.Event()

    async def freeze() -> None:
        """Right behind its registration; it is granted meanwhile, and over again."""
        scene.clock.missed += LONG
        await anyio.to_thread.run_sync(scene.manager.wait_until, lambda: bool(scene.manager.registrations))

    async def end_it() -> None:
        """The first look brings the grant; the end stands behind it, and is read once somebody has decided."""
        await scene.until_committed(fake.end)
        scene.at["fetch:before"] = believed.wait

    async def caught_up() -> None:
        believed.set()

    scene.at |= {"publish:after": freeze, "fetch:after": end_it, "stable_end:before": caught_up}
    async with scene.bus, scene.session:
        with anyio.fail_after(PATIENCE), pytest.raises(outfitter.AllocationEndedError):
            await _wait_and_tell(scene.session, believed)


async def _wait_and_tell(session: WorkerSession, believed: anyio.Event) -> None:
    try:
        await session.wait()
    finally:
        believed.set()


async def test_a_grant_that_was_read_late_and_stands_is_confirmed_by_the_manager_and_then_believed(
    scene: Scene,
) -> None:
    async def freeze() -> None:
        scene.clock.missed += LONG

    scene.at["publish:after"] = freeze
    async with scene.bus, scene.session:
        with anyio.fail_after(PATIENCE):
            await scene.session.wait()
        left = scene.session.allocation_watch.lease.remaining
        assert left is not None
        assert 0 < left <= 60
        assert len(scene.manager.registrations) == 2, "it asked again, and was answered"


async def test_a_worker_that_waited_through_an_outage_keeps_what_it_is_granted_afterwards(
    scene: Scene, fake: FakeOutfitter
) -> None:
    fake.keep_waiting("busy")
    async with scene.bus, scene.session:
        while scene.session.record is None:
            await scene.session.allocation_watch.changed(scene.session.allocation_watch.read().version)
        await scene.outage()
        await scene.until_committed(fake.grant)
        scene.away = False
        with anyio.fail_after(PATIENCE):
            record = await scene.session.wait()
        assert record.state == "allocated"
        assert not scene.session.allocation_watch.lease.at_risk, "it may use its devices from its first moment on"


async def test_an_answer_that_overtakes_the_acknowledgement_of_its_question_is_heard(scene: Scene) -> None:
    """The broker's answer to the worker is slow, the manager's is not."""
    ends: list[int] = []

    async def freeze() -> None:
        scene.clock.missed += LONG
        scene.at["publish:after"] = another  # a heartbeat

    async def another() -> None:
        ends.append(await scene.ledger_end())
        scene.at["publish:after"] = linger  # the question

    async def linger() -> None:
        while (scene.session._host_partition.position or 0) < ends[0] + 2:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()

    scene.at["publish:after"] = freeze
    async with scene.bus, scene.session:
        with anyio.fail_after(15):  # before it asks again
            await scene.session.wait()


async def test_what_ended_in_an_outage_is_over_and_not_registered_anew(scene: Scene, fake: FakeOutfitter) -> None:
    """However late it reads what there is: the manager may have forgotten it by then."""
    asked = anyio.Event()

    async def linger() -> None:
        await asked.wait()
        await anyio.wait_all_tasks_blocked()

    async def ask() -> None:
        asked.set()

    async with scene.bus, scene.session:
        await scene.session.wait()
        await scene.outage()
        await scene.until_committed(fake.end)
        scene.at |= {"fetch:before": linger, "stable_end:after": ask}
        scene.away = False
        with anyio.fail_after(PATIENCE):
            while not (snapshot := scene.session.allocation_watch.read()).over:
                await scene.session.allocation_watch.changed(snapshot.version)
        assert len(scene.manager.registrations) == 1


async def test_an_acknowledgement_that_comes_after_the_end_of_the_lease_renews_nothing(
    scene: Scene, fake: FakeOutfitter
) -> None:
    """The heartbeat was begun in time; on its way the worker was frozen, and lost its devices."""
    allocation_watch, beaten, asked = scene.session.allocation_watch, anyio.Event(), anyio.Event()

    async def freeze() -> None:
        scene.clock.missed += 20

    async def ask() -> None:
        asked.set()
        await anyio.sleep_forever()

    async def beat() -> None:
        beaten.set()

    async def register() -> None:
        scene.at["publish:after"] = beat

    scene.at["publish:after"] = register
    async with scene.bus, scene.session:
        with anyio.fail_after(PATIENCE):
            await beaten.wait()
            await anyio.wait_all_tasks_blocked()  # it sleeps until the next one
            scene.at |= {"publish:before": freeze, "stable_end:before": ask}
            scene.clock.missed += 50
            await asked.wait()
        assert allocation_watch.lease.over


async def test_an_allocation_that_was_forgotten_and_registered_anew_is_not_the_one_that_was_granted(
    scene: Scene, fake: FakeOutfitter
) -> None:
    async with scene.bus, scene.session:
        await scene.session.wait()
        key = scene.session.registration.host + "/w/1"
        forgotten = fake._workers.pop(key)
        fake.admit(forgotten.registration, forgotten.post)
        with anyio.fail_after(PATIENCE):
            while not (snapshot := scene.session.allocation_watch.read()).over:
                await scene.session.allocation_watch.changed(snapshot.version)
        assert isinstance(snapshot.error, outfitter.AllocationEndedError)
        assert "registered anew" in str(snapshot.error)
    await anyio.to_thread.run_sync(scene.manager.wait_until, lambda: bool(scene.manager.deregistrations))


@pytest.mark.parametrize("watches", [True, False])
async def test_a_process_that_this_machines_manager_watches_has_no_lease_to_lose(
    url: str, manager: ScriptedManager, *, watches: bool
) -> None:
    """From its first moment on: who watches stands in the commit that grants."""
    manager.watches = watches
    scene = Scene(url, manager, owned=True)
    async with scene.bus, scene.session:
        await scene.session.wait()
        with anyio.fail_after(PATIENCE):
            while (
                watches and not scene.session.allocation_watch.lease.watched
            ):  # the scripted manager commits in two steps
                await scene.session.allocation_watch.changed(scene.session.allocation_watch.read().version)
        await scene.outage()
        assert scene.session.allocation_watch.lease.at_risk is not watches


async def test_a_manager_that_sees_other_processes_takes_the_watch_away(url: str, manager: ScriptedManager) -> None:
    manager.watches = True
    scene = Scene(url, manager, owned=True)
    lease = scene.session.allocation_watch.lease
    async with scene.bus, scene.session:
        await scene.session.wait()
        with anyio.fail_after(PATIENCE):
            while not lease.watched:
                await scene.session.allocation_watch.changed(scene.session.allocation_watch.read().version)
            async with connect(url) as bus:
                await publish_record(bus, host_record(HOST))
            while lease.watched:
                await scene.session.allocation_watch.changed(scene.session.allocation_watch.read().version)
        await scene.outage()
        assert lease.at_risk


async def test_a_lease_that_is_given_later_counts_from_then(url: str, manager: ScriptedManager) -> None:
    """To a worker that asked for none, by a manager that cannot watch its owner any more."""
    asked = Register(host=HOST, worker="w", incarnation="1", lease_s=None)
    async with FaultyBus(url) as bus, WorkerSession(bus, asked) as session:
        record = await session.wait()
        lease = session.allocation_watch.lease
        lease.begin(lease.clock() - LONG)
        request = structs.replace(record.request, lease_s=60.0)
        given = structs.replace(record, request=request, unwatched="pid-namespace")
        with anyio.fail_after(PATIENCE):
            await publish_record(bus, given)
            while session.record == record:
                await session.allocation_watch.changed(session.allocation_watch.read().version)
            assert not lease.at_risk
            await anyio.to_thread.run_sync(manager.wait_until, lambda: len(manager.heartbeats) > 0)


async def test_a_deregistration_that_fails_says_why(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    async def hang() -> None:
        scene.at["publish:before"] = hang  # a heartbeat may be the first one
        await anyio.sleep_forever()

    async with scene.bus, scene.session:
        await scene.session.wait()
        scene.at["publish:before"] = hang
        await scene.session.deregister()
    assert "gpu-3/w/1: could not deregister: no answer within 3 s" in caplog.text
