"""The names of aiokafka that are not public and that the adapter stands on: an upgrade that moves them fails here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

import aiokafka.client
import aiokafka.conn
import aiokafka.consumer.fetcher
import aiokafka.consumer.group_coordinator
import aiokafka.consumer.subscription_state
import aiokafka.coordinator.assignors.sticky.sticky_assignor
import aiokafka.producer.message_accumulator
import aiokafka.producer.sender
import aiokafka.producer.transaction_manager
import anyio
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.bus.kafka.connecting import connection as connection_module
from outfitter_proto.bus.kafka.connecting.log_throttle import INTERVAL_S, LOGGERS, OncePerInterval
from outfitter_proto.bus.kafka.coordination import Coordination
from outfitter_proto.bus.kafka.writing import producer as producer_module
from support.kafka.broker import KafkaBroker

MODULES = (
    aiokafka.client,
    aiokafka.conn,
    aiokafka.consumer.fetcher,
    aiokafka.consumer.group_coordinator,
    aiokafka.consumer.subscription_state,
    aiokafka.coordinator.assignors.sticky.sticky_assignor,
    aiokafka.producer.message_accumulator,
    aiokafka.producer.sender,
    aiokafka.producer.transaction_manager,
)


def test_the_private_names_that_writing_needs_are_there() -> None:
    sender = aiokafka.producer.sender
    for owner, names in {
        sender.Sender: ("_do_add_partitions_to_txn", "_do_txn_commit", "_send_produce_req", "_find_coordinator"),
        aiokafka.producer.transaction_manager.TransactionManager: (
            "maybe_add_partition_to_txn", "wait_for_transaction_end",
        ),
        aiokafka.consumer.fetcher.PartitionRecords: ("_contains_abort_marker",),
    }.items():  # fmt: skip
        assert [name for name in names if not callable(getattr(owner, name, None))] == []
    wanted = "client", "acks", "txn_manager", "message_accumulator", "retry_backoff_ms", "request_timeout_ms"
    assert set(wanted) <= set(inspect.signature(sender.Sender).parameters)
    assert inspect.iscoroutinefunction(sender.Sender._do_add_partitions_to_txn)


async def test_the_private_attributes_that_writing_and_repairing_need_are_there() -> None:
    producer = AIOKafkaProducer(bootstrap_servers="127.0.0.1:1", transactional_id="t")
    batch = producer.create_batch()
    consumer = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1")
    try:
        assert callable(producer.client.send)
        assert producer._txn_manager.transactional_id == "t"
        assert dict(producer._message_accumulator._batches) == {}
        assert set(producer._message_accumulator._pending_batches) == set()
        assert producer._sender.client is producer.client
        assert batch._relative_offset == batch.record_count() == 0
        assert list(inspect.signature(batch._builder.append).parameters)[:5] == [
            "offset", "timestamp", "key", "value", "headers",
        ]  # fmt: skip
        assert consumer._fetcher is None
    finally:
        await producer.stop()
        await consumer.stop()


async def test_the_private_names_that_connections_need_are_there_and_called_as_they_were(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ours stand in for in one of aiokafka's clients must be met in the life of a writer."""
    conn, client = aiokafka.conn.AIOKafkaConnection, aiokafka.client.AIOKafkaClient
    for owner, names in {
        conn: (
            "_do_sasl_handshake",
            "authenticator_plain",
            "authenticator_scram",
            "authenticator_oauth",
            "connect",
            "_next_correlation_id",
        ),
        client: ("bootstrap", "_get_conn", "_md_synchronizer", "_on_connection_closed", "force_metadata_update"),
    }.items():
        assert [name for name in names if not callable(getattr(owner, name, None))] == []
    assert "await self._do_sasl_handshake()" in inspect.getsource(conn.connect)
    attributes = inspect.getsource(conn.__init__), inspect.getsource(client.__init__)
    for source, wanted in zip(
        attributes,
        (
            (
                "_requests",
                "_writer",
                "_protocol",
                "_on_close_cb",
                "_sasl_mechanism",
                "_versions",
                "_client_id",
                "_request_timeout",
            ),
            ("_conns", "_sync_task", "_request_timeout_ms", "_client_id"),
        ),
        strict=True,
    ):
        assert [name for name in wanted if f"self.{name} = " not in source] == []
    met: set[str] = set()
    for name in ("bootstrap", "get"):
        ours = getattr(connection_module._Connections, name)

        def recording(*args: object, name: str = name, ours: Callable[..., object] = ours, **more: object) -> object:
            met.add(name)
            return ours(*args, **more)

        monkeypatch.setattr(connection_module._Connections, name, recording)
    async with connect(kafka_broker.url) as bus, await bus.open_writer(KafkaBroker.new_cluster(), 0):
        pass
    assert met == {"bootstrap", "get"}


