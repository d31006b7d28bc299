"""Topics that get another layout: more partitions, or made anew. It is noticed, and no device is lent twice."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import anyio
import pytest
from aiokafka import AIOKafkaProducer
from msgspec import structs

from outfitter_proto import topics as wanted
from outfitter_proto.bus import Bus, BusUnavailableError, Entry, connect
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import topics, transactional_id
from outfitter_proto.partitioning import partition_of
from outfitter_service.cli._lib import ledger_location
from outfitter_service.runtime.changelog.numbers import SKIPPED
from outfitter_service.runtime.changelog.restore import restore as replay
from outfitter_service.runtime.changelog.topic_layout import TopicCheck, TopicsChangedError
from outfitter_service.runtime.identity import host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.scope import HostScope, PartitionScope
from outfitter_service.runtime.processor.processor import Limits
from support.bus.faulty_bus import FaultyBus
from support.bus.remaking import add_partitions, evaporate, ledger, remake, restore
from support.kafka.broker import Broker, KafkaBroker
from support.managers.assignments import assignment_of
from support.managers.in_process import HOST, InProcessManager, deregister, register, serving, static
from support.managers.process import Manager, ManagerError, StartManager

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

OFTEN = Limits(lease_grace_s=0.1, look_s=0.2)
NEVER = Limits(lease_grace_s=0.1, look_s=3600.0)
"""Those who are not to notice before they start again."""
FEW, STAYS, MOVES = 4, 6, 8
"""Numbers of partitions: `HOST` belongs to number 1 of the first two, and to 5 of the last."""
FORGETFUL = {
    "transactional.id.expiration.ms": "2000",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
}
Serve = Callable[..., AbstractAsyncContextManager[InProcessManager]]
SCOPES = ["host", "cluster"]


@pytest.fixture
async def bus(kafka_broker: KafkaBroker) -> AsyncIterator[Bus]:
    async with connect(kafka_broker.url) as bus:
        yield bus


@pytest.fixture
async def cluster(bus: Bus) -> str:
    cluster = KafkaBroker.new_cluster()
    await wanted.create(bus, cluster, partitions=FEW)
    return cluster


@pytest.fixture
def serve(serve_elsewhere: Callable[[Bus, str], Serve], bus: Bus, cluster: str) -> Serve:
    """Serve `HOST`, which has one GPU, in either scope."""
    return serve_elsewhere(bus, cluster)


@pytest.fixture(params=SCOPES)
def serve_elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Bus, str], Serve]:
    """`serve`, on any bus and cluster."""
    return partial(_serving, request.param, tmp_path)


def _serving(scope: str, tmp_path: Path, bus: Bus, cluster: str) -> Serve:
    async def always() -> bool:
        return True

    async def there() -> int:
        return (await bus.topic(topics(cluster).allocations)).partitions

    class Serving:
        def __init__(self, **options: object) -> None:
            self._options = {"limits": OFTEN} | options

        async def __aenter__(self) -> InProcessManager:
            if scope == "cluster":
                count = await there()
                number = partition_of(HOST, count)
                identity = of_partition(replica_identity(cluster), number)
                partition_scope = PartitionScope(number, count, identity.writer)
                self._options |= {"identity": identity, "scope": partition_scope, "owns_partition": always}
            self._manager = serving(bus, static(count=1), tmp_path, cluster=cluster, **self._options)  # type: ignore[arg-type]
            return await self._manager.__aenter__()

        async def __aexit__(self, *exc: object) -> bool | None:
            return await self._manager.__aexit__(*exc)  # type: ignore[arg-type]

    return Serving


async def granted(serve: Serve, *, limits: Limits = OFTEN) -> None:
    """A manager that grants the GPU to `w1`, which has no lease, and is stopped."""
    async with serve(limits=limits) as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await in_process.stop()


async def refused(serve: Serve, match: str, **options: object) -> None:
    """A manager that starts ends at once, and has lent nothing."""
    async with serve(ready=False, **options) as in_process:
        await ended(in_process, match)


async def ended(in_process: InProcessManager, match: str) -> None:
    """A manager ends by itself, with this error."""
    assert re.search(match, await in_process.ended_by(TopicsChangedError))


async def holders(bus: Bus, cluster: str) -> list[str]:
    """Who has the GPU, in whatever partition."""
    return [
        key.decode()
        for records in (await ledger(bus, cluster)).values()
        for key, value in records.items()
        if json.loads(value).get("state") == "allocated"
    ]


# --- more partitions --------------------------------------------------------------------------------------


async def test_more_partitions_are_refused_at_the_next_start(serve: Serve, bus: Bus, cluster: str) -> None:
    await granted(serve)
    await add_partitions(bus, cluster, MOVES)
    assert partition_of(HOST, MOVES) != partition_of(HOST, FEW)
    await bus.publish(topics(cluster).registrations, 5, Entry(HOST.encode(), json.dumps(register("w2")).encode()))
    await refused(
        serve, r"so that .*allocations/5 is the place of h, but their grants are in .*allocations/1:.*outfitter backup"
    )
    assert await holders(bus, cluster) == ["h/w1/1"]


async def test_more_partitions_are_refused_where_the_host_stays_in_its_own(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    """Its neighbours have moved, and it would look as if all was well."""
    await granted(serve)
    await add_partitions(bus, cluster, STAYS)
    assert partition_of(HOST, STAYS) == partition_of(HOST, FEW)
    await refused(serve, rf"have {STAYS} partitions, and the ledger in .* was written when there were 4")


async def test_more_partitions_end_a_manager_that_serves(serve: Serve, bus: Bus, cluster: str) -> None:
    async with serve() as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await add_partitions(bus, cluster, MOVES)
        await ended(
            in_process, "restore the file into a new ledger with 8 partitions"
        )  # all of them, or those that had more when it looked


@pytest.mark.parametrize("which", range(4))
async def test_more_partitions_of_one_topic_end_a_manager_that_serves(
    serve: Serve, bus: Bus, cluster: str, which: int
) -> None:
    async with serve() as in_process:
        await add_partitions(bus, cluster, MOVES, only=[topics(cluster)[which]])
        await ended(in_process, r"different numbers of partitions .*: 8.*a new ledger with 8 partitions")


async def test_a_new_host_starts_although_others_have_records(serve: Serve, bus: Bus, cluster: str) -> None:
    others = [next(f"o{n}" for n in range(99) if partition_of(f"o{n}", FEW) == place) for place in (0, 2, 3)]
    await restore(bus, cluster, {partition_of(o, FEW): {f"{o}/w/1".encode(): b"whatever"} for o in others})
    await granted(serve)


# --- made anew --------------------------------------------------------------------------------------------


async def test_a_ledger_made_anew_ends_a_manager_that_serves_and_no_next_one_starts(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    async with serve() as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await remake(bus, cluster, [topics(cluster).allocations])
        await ended(in_process, r"allocations was deleted and recreated while this manager served.*--adopt-ledger")
    await refused(serve, r"before, and .*allocations/1 holds nothing of it.*--adopt-ledger")
    await refused(serve, "--adopt-ledger")


async def test_a_ledger_made_anew_that_was_written_to_before_it_was_noticed_is_refused(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    async with serve(limits=NEVER) as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await remake(bus, cluster, [topics(cluster).allocations])
        await in_process.say(register("w2", gpu=1, lease_s=None))
        with anyio.fail_after(20):
            while not (await ledger(bus, cluster))[1]:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.02)
    await refused(serve, "was written to another topic of that name.*--adopt-ledger")
    assert await holders(bus, cluster) == []


async def test_a_ledger_made_anew_is_refused_although_the_last_manager_had_not_committed_anything(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    """The bus tells of the last holder alone: the one that granted something was another one."""
    await granted(serve)
    for writer in (host_writer(HOST), partition_writer(1)):
        identity = transactional_id(cluster, writer)
        async with await bus.open_writer(identity, 1):
            assert not await bus.has_committed(identity)
    await remake(bus, cluster, [topics(cluster).allocations])
    await refused(serve, r"before, and .*allocations/1 holds nothing of it.*--adopt-ledger")


async def test_a_ledger_made_anew_is_refused_when_the_last_manager_was_killed_in_a_transaction(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    await granted(serve)
    [key] = [key for key in (await ledger(bus, cluster))[1] if key.startswith(b"@checkpoint/")]
    identity = transactional_id(cluster, key.decode().removeprefix("@checkpoint/"))
    await abort(bus, identity, topics(cluster).allocations)
    await remake(bus, cluster, [topics(cluster).allocations])
    await refused(serve, "holds nothing of it.*--adopt-ledger")


async def abort(bus: Bus, identity: str, topic: str) -> None:
    """What the broker does in the name of a manager that was killed in a transaction."""
    producer = AIOKafkaProducer(bootstrap_servers=bus.url.removeprefix("kafka://"), transactional_id=identity)
    await producer.start()
    try:
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"never", key=b"lost", partition=1)
        await producer.abort_transaction()
    finally:
        await producer.stop()


async def test_a_rivals_first_commit_while_one_starts_is_no_sign_of_a_ledger_made_anew(
    tmp_path: Path, bus: Bus, cluster: str
) -> None:
    names, identity = topics(cluster), host_identity(cluster, HOST)
    scope = HostScope(HOST, identity.writer)
    async with await bus.open_writer(transactional_id(cluster, identity.writer), 1):
        pass  # the bus knows it now, and no commit of it
    for topic in (names.allocations, names.history):
        await bus.publish(topic, 1, Entry(b"@checkpoint/host/another", b"{}"))
    topic_check = TopicCheck(assignment_of(bus, identity, partition=1), history=True, adopt=False)
    await topic_check.check()
    replayed = await replay(bus, names.allocations, 1, scope)
    await granted(_serving("host", tmp_path, bus, cluster))
    await topic_check.check_restored(replayed, taken=True)


async def test_a_ledger_made_anew_is_refused_before_its_writer_is_fenced_although_others_write_to_the_partition(
    tmp_path: Path, bus: Bus, cluster: str
) -> None:
    """Whoever fences the last manager makes the bus forget what it knew: the next start would be no wiser."""
    await granted(_serving("host", tmp_path, bus, cluster))
    names, identity = topics(cluster), host_identity(cluster, HOST)
    await remake(bus, cluster, [names.allocations])
    topic_check = TopicCheck(assignment_of(bus, identity, partition=1), history=False, adopt=False)
    await topic_check.check()
    replayed = await replay(bus, names.allocations, 1, HostScope(HOST, identity.writer))
    await bus.publish(names.allocations, 1, Entry(b"@checkpoint/host/another", b"{}"))
    with pytest.raises(TopicsChangedError, match="holds nothing of it"):
        await topic_check.check_restored(replayed, taken=False)


async def test_a_ledger_made_anew_is_refused_before_its_writer_is_fenced_although_the_bus_is_away_for_a_moment(
    serve_elsewhere: Callable[[Bus, str], Serve], bus: Bus, cluster: str
) -> None:
    await granted(serve_elsewhere(bus, cluster))
    await remake(bus, cluster, [topics(cluster).allocations])
    points: list[str] = []

    async def fail_once(point: str) -> None:
        points.append(point)
        if points.count("look:before") == 1 and point == "look:before":
            raise BusUnavailableError("away for a moment")

    async with FaultyBus(bus.url, fail_once) as faulty:
        await refused(serve_elsewhere(faulty, cluster), "holds nothing of it.*--adopt-ledger")
    assert points.count("look:before") == 2
    assert "open_writer:before" not in points


async def test_a_ledger_made_anew_is_refused_when_kafka_has_forgotten_its_writers(
    tmp_path: Path, serve_elsewhere: Callable[[Bus, str], Serve]
) -> None:
    """As it does after a week. What the managers wrote beside the ledger tells."""
    broker = Broker(tmp_path / "kafka", FORGETFUL)
    broker.launch()
    try:
        await anyio.to_thread.run_sync(broker.wait_until_ready)
        async with connect(broker.url) as bus:
            cluster = KafkaBroker.new_cluster()
            await wanted.create(bus, cluster, partitions=FEW)
            serve = serve_elsewhere(bus, cluster)
            await granted(serve)
            await remake(bus, cluster, [topics(cluster).allocations])
            with anyio.fail_after(60):
                for writer in (host_writer(HOST), partition_writer(1)):
                    identity = transactional_id(cluster, writer)
                    while await bus.has_committed(identity):  # noqa: ASYNC110 - it tells nobody
                        await anyio.sleep(0.1)
            await refused(serve, r"have written to .*history/1, and .*allocations/1 is empty.*--adopt-ledger")
            async with serve(limits=structs.replace(OFTEN, adopt=True)) as in_process:
                await in_process.stop()
            await granted_again(serve)
    finally:
        broker.kill9()


@pytest.mark.parametrize("names", ["ledger", "all", "all with more partitions"])
async def test_topics_made_anew_while_nobody_served_are_refused_until_somebody_says_that_it_is_well(
    serve: Serve, bus: Bus, cluster: str, names: str
) -> None:
    await granted(serve)
    all_topics = topics(cluster)
    await remake(
        bus,
        cluster,
        [all_topics.allocations] if names == "ledger" else all_topics,
        partitions=STAYS if names == "all with more partitions" else None,
    )
    await refused(serve, "holds nothing of it.*--adopt-ledger")
    async with serve(limits=structs.replace(OFTEN, adopt=True)) as in_process:
        await in_process.say(register("w2", gpu=1))
        records = await in_process.until(lambda records: f"{HOST}/w2/1" in records and records)
        # so nobody takes a grant for one of the lost ledger
        assert all(record["token"] > SKIPPED for key, record in records.items() if key.startswith("@checkpoint/"))
        await in_process.stop()
    await granted_again(serve)


async def granted_again(serve: Serve) -> None:
    """Once adopted it needs nobody's word any more."""
    async with serve() as in_process:
        await in_process.stop()


