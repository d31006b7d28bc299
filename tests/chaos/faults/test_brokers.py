"""Three brokers, three replicas of everything: one killed, stopped or frozen at a time, each in turn; two at once; the
transaction coordinator and the controller moving."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from confluent_kafka.admin import NewTopic

from chaos.scene import Note, playing
from outfitter_proto.bus import Bus, BusUnavailableError, Entry, TopicSpec, UnknownTopicError, connect
from outfitter_proto.bus.kafka import KafkaBus, authorization
from support.kafka.cluster import KafkaCluster

pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.timeout(400)]

NODES = (1, 2, 3)


def test_without_a_fault_nothing_is_lost_and_no_gap_is_seen(
    three_brokers: KafkaCluster, tmp_path: Path, note: Note
) -> None:
    """The control: what the figures of the others are to be compared with."""
    with playing(three_brokers, tmp_path, "no fault", note, beside_bare=True) as scene, scene.fault("nothing, for 5 s"):
        time.sleep(5)


def test_each_broker_killed_in_turn_loses_nothing(three_brokers: KafkaCluster, tmp_path: Path, note: Note) -> None:
    with playing(three_brokers, tmp_path, "kill -9", note, beside_bare=True) as scene:
        for node in NODES:
            with scene.fault(f"broker {node} of 3: kill -9, back after 4 s") as trouble:
                three_brokers.brokers[node].kill9()
                trouble.begin()
                time.sleep(4)
                three_brokers.restart(node)


def test_each_broker_stopped_in_turn_loses_nothing(three_brokers: KafkaCluster, tmp_path: Path, note: Note) -> None:
    with playing(three_brokers, tmp_path, "SIGTERM", note, beside_bare=True) as scene:
        for node in NODES:
            with scene.fault(f"broker {node} of 3: SIGTERM, started again") as trouble:
                trouble.begin()
                three_brokers.brokers[node].stop()
                three_brokers.restart(node)


@pytest.mark.parametrize("seconds", [5, 20])
def test_each_broker_frozen_in_turn_loses_nothing(
    three_brokers: KafkaCluster, tmp_path: Path, note: Note, seconds: int
) -> None:
    with playing(three_brokers, tmp_path, f"SIGSTOP {seconds}", note, beside_bare=True) as scene:
        for node in NODES:
            with scene.fault(f"broker {node} of 3: SIGSTOP {seconds} s") as trouble:
                scene.freeze(three_brokers.brokers[node].pid, seconds, trouble)
                three_brokers.settle()


def test_with_two_of_three_brokers_away_nothing_is_committed_and_nothing_is_lost(
    three_brokers: KafkaCluster, tmp_path: Path, note: Note
) -> None:
    with (
        playing(three_brokers, tmp_path, "two away", note, beside_bare=True) as scene,
        scene.fault("two of 3: kill -9 for 12 s") as trouble,
    ):
        away = scene.dice.sample(NODES, 2)
        for node in away:
            three_brokers.brokers[node].kill9()
        trouble.begin(2)
        time.sleep(12)
        for node in away:
            three_brokers.brokers[node].launch()
        for node in away:
            three_brokers.brokers[node].wait_until_ready()
        three_brokers.settle()


def test_a_transaction_coordinator_that_moves_away_and_back_loses_nothing(
    three_brokers: KafkaCluster, tmp_path: Path, note: Note
) -> None:
    with playing(three_brokers, tmp_path, "coordinator", note) as scene:
        identities = [scene.writer_id(host) for host in scene.hosts]
        with scene.fault("each transaction coordinator moves twice, no broker down") as trouble:
            trouble.begin(0)
            for identity in identities:
                before = three_brokers.transaction_coordinator(identity)
                elsewhere = scene.dice.choice([node for node in NODES if node != before])
                three_brokers.move_transaction_coordinator(identity, elsewhere)
                trouble.begin()
                scene.fleet.await_answers(1, since=time.monotonic())
                three_brokers.move_transaction_coordinator(identity, before)
                trouble.begin()


def test_a_controller_that_dies_or_freezes_loses_nothing(
    three_brokers: KafkaCluster, tmp_path: Path, note: Note
) -> None:
    with playing(three_brokers, tmp_path, "controller", note, beside_bare=True) as scene:
        with scene.fault("the controller: kill -9, started again") as trouble:
            node = three_brokers.controller()
            three_brokers.brokers[node].kill9()
            trouble.begin()
            three_brokers.restart(node)
            assert three_brokers.controller() != node
        with scene.fault("the controller: SIGSTOP 8 s") as trouble:
            node = three_brokers.controller()
            scene.freeze(three_brokers.brokers[node].pid, 8, trouble)
            three_brokers.settle()
            assert three_brokers.controller() != node


async def test_a_broker_that_wakes_up_is_not_believed_where_the_log_ends(three_brokers: KafkaCluster) -> None:
    """For a tenth of a second it takes itself for the leader: a ledger restored from it would lack commits."""
    topic = three_brokers.new_cluster()
    async with connect(f"kafka://{three_brokers.direct}") as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
    for address in three_brokers.direct.split(","):
        async with connect(f"kafka://{address}") as bus:
            await known(bus, topic)
    for _ in range(3):
        node = three_brokers.leader(topic, 0)
        addresses = three_brokers.direct.split(",")
        woken = addresses.pop(node - 1)
        three_brokers.brokers[node].pause()
        try:
            async with connect(f"kafka://{','.join(addresses)}") as bus:
                with anyio.fail_after(60):
                    await published(bus, topic)
                _, end = await bus.offsets(topic, 0)
        finally:
            three_brokers.brokers[node].resume()
        for urls in 20 * [f"kafka://{woken}", f"kafka://{woken},{addresses[0]}"]:
            async with connect(urls) as fresh:
                assert (await fresh.offsets(topic, 0))[1] == end
                assert await fresh.stable_end(topic, 0) == end
                async with await fresh.open_reader(topic, 0, start=end, committed=True) as reader:
                    assert await reader.fetch(timeout=0.01) == []
        await anyio.to_thread.run_sync(three_brokers.settle)


async def test_a_partition_without_a_leader_is_known_as_such(three_brokers: KafkaCluster) -> None:
    """So that no transaction is ended there: Kafka 4.3 would take it for deleted (KAFKA-20734)."""
    ledger = three_brokers.new_cluster()
    alone = f"{ledger}-alone"
    three_brokers.create([NewTopic(ledger, 1, len(NODES)), NewTopic(alone, 1, replica_assignment=[[2]])])
    try:
        async with KafkaBus(f"kafka://{three_brokers.direct}") as bus:
            with anyio.fail_after(60):
                await writable(bus, [ledger, alone], of=[ledger, alone, "no-such-topic"])
                three_brokers.brokers[2].kill9()
                await writable(bus, [ledger], of=[ledger, alone])
    finally:
        if not three_brokers.brokers[2].running:
            await anyio.to_thread.run_sync(three_brokers.brokers[2].start)
        three_brokers.admin.delete_topics([alone])[alone].result(30)
        await anyio.to_thread.run_sync(three_brokers.settle)


async def known(bus: Bus, topic: str) -> None:
    """Wait until the broker that `bus` asks has heard of the topic."""
    with anyio.fail_after(60):
        while True:
            try:
                await bus.topic(topic)
            except UnknownTopicError:
                await anyio.sleep(0.05)
            else:
                return


async def writable(bus: KafkaBus, wanted: list[str], *, of: list[str]) -> None:
    """Wait until just these are the topics that have a leader to write to."""
    while True:
        with suppress(BusUnavailableError):  # who was asked is the one that was killed
            if sorted(await authorization.writable(bus._cluster, of, 0)) == wanted:
                return
        await anyio.sleep(0.05)


async def published(bus: Bus, topic: str) -> int:
    """Publish a record, as often as it takes."""
    while True:
        try:
            return await bus.publish(topic, 0, Entry(b"k", b"v"))
        except BusUnavailableError:
            await anyio.sleep(0.1)
