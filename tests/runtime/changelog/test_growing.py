"""`outfitter topics grow`: more partitions, and everything that was granted or asked for is where it belongs then."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Bus, Entry, TopicSpec
from outfitter_proto.names import managers_topic, topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_service.cli._lib import ledger_location
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.growth import growing_ledger
from outfitter_service.runtime.changelog.growth.grow import Grown, grow
from outfitter_service.runtime.changelog.growth.partition_contents import CannotGrowError
from outfitter_service.runtime.changelog.shape import TopicsChangedError
from outfitter_service.runtime.identity import host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.processor.processor import Limits
from outfitter_service.runtime.sweeper.group_member import SweeperMember
from support.bus.committed import committed
from support.bus.faulty_bus import FaultyBus, Killed, no_faults
from support.bus.remaking import add_partitions, ledger
from support.kafka.broker import KafkaBroker
from support.managers.in_process import HOST, InProcessManager, deregister, heartbeat, register, serving, static

pytestmark = pytest.mark.slow

FEW, MANY = 4, 8
OLD, NEW = 1, 5
"""The places of `HOST` among them."""
Serve = Callable[..., AbstractAsyncContextManager[InProcessManager]]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FaultyBus]:
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    if request.param == "kafka":
        url = request.getfixturevalue("kafka_broker").url
    async with FaultyBus(url) as bus:
        yield bus


@pytest.fixture
async def cluster(bus: Bus) -> str:
    cluster = KafkaBroker.new_cluster()
    await wanted.create(bus, cluster, partitions=FEW)
    assert (partition_of(HOST, FEW), partition_of(HOST, MANY)) == (OLD, NEW)
    return cluster


@pytest.fixture(params=["host", "cluster"])
def serve(request: pytest.FixtureRequest, bus: Bus, cluster: str, tmp_path: Path) -> Serve:
    """Serve `HOST`, which has one GPU, where it belongs now, in either scope."""

    async def always() -> bool:
        return True

    class Serving:
        cluster = ""

        def __init__(self, *, ready: bool = True) -> None:
            self._ready = ready

        @classmethod
        async def anew(cls) -> str:
            """Go on with another cluster."""
            cls.cluster = KafkaBroker.new_cluster()
            await wanted.create(bus, cls.cluster, partitions=FEW)
            return cls.cluster

        async def __aenter__(self) -> InProcessManager:
            cluster = self.cluster
            limits = Limits(lease_grace_s=0.1)
            options: dict[str, Any] = {"limits": limits, "cluster": cluster, "ready": self._ready}
            if request.param == "cluster":
                count = (await bus.topic(topics(cluster).allocations)).partitions
                number = partition_of(HOST, count)
                identity = of_partition(replica_identity(cluster), number)
                scope = PartitionScope(number, count, identity.writer)
                options |= {"identity": identity, "scope": scope, "owns_partition": always}
            self._manager = serving(bus, static(count=1), tmp_path, **options)
            return await self._manager.__aenter__()

        async def __aexit__(self, *exc: object) -> bool | None:
            return await self._manager.__aexit__(*exc)  # type: ignore[arg-type]

    Serving.cluster = cluster
    return Serving


async def say(bus: Bus, cluster: str, partition: int, *bodies: dict[str, Any], host: str = HOST) -> None:
    for body in bodies:
        entry = Entry(host.encode(), json.dumps(body).encode())
        await bus.publish(topics(cluster).registrations, partition, entry)


async def occupied(serve: Serve) -> None:
    """`w1` has the GPU, without a lease; `w2` waits; their manager is stopped."""
    async with serve() as manager:
        await manager.say(register("w1", gpu=1, lease_s=None))
        await manager.state("w1", "allocated")
        await manager.say(register("w2", gpu=1, lease_s=None))
        await manager.state("w2", "pending")
        await manager.stop()


async def goes_on(serve: Serve, *later: str) -> None:
    """`w1` still has the GPU and gives it back, and all others get it in their order."""
    async with serve() as manager:
        assert (await manager.state("w1", "allocated"))["token"] == 1
        before = "w1"
        for number, worker in enumerate(["w2", *later, "last"], start=2):
            if worker == "last":
                await manager.say(register("last", gpu=1, lease_s=None))
            await manager.state(worker, "pending")
            await manager.say(deregister(before))
            record = await manager.state(worker, "allocated")
            assert record["token"] == number
            before = worker
        await manager.stop()


async def everywhere(bus: Bus, cluster: str) -> dict[str, list[int]]:
    """In which partitions each key of the host is."""
    found: dict[str, list[int]] = {}
    for partition, records in (await ledger(bus, cluster)).items():
        for key in records:
            if key.startswith((b"h/", b"@host/h", b"@checkpoint/host/")):
                found.setdefault(key.decode(), []).append(partition)
    return found


async def test_what_is_granted_and_what_waits_goes_on_in_the_new_partition(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    await occupied(serve)
    done = await grow(bus, cluster, MANY)
    assert (done.before, done.partitions, done.hosts) == (FEW, MANY, [HOST])
    assert await everywhere(bus, cluster) == {key: [NEW] for key in await everywhere(bus, cluster)}
    assert {"h/w1/1", "h/w2/1", "@host/h"} <= (await everywhere(bus, cluster)).keys()
    assert await ledger_location.check(bus, cluster, HOST) == []
    await goes_on(serve)
    assert await grow(bus, cluster, MANY) == Grown(before=MANY, partitions=MANY, hosts=[], records=0, registrations=0)


async def test_it_may_grow_again_and_by_any_number(serve: Serve, bus: Bus, cluster: str) -> None:
    await occupied(serve)
    for partitions in (5, 6, 9, 13):
        await grow(bus, cluster, partitions)
        assert await ledger_location.check(bus, cluster, HOST) == []
    await goes_on(serve)


async def test_what_was_registered_and_not_read_is_answered_once(serve: Serve, bus: Bus, cluster: str) -> None:
    await occupied(serve)
    await say(bus, cluster, OLD, register("w3", gpu=1, lease_s=None), heartbeat("w2"), register("w4", gpu=1))
    await say(bus, cluster, OLD, deregister("w4"))
    done = await grow(bus, cluster, MANY)
    assert done.registrations == 3
    await goes_on(serve, "w3")
    assert await letters(bus, cluster) == []


async def test_what_one_host_has_read_is_not_sent_again_where_another_one_is_behind(
    bus: Bus, cluster: str, tmp_path: Path
) -> None:
    behind = "h5"
    assert (partition_of(behind, FEW), partition_of(behind, MANY)) == (OLD, NEW)
    identity = host_identity(cluster, behind)
    async with serving(bus, static(), tmp_path, cluster=cluster, partition=OLD, identity=identity) as manager:
        await manager.stop()
    async with serving(bus, static(), tmp_path, cluster=cluster) as manager:
        await manager.say(register("w1"), register("w2"))
        await manager.state("w2", "allocated")
        await manager.stop()
    await say(bus, cluster, OLD, register("late", host=behind), host=behind)
    assert (await grow(bus, cluster, MANY)).hosts == sorted([HOST, behind])
    assert await sent(bus, cluster, NEW) == ["late"]


async def sent(bus: Bus, cluster: str, partition: int) -> list[str]:
    """The workers of all messages in a partition of the input."""
    topic = topics(cluster).registrations
    _, end = await bus.offsets(topic, partition)
    found: list[str] = []
    async with await bus.open_reader(topic, partition, start=0, committed=False) as reader:
        while reader.position < end:
            found += [json.loads(message.value or b"")["worker"] for message in await reader.fetch(timeout=0.2)]
    return found


async def letters(bus: Bus, cluster: str) -> list[str]:
    """The reasons of all dead letters."""
    found: list[str] = []
    topic = topics(cluster).dead_letters
    for partition in range((await bus.topic(topic)).partitions):
        found += [json.loads(message.value or b"")["reason"] for message in await committed(bus, topic, partition)]
    return found


async def test_whoever_looks_after_what_is_nobodys_knows_what_was_right_before(
    serve: Serve, bus: Bus, cluster: str, tmp_path: Path
) -> None:
    """Old messages are no dead letters in the partition that their host has left; what comes there later is one."""
    await occupied(serve)
    scope = "cluster" if b"@checkpoint/partition/1" in (await ledger(bus, cluster))[OLD] else "host"
    stray = "o5"
    assert partition_of(stray, FEW) != OLD
    await say(bus, cluster, OLD, register("w3", gpu=1), heartbeat("w1"))
    await say(bus, cluster, OLD, register("x", host=stray), host=stray)
    await grow(bus, cluster, MANY)
    await say(bus, cluster, OLD, register("late", gpu=1))
    with anyio.fail_after(30):
        async with looking_after(bus, cluster, scope, tmp_path):
            while len(await letters(bus, cluster)) < 2:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.05)
    first, second = await letters(bus, cluster)
    assert f"host {stray!r} belongs to partition" in first
    assert f"host {HOST!r} belongs to partition {NEW} of {MANY}, not to {OLD}" in second


@asynccontextmanager
async def looking_after(bus: Bus, cluster: str, scope: str, folder: Path) -> AsyncIterator[None]:
    """Somebody answers for what is nobody's in the partition that `HOST` has left."""
    if scope == "cluster":

        async def always() -> bool:
            return True

        identity = of_partition(replica_identity(cluster), OLD)
        mine = PartitionScope(OLD, MANY, identity.writer)
        async with serving(
            bus, static(), folder, cluster=cluster, partition=OLD, identity=identity, scope=mine, owns_partition=always
        ):
            yield
        return
    identity = host_identity(cluster, "sweeping")
    sweeper = SweeperMember(
        bus, partitions=MANY, identity=identity, instruments=Instruments.of(Metrics([])), grace_s=0.1
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run)
        yield
        tasks.cancel_scope.cancel()


