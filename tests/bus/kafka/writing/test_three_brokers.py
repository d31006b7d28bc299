"""Transactions on three brokers: each topic led by another one, and a coordinator that moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

import anyio
import anyio.to_thread
import pytest
from confluent_kafka.admin import NewTopic

from outfitter_proto.bus import Bus, BusError, CommitUnknownError, Entry, Writer, connect
from outfitter_proto.bus.kafka import adapter
from outfitter_proto.bus.kafka.connecting import cluster
from outfitter_proto.bus.kafka.writing.steps import Known
from support.bus.committed import committed
from support.kafka.broker import VERSION_1, KafkaBroker
from support.kafka.cluster import KafkaCluster, running
from support.kafka.transactions import end, leave_open

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(600)]

WITHIN = 120.0
NODES = 1, 2, 3


@pytest.fixture(scope="module", params=[(), VERSION_1], ids=["version 2", "version 1"])
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    with running(KafkaCluster(tmp_path_factory.mktemp("kafka"), options=request.param)) as cluster:
        yield cluster


class Apart:
    """Three topics with a leader each, and a writer identity whose coordinator is one of them."""

    def __init__(self, bus: Bus, cluster: KafkaCluster, topics: list[str]) -> None:
        self.bus = bus
        self.cluster = cluster
        self.topics = topics
        self.identity = topics[-1]

    async def open(self) -> Writer:
        """The writer, taken as often as it takes."""
        with anyio.fail_after(WITHIN):
            while True:
                try:
                    return await self.bus.open_writer(self.identity, 0, topics=self.topics)
                except BusError:
                    await anyio.sleep(0.1)

    async def commit(self, writer: Writer, value: bytes) -> None:
        await writer.commit([(topic, [Entry(b"k", value)]) for topic in self.topics])

    async def seen(self) -> list[bytes | None]:
        """What is committed, the same in all topics."""
        found = [[message.value for message in await committed(self.bus, topic)] for topic in self.topics]
        assert found == [found[0]] * len(found)
        return found[0]

    async def do(self, harm: Callable[[], None]) -> None:
        await anyio.to_thread.run_sync(harm)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is given up, however long a busy machine takes to move a leader."""
    monkeypatch.setattr(cluster, "REQUEST_TIMEOUT", WITHIN / 2)
    monkeypatch.setattr(adapter, "WATCHDOG", WITHIN)


@pytest.fixture
async def apart(three: KafkaCluster) -> AsyncIterator[Apart]:
    name = KafkaBroker.new_cluster()
    topics = [f"{name}-{node}" for node in NODES]
    assignments = [[node, *(other for other in NODES if other != node)] for node in NODES]
    three.create(
        [NewTopic(topic, 1, replica_assignment=[nodes]) for topic, nodes in zip(topics, assignments, strict=True)]
    )
    assert [three.leader(topic, 0) for topic in topics] == list(NODES)
    async with connect(three.url) as bus:
        yield Apart(bus, three, topics)
    three.settle()


@pytest.mark.usefixtures("patient")
async def test_a_commit_goes_to_every_leader_and_its_end_to_the_coordinator(apart: Apart) -> None:
    async with await apart.open() as writer:
        for value in b"1", b"2", b"3":
            await apart.commit(writer, value)
        assert not writer.must_reopen
        assert await apart.bus.tenure(apart.identity) == writer.tenure
    assert await apart.seen() == [b"1", b"2", b"3"]


@pytest.mark.usefixtures("patient")
async def test_a_coordinator_or_a_leader_may_move_between_commits(apart: Apart) -> None:
    identity, moved = apart.identity, apart.topics[0]
    async with await apart.open() as writer:
        await apart.commit(writer, b"1")
        for node in NODES:
            await apart.do(partial(apart.cluster.move_transaction_coordinator, identity, node))
            await apart.commit(writer, b"coordinator %d" % node)
            await apart.do(partial(apart.cluster.move_leader, moved, 0, node))
            await apart.commit(writer, b"leader %d" % node)
        assert not writer.must_reopen
        assert await apart.bus.tenure(identity) == writer.tenure
    assert len(await apart.seen()) == 7


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_coordinator_or_a_leader_may_move_in_the_middle_of_a_transaction(apart: Apart, commit: bool) -> None:
    async with await apart.open() as writer:
        for node in NODES:
            await leave_open(writer, *apart.topics, value=b"%d" % node)
            await apart.do(partial(apart.cluster.move_transaction_coordinator, apart.identity, node))
            await apart.do(partial(apart.cluster.move_leader, apart.topics[0], 0, node))
            with anyio.fail_after(WITHIN):
                while (known := await end(writer, commit=commit)) is not Known.DONE:
                    assert known in (Known.NOT_YET, Known.ELSEWHERE, Known.DOUBT)
                    await anyio.sleep(0.01)
        await apart.commit(writer, b"last")
    assert await apart.seen() == ([b"1", b"2", b"3", b"last"] if commit else [b"last"])


@pytest.mark.parametrize("node", NODES)
async def test_a_broker_that_is_killed_costs_no_commit_and_doubles_none(apart: Apart, node: int) -> None:
    """Each outcome that a writer names is the true one; of those that it calls unknown, any may be there."""
    broker = apart.cluster.brokers[node]
    outcomes: dict[bytes, str] = {}
    since_back = 0

    async def work() -> None:
        nonlocal since_back
        writer = await apart.open()
        while since_back < 20:
            value = b"%d" % len(outcomes)
            try:
                await apart.commit(writer, value)
                outcomes[value] = "committed"
                since_back += back.is_set()
            except CommitUnknownError:
                outcomes[value] = "unknown"
            except BusError:
                outcomes[value] = "not committed"
            if writer.must_reopen:
                await writer.aclose()
                writer = await apart.open()
            await anyio.sleep(0.005)
        await writer.aclose()

    back = anyio.Event()
    with anyio.fail_after(WITHIN):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await anyio.sleep(0.5)
            broker.kill9()
            await anyio.sleep(1.0)
            await broker.restarted()
            back.set()
    seen = await apart.seen()
    assert [value for value in outcomes if value in seen] == seen
    assert {outcomes[value] for value in outcomes if value in seen} <= {"committed", "unknown"}
    assert {outcomes[value] for value in outcomes if value not in seen} <= {"not committed", "unknown"}