async def test_the_private_names_that_membership_needs_are_there_and_called_as_they_were(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method that ours stands in for must be met in the life of one member, else ours has no effect."""
    met: set[str] = set()
    for name in (
        "_coordination_routine", "_on_join_complete", "_send_req", "start_commit_offsets_refresh_task",
        "reset_generation",
    ):  # fmt: skip
        ours = vars(Coordination)[name]
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(getattr(GroupCoordinator, name))

        def recording(*args: object, name: str = name, ours: Callable[..., object] = ours) -> object:
            met.add(name)
            return ours(*args)

        monkeypatch.setattr(Coordination, name, recording)
    source = inspect.getsource(aiokafka.consumer.group_coordinator)
    assert "await self._push_error_to_user(exc)" in source
    for attribute in (
        "_group_instance_id", "_session_timeout_ms", "_closing", "_rejoin_needed_fut", "_performed_join_prepare",
        "_coordination_task", "_heartbeat_task", "_subscription", "_client", "coordinator_id", "generation",
        "member_id",
    ):  # fmt: skip
        assert f"self.{attribute} = " in source
    assert StickyPartitionAssignor.member_assignment is None
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.join(topic, topic, replica="a", session_timeout=10, heartbeat_interval=1) as member:
            with anyio.fail_after(30):
                assert await member.changed() == {0}
    assert len(met) == 5


async def test_the_wait_between_transactions_is_still_aiokafkas_own_and_still_met(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowered wait must be returned at least once in 500 transactions, else lowering it has no effect."""
    assert aiokafka.producer.sender.BACKOFF_OVERRIDE == 0.02
    waits: list[float | None] = []
    handle = producer_module._QuickAddPartitions.handle_response

    def recording(handler: producer_module._QuickAddPartitions, response: object) -> float | None:
        waits.append(handle(handler, response))
        return waits[-1]

    monkeypatch.setattr(producer_module._QuickAddPartitions, "handle_response", recording)
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.open_writer(topic, 0) as writer:
            for _ in range(500):  # until the markers of one are still being written when the next one begins
                await writer.commit([(topic, [Entry(b"k", b"v")])])
                if producer_module.NEXT_TRANSACTION_WAIT in waits:
                    break
            assert not writer.must_reopen
    assert producer_module.NEXT_TRANSACTION_WAIT in waits
    assert 0.02 not in waits
    assert aiokafka.producer.sender.BACKOFF_OVERRIDE == 0.02


async def test_using_the_bus_changes_nothing_global_in_aiokafka(kafka_broker: KafkaBroker) -> None:
    before = {module.__name__: dict(vars(module)) for module in MODULES}
    classes = {
        cls: _defined(cls)
        for module in MODULES
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__.startswith("aiokafka")
    }
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        await bus.publish(topic, 0, Entry(b"k", b"v"))
        async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
            assert await reader.fetch(timeout=10)
        assert [logging.getLogger(name).filters for name in LOGGERS] == [[]] * len(LOGGERS)
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"v")])])
            async with await bus.join(topic, topic, replica="a", session_timeout=10, heartbeat_interval=1) as member:
                with anyio.fail_after(30):
                    assert await member.changed() == {0}
            assert all(logging.getLogger(name).filters for name in LOGGERS)
    assert {module.__name__: dict(vars(module)) for module in MODULES} == before
    assert {cls: _defined(cls) for cls in classes} == classes
    assert [logging.getLogger(name).filters for name in LOGGERS] == [[]] * len(LOGGERS)


def _defined(cls: type) -> dict[str, object]:
    """What is in a class, but for what Python notes there when it copies the first instance."""
    return {name: value for name, value in vars(cls).items() if name != "__slotnames__"}


def test_repeated_log_lines_of_one_kind_pass_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    once = OncePerInterval()

    def passes(text: str, *args: object) -> bool:
        return once.filter(logging.LogRecord("aiokafka", logging.ERROR, "", 0, text, args, None))

    assert passes("no connection to %s", 1)
    assert not passes("no connection to %s", 2)
    assert passes("another %s", 2)
    now[0] += INTERVAL_S
    assert passes("no connection to %s", 3)