BACK, HOME, AWAY, SIZES = "h0", 1, 0, (2, 3, 5)
"""A host that is at home when there are two partitions, leaves when there are three, and comes back with five."""


@pytest.fixture
async def growing(bus: Bus) -> str:
    """A cluster with the first of `SIZES`, in which `BACK` had a manager, which is stopped."""
    assert [partition_of(BACK, size) for size in SIZES] == [HOME, AWAY, HOME]
    cluster = KafkaBroker.new_cluster()
    await wanted.create(bus, cluster, partitions=SIZES[0])
    return cluster


@asynccontextmanager
async def serving_back(bus: Bus, cluster: str, folder: Path) -> AsyncIterator[InProcessManager]:
    """The manager of `BACK`, where it belongs now. It forgets at once what is over."""
    count = (await bus.topic(topics(cluster).allocations)).partitions
    identity = host_identity(cluster, BACK)
    async with serving(
        bus, static(count=1), folder, cluster=cluster, partition=partition_of(BACK, count), identity=identity,
        retention_s=0.0,
    ) as manager:  # fmt: skip
        yield manager
        await manager.stop()


async def test_what_was_said_in_a_partition_before_its_host_left_it_is_not_read_again_when_it_comes_back(
    growing: str, bus: Bus, tmp_path: Path
) -> None:
    """It was sent again, answered and forgotten in between."""
    async with serving_back(bus, growing, tmp_path):
        pass
    await say(bus, growing, HOME, register("gone", gpu=1, lease_s=None, host=BACK), host=BACK)
    assert (await grow(bus, growing, SIZES[1])).registrations == 1
    async with serving_back(bus, growing, tmp_path) as manager:
        await manager.until(lambda records: f"{BACK}/gone/1" in records)
        await say(bus, growing, AWAY, deregister("gone") | {"host": BACK}, host=BACK)
        await manager.until(lambda records: f"{BACK}/gone/1" not in records)
    await grow(bus, growing, SIZES[2])
    async with serving_back(bus, growing, tmp_path) as manager:
        await say(bus, growing, HOME, register("last", gpu=1, host=BACK), host=BACK)
        records = await manager.until(lambda records: records.get(f"{BACK}/last/1", {}).get("token") and records)
        assert f"{BACK}/gone/1" not in records


