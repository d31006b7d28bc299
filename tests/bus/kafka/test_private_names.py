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
import anyio
import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.bus.kafka.connecting import connection as connection_module
from outfitter_proto.bus.kafka.connecting.log_throttle import INTERVAL_S, LOGGERS, OncePerInterval
from outfitter_proto.bus.kafka.coordination import Coordination
from support.kafka.broker import KafkaBroker

MODULES = (
    aiokafka.client,
    aiokafka.conn,
    aiokafka.consumer.fetcher,
    aiokafka.consumer.group_coordinator,
    aiokafka.consumer.subscription_state,
    aiokafka.coordinator.assignors.sticky.sticky_assignor,
)


def test_the_private_names_that_repairing_needs_are_there() -> None:
    assert callable(getattr(aiokafka.consumer.fetcher.PartitionRecords, "_contains_abort_marker", None))


async def test_the_private_attributes_that_repairing_needs_are_there() -> None:
    consumer = AIOKafkaConsumer(bootstrap_servers="127.0.0.1:1")
    try:
        assert consumer._fetcher is None
    finally:
        await consumer.stop()


async def be_a_member(kafka_broker: KafkaBroker) -> None:
    """Join a group, get its partition, and leave."""
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.join(topic, topic, replica="a", session_timeout=10, heartbeat_interval=1) as member:
            with anyio.fail_after(30):
                assert await member.changed() == {0}


async def test_the_private_names_that_connections_need_are_there_and_called_as_they_were(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ours stand in for in one of aiokafka's clients must be met in the life of a member."""
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
    await be_a_member(kafka_broker)
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
    await be_a_member(kafka_broker)
    assert len(met) == 5


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
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"v")])])
        assert [logging.getLogger(name).filters for name in LOGGERS] == [[]] * len(LOGGERS)
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
