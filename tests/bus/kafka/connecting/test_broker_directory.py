"""What one bus learns of its brokers: who hangs, and who leads by now."""

from __future__ import annotations

import asyncio

import pytest

from outfitter_proto.bus import TopicSpec, connect
from outfitter_proto.bus.kafka.connecting import broker_directory
from outfitter_proto.bus.kafka.connecting.broker_directory import BrokerDirectory
from outfitter_proto.bus.kafka.connecting.login import Node
from support.kafka.broker import KafkaBroker

A, B, C = Node("a", 1), Node("b", 2), Node("c", 3)


def test_whoever_hung_is_asked_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_directory, "DOUBT_S", 1000.0)
    found = BrokerDirectory([A, B])
    found.learn({1: B, 2: C})
    assert found.order() == [A, B, C]
    found.doubt(A)
    assert found.order() == [B, C, A]
    monkeypatch.setattr(broker_directory, "DOUBT_S", 0.0)
    assert found.order() == [A, B, C]


def test_an_only_broker_is_never_doubted() -> None:
    found = BrokerDirectory([A])
    found.doubt(A)
    assert not found.doubtful(A)


def test_a_leader_counts_until_a_later_epoch_of_its_partition_is_known() -> None:
    found = BrokerDirectory([A])
    assert found.note_epoch("topic", 0, 7)
    assert found.note_epoch("topic", 0, 7)
    assert found.note_epoch("topic", 0, 8)
    assert not found.note_epoch("topic", 0, 7)
    assert found.note_epoch("topic", 1, 7)
    assert found.note_epoch("made anew", 0, 0)


@pytest.mark.kafka
async def test_a_broker_that_hangs_is_waited_for_once_and_not_by_each_client_on_its_own(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_directory, "DOUBT_S", 1000.0)
    visits = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"kafka://127.0.0.1:{port},{kafka_broker.bootstrap}") as bus:
            topic = KafkaBroker.new_cluster()
            await bus.create_topics([TopicSpec(topic, 1, {})])
            for _ in range(3):
                async with await bus.open_reader(topic, 0, start=0, committed=True) as reader:
                    await reader.fetch(timeout=0.01)
                async with await bus.open_writer(topic, 0):
                    pass
                assert await bus.stable_end(topic, 0) == 0
            assert visits == 1