async def test_what_was_said_in_the_new_place_before_growing_was_done_is_answered(
    growing: str, bus: FaultyBus, tmp_path: Path
) -> None:
    """Some clients know of new partitions as soon as the registrations have them; the command may be killed then."""
    await grow(bus, growing, SIZES[1])
    async with serving_back(bus, growing, tmp_path):
        pass

    grown: list[str] = []

    async def kill(point: str) -> None:
        if point == "add_partitions:after":
            grown.append(point)
            if len(grown) == len(["managers", "registrations"]):
                raise Killed

    bus.script = kill
    with pytest.raises(Killed):
        await grow(bus, growing, SIZES[2])
    bus.script = no_faults
    await say(bus, growing, HOME, register("early", gpu=1, host=BACK), host=BACK)
    await grow(bus, growing, SIZES[2])
    async with serving_back(bus, growing, tmp_path) as manager:
        await manager.until(lambda records: f"{BACK}/early/1" in records)


async def test_a_manager_that_has_not_stopped_is_named_and_force_goes_on_without_its_word(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    async with serve() as manager:
        await manager.say(register("w1", gpu=1, lease_s=None))
        await manager.state("w1", "allocated")
        await manager.say(register("w2", gpu=1, lease_s=None))
        await manager.state("w2", "pending")
        with pytest.raises(CannotGrowError, match=r"the manager of 1 host has not said that it stopped \(h\)"):
            await grow(bus, cluster, MANY)
        assert (await bus.topic(topics(cluster).registrations)).partitions == FEW
    await grow(bus, cluster, MANY, force=True)  # it was killed
    await goes_on(serve)


async def test_there_is_no_way_back(bus: Bus, cluster: str) -> None:
    with pytest.raises(CannotGrowError, match="there are 4 partitions already, and their number cannot shrink to 3"):
        await grow(bus, cluster, 3)


async def test_partitions_that_somebody_added_by_hand_are_mended_by_it(serve: Serve, bus: Bus, cluster: str) -> None:
    await occupied(serve)
    await say(bus, cluster, OLD, register("w3", gpu=1, lease_s=None))
    await add_partitions(bus, cluster, MANY)
    assert [item.setting for item in await ledger_location.check(bus, cluster, HOST) if item.fatal]
    await grow(bus, cluster, MANY)
    await goes_on(serve, "w3")


async def test_what_a_manager_writes_behind_the_copy_is_not_deleted(
    bus: FaultyBus, cluster: str, tmp_path: Path
) -> None:
    """One that runs although everybody said that none does, and has not looked at its topics since."""
    async with serving(bus, static(), tmp_path, cluster=cluster) as manager:
        await manager.say(register("w1"))
        await manager.state("w1", "allocated")
        await manager.stop()

    async def write(point: str) -> None:
        if point == "commit:after" and b"h/w1/1" in (records := await ledger(bus, cluster)).get(NEW, {}):
            bus.script = no_faults
            key = b"@checkpoint/host/h"
            checkpoint = json.loads(records[OLD][key])
            entries = [
                Entry(b"h/w2/1", records[OLD][b"h/w1/1"]),
                Entry(key, json.dumps(checkpoint | {"commit": 99}).encode()),
            ]
            written = topics(cluster).written(history=True)
            async with await bus.open_writer(transactional_id(cluster, "host/h"), OLD, topics=written) as writer:
                await writer.commit([(topics(cluster).allocations, entries)])

    bus.script = write
    with pytest.raises(CannotGrowError, match="a manager still writes for host 'h'"):
        await grow(bus, cluster, MANY)
    assert b"h/w2/1" in (await ledger(bus, cluster))[OLD]


async def test_killed_at_any_point_nobody_lends_anything_twice_and_the_next_run_ends_well(
    serve: Serve, bus: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Managers that start in between refuse, or have all that there was, and nobody has a copy of it."""
    monkeypatch.setattr(growing_ledger, "FILL", 0.0)  # each record is a commit of its own
    for point in range(1, 80, 1 if bus.local else 7):
        cluster = await serve.anew()  # type: ignore[attr-defined]
        await occupied(serve)
        await say(bus, cluster, OLD, register("w3", gpu=1, lease_s=None))
        if await bus.killed(partial(grow, bus, cluster, MANY), point) < point:
            assert point > 10
            return
        async with serve(ready=False) as manager:  # type: ignore[call-arg]
            with anyio.fail_after(20):
                while not manager.ended.is_set() and not manager.processor.ready:  # noqa: ASYNC110 - it tells nobody
                    await anyio.sleep(0.005)
            if manager.processor.ready:
                records = await manager.until(lambda records: "h/w3/1" in records and records)
                assert {key: records[key]["state"] for key in ("h/w1/1", "h/w2/1", "h/w3/1")} == {
                    "h/w1/1": "allocated", "h/w2/1": "pending", "h/w3/1": "pending",
                }  # fmt: skip
                assert {len(places) for places in (await everywhere(bus, cluster)).values()} == {1}
                await manager.stop()
            else:
                assert isinstance(manager.failure, TopicsChangedError)
                assert f"outfitter topics grow --partitions {MANY}" in str(manager.failure)
        await grow(bus, cluster, MANY)
        assert await ledger_location.check(bus, cluster, HOST) == []
        assert {*await sent(bus, cluster, NEW)} <= {"w3"}, "what was answered is not said again"
        await goes_on(serve, "w3")
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("is_made", [True, False])
async def test_the_topic_of_managers_grows_with_the_others_if_there_is_one(bus: Bus, is_made: bool) -> None:
    """Also where the others have grown already."""
    cluster = KafkaBroker.new_cluster()
    of = wanted.required(cluster) | (wanted.optional(cluster) if is_made else {})
    await bus.create_topics([TopicSpec(name, FEW, {s.name: s.value for s in of[name]}) for name in of])
    await grow(bus, cluster, MANY)
    missing = [] if is_made else [(managers_topic(cluster), "missing")]
    assert [(item.topic, item.found) for item in await wanted.check(bus, cluster)] == missing
    if not is_made:
        settings = {s.name: s.value for s in wanted.MANAGERS}
        await bus.create_topics([TopicSpec(managers_topic(cluster), FEW, settings)])
        await grow(bus, cluster, MANY)
        assert await wanted.check(bus, cluster) == []