async def test_a_copy_of_the_ledger_is_refused_until_somebody_says_that_it_is_well(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    await granted(serve)
    copy = await ledger(bus, cluster)
    await remake(bus, cluster, [topics(cluster).allocations])
    await restore(bus, cluster, copy)
    await refused(serve, "was written to another topic of that name.*restored from a copy.*--adopt-ledger")
    async with serve(limits=structs.replace(OFTEN, adopt=True)) as in_process:
        await in_process.say(register("w2", gpu=1))
        await in_process.state("w2", "pending")


async def test_a_copy_with_other_places_is_refused(serve: Serve, bus: Bus, cluster: str) -> None:
    await granted(serve)
    copy = await ledger(bus, cluster)
    await remake(bus, cluster, [topics(cluster).allocations])
    await restore(bus, cluster, {3: copy[1]})
    for adopt in (False, True):
        await refused(serve, "but their grants are in .*/3", limits=structs.replace(OFTEN, adopt=adopt))


async def test_a_ledger_that_names_neither_partitions_nor_topic_is_gone_on_with_and_names_them_then(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    await granted(serve)
    copy = await ledger(bus, cluster)
    [(key, value)] = [(key, value) for key, value in copy[1].items() if key.startswith(b"@checkpoint/")]
    body = json.loads(value)
    assert (body.pop("partitions"), body.pop("ledger_id")) == (FEW, (await bus.topic(topics(cluster).allocations)).id)
    await restore(bus, cluster, {1: {key: json.dumps(body).encode()}})
    async with serve() as in_process:
        records = await in_process.until(lambda records: "partitions" in records.get(key.decode(), {}) and records)
        assert records["h/w1/1"]["state"] == "allocated"


async def test_deleted_records_of_the_ledger_end_a_manager_that_serves(serve: Serve, bus: Bus, cluster: str) -> None:
    async with serve() as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await evaporate(bus, cluster, but=0)
        await ended(in_process, r"the records of .*allocations/1 before offset \d+ were deleted.*--adopt-ledger")


async def test_deleted_records_of_the_ledger_are_refused_until_somebody_says_that_it_is_well(
    serve: Serve, bus: Bus, cluster: str
) -> None:
    """The last checkpoint is still there, and of what was granted before nothing."""
    await granted(serve)
    await evaporate(bus, cluster, but=2)
    assert [(each.setting, each.fatal) for each in await ledger_location.check(bus, cluster, HOST)] == [("start", True)]
    for _ in range(2):
        await refused(serve, r"the records of .*allocations/1 before offset \d+ were deleted.*--adopt-ledger")
    assert await holders(bus, cluster) == []
    async with serve(limits=structs.replace(OFTEN, adopt=True)) as in_process:
        await in_process.say(register("w2", gpu=1, lease_s=None))
        with anyio.fail_after(20):
            while await holders(bus, cluster) != [f"{HOST}/w2/1"]:  # noqa: ASYNC110 - it tells nobody
                await anyio.sleep(0.02)
        await in_process.stop()
    assert await ledger_location.check(bus, cluster, HOST) == []
    await granted_again(serve)


async def test_records_deleted_after_the_look_at_the_topics_are_noticed_once_the_ledger_is_replayed(
    tmp_path: Path, bus: Bus, cluster: str
) -> None:
    await granted(_serving("host", tmp_path, bus, cluster))
    names, identity = topics(cluster), host_identity(cluster, HOST)
    scope = HostScope(HOST, identity.writer)
    topic_check = TopicCheck(assignment_of(bus, identity, partition=1), history=True, adopt=False)
    await topic_check.check()
    await evaporate(bus, cluster, but=2)
    replayed = await replay(bus, names.allocations, 1, scope)
    assert replayed.checkpoint is not None
    with pytest.raises(TopicsChangedError, match=r"the records of .*allocations/1 before offset \d+ were deleted"):
        await topic_check.check_restored(replayed, taken=False)


@pytest.mark.parametrize("beyond", [False, True])
async def test_registrations_made_anew_under_a_manager_are_all_answered(
    serve: Serve, bus: Bus, cluster: str, beyond: bool
) -> None:
    async with serve(limits=structs.replace(OFTEN, look_s=0.5)) as in_process:
        for number in range(5):
            await in_process.say(register(f"w{number}", gpu=1, lease_s=None))
        await in_process.state("w4", "pending")
        await remake(bus, cluster, [topics(cluster).registrations])
        await in_process.say(deregister("w0"))
        if beyond:
            await in_process.say(*[register(f"v{number}", gpu=1, lease_s=None) for number in range(9)])
        await in_process.state("w1", "allocated")
        await in_process.until(lambda records: not beyond or all(f"h/v{number}/1" in records for number in range(9)))
        # the reader may meet the new topic before its id is known
        assert in_process.metric("outfitter_input_lost_total") >= 1


@pytest.mark.parametrize("which", ["history", "dead_letters"])
async def test_history_and_dead_letters_may_be_made_anew(serve: Serve, bus: Bus, cluster: str, which: str) -> None:
    async with serve() as in_process:
        await in_process.say(register("w1", gpu=1, lease_s=None))
        await in_process.state("w1", "allocated")
        await remake(bus, cluster, [getattr(topics(cluster), which)])
        await in_process.say(register("w2", gpu=1))
        await in_process.state("w2", "pending")
        await in_process.publish(b"no registration")
        await in_process.dead_letters(1)
        await in_process.until(lambda _: in_process.failure is None)
    async with serve() as in_process:
        await in_process.state("w1", "allocated")


# --- as a user meets it -----------------------------------------------------------------------------------


async def test_doubled_partitions_do_not_lend_a_device_twice(
    kafka_broker: KafkaBroker, start_manager: StartManager, bus: Bus
) -> None:
    cluster = KafkaBroker.new_cluster()
    await wanted.create(bus, cluster, partitions=12)
    manager = start_manager(bus=kafka_broker.url, host="k0", cluster=cluster, gpus=1)
    assert manager.outfitter("register", "--worker", "w1", "--lease", "none", "--wait", "20s").returncode == 0
    manager.stop()
    await add_partitions(bus, cluster, 24)
    assert (partition_of("k0", 12), partition_of("k0", 24)) == (5, 17)
    with pytest.raises(ManagerError, match="ended with 1 before it was"):
        manager.start()
    assert "restore the file into a new ledger with 24 partitions" in manager.log_tail()
    assert "internal error" not in manager.log_tail()
    assert await holders(bus, cluster) == [record["key"] for record in _keys(manager)]


def _keys(manager: Manager) -> list[dict[str, str]]:
    return [
        {"key": f"{record['host']}/{record['worker']}/{record['incarnation']}"}
        for record in manager.records()
        if record["state"] == "allocated"
    ]
