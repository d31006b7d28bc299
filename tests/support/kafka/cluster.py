"""Three real Kafka brokers that are also the controllers (KRaft), to be killed, stopped and frozen one at a time.

    with running(KafkaCluster(folder)) as cluster:
        cluster.brokers[2].kill9()
        cluster.restart(2)      # and wait until all replicas are in sync and leaders where they belong

Everything has three replicas and needs two. Each node listens twice for clients: at `bootstrap`, which may lead through
proxies that do harm (support/kafka/proxy.py), and at `direct`, which never does: loads and checkers use that one.
An open port is not enough: see `KafkaCluster.start`. Ended by its own processes' ids, like `Broker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from aiokafka.protocol.admin import AlterPartitionReassignmentsRequest
from confluent_kafka import ElectionType, KafkaError, KafkaException, Producer, TopicCollection
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic, ResourceType

from outfitter_proto.bus import connect
from support.kafka.broker import NEW, VERSION_1, Broker, BrokerError, KafkaBroker, free_port

READY_WITHIN = 120.0
"""Seconds for three nodes on a busy machine."""
INTERNAL_PARTITIONS = 4


def _not_worth_a_word(_error: KafkaError) -> None:
    """Brokers go away here all the time."""


QUIET: Mapping[str, Any] = {"log_level": 0, "error_cb": _not_worth_a_word}
"""For confluent-kafka's clients."""


class KafkaCluster(KafkaBroker):
    """`nodes` brokers with as many replicas of everything. `proxies`: by node, where clients are led instead."""

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int = 3,
        kafka: str = NEW,
        settings: Mapping[str, str] | None = None,
        proxy: Callable[[int, int], int] | None = None,
        within: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        """`proxy(node, port)` returns the port at which that node's port is offered to clients.

        `within`, `options`: see `Broker`.
        """
        self.kafka = kafka
        self.transactions = 2 if kafka == NEW and tuple(options) != VERSION_1 else 1
        """The version of its transactions."""
        numbers = range(1, nodes + 1)
        ports = {node: (free_port(), free_port(), free_port()) for node in numbers}
        offered = {node: proxy(node, ports[node][0]) if proxy else ports[node][0] for node in numbers}
        self.voters = {node: controller for node, (_, _, controller) in ports.items()}
        self.direct = ",".join(f"127.0.0.1:{direct}" for _, direct, _ in ports.values())
        """Where loads and checkers connect: no proxy stands there."""
        self.brokers = {
            node: Broker(
                folder / f"node{node}",
                self._settings(node, ports[node], offered[node], nodes) | dict(settings or {}),
                port=ports[node][0],
                options=("--heap", "256m", *(() if kafka == NEW else ("--kafka", kafka)), *options),
                within=within,
            )
            for node in numbers
        }
        super().__init__(",".join(f"127.0.0.1:{offered[node]}" for node in numbers))
        self._admin: AdminClient | None = None

    def _settings(self, node: int, ports: tuple[int, int, int], offered: int, nodes: int) -> dict[str, str]:
        client, direct, controller = ports
        replicas, least = str(nodes), str((nodes + 1) // 2)
        topics = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        return {
            "node.id": str(node),
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{port}" for n, port in self.voters.items()),
            "listeners": f"CLIENT://127.0.0.1:{client},DIRECT://127.0.0.1:{direct},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"CLIENT://127.0.0.1:{offered},DIRECT://127.0.0.1:{direct}",
            "listener.security.protocol.map": "CLIENT:PLAINTEXT,DIRECT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "DIRECT",
            "default.replication.factor": replicas,
            "min.insync.replicas": least,
            **{f"{topic}.replication.factor": replicas for topic in topics},
            **{f"{topic}.num.partitions": str(INTERNAL_PARTITIONS) for topic in topics},
            **{f"{topic}.min.isr": least for topic in topics[1:]},
            # Kafka's default is 9 s, and that is how long a partition stays without a leader after a kill
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
        }

    # --- its life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all nodes and wait until the cluster is one: all nodes in the metadata, a topic with all replicas in
        sync, one transaction committed (which makes Kafka's internal topics), all replicas of those in sync."""
        for broker in self.brokers.values():
            broker.launch()
        deadline = time.monotonic() + READY_WITHIN
        for broker in self.brokers.values():
            broker.wait_until_ready()
        self._until(lambda: len(self.admin.list_topics(timeout=5).brokers) == len(self.brokers), "one", deadline)
        probe = self.new_cluster()
        self._until(lambda: self._made(probe), f"able to make topic {probe}", deadline)
        self._until(lambda: self._in_sync([probe]), "in sync", deadline)
        producer = Producer({"bootstrap.servers": self.direct, "transactional.id": probe, **QUIET})
        producer.init_transactions(deadline - time.monotonic())
        producer.begin_transaction()
        producer.produce(probe, b"probe")
        producer.commit_transaction(30)
        self.admin.delete_topics([probe])[probe].result(30)
        self.settle()

    def configure(self, topic: str, **settings: str) -> None:
        """Change some of a topic's settings, with `_` for dots, and leave the others."""
        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        self.admin.incremental_alter_configs([resource])[resource].result(15)

    def create(self, topics: Sequence[NewTopic]) -> None:
        """Make topics."""
        for made in self.admin.create_topics(list(topics), operation_timeout=10).values():
            made.result(15)

    def settle(self, within: float = READY_WITHIN) -> None:
        """Wait until all replicas are in sync and the leaders are where they belong: else later faults hit nothing."""
        deadline = time.monotonic() + within
        self._until(lambda: len(self.admin.list_topics(timeout=5).brokers) == len(self.brokers), "whole", deadline)
        self._until(self._in_sync, "in sync", deadline)
        self._until(self._led_as_preferred, "led by its preferred leaders", deadline)

    def restart(self, node: int) -> None:
        """Start a node that has ended, and wait as `settle` does."""
        self.brokers[node].start()
        self.settle()

    def stop(self) -> None:
        """End all nodes. Repeatable."""
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            # an orderly end waits for the others, and nobody needs this data again
            list(pool.map(Broker.kill9, self.brokers.values()))

    # --- who does what ------------------------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        """A client of Kafka's administration, without a proxy in its way."""
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.direct, "socket.timeout.ms": 5000, **QUIET})
        return self._admin

    def leader(self, topic: str, partition: int) -> int:
        """The node that leads a partition; waits until there is one, and a new topic is known everywhere."""
        found: list[int] = []

        def is_led() -> bool:
            partitions = self.admin.list_topics(topic, timeout=10).topics[topic].partitions
            found[:] = [partitions[partition].leader] if partition in partitions else []
            return bool(found) and found[0] > 0

        self._until(is_led, f"leading {topic}/{partition}", time.monotonic() + READY_WITHIN)
        return found[0]

    def transaction_coordinator(self, identity: str) -> int:
        """The node that coordinates a transactional id: the leader of its partition of `__transaction_state`."""
        return self.leader(*_coordinated(identity))

    def move_transaction_coordinator(self, identity: str, node: int) -> None:
        """Have another node coordinate a transactional id, while all go on."""
        self.move_leader(*_coordinated(identity), node)

    def move_leader(self, topic: str, partition: int, node: int) -> None:
        """Have another node lead a partition, while all go on: the same replicas in another order, and an election."""
        replicas = [node, *(other for other in self.brokers if other != node)]

        async def reassign() -> None:
            async with connect(f"kafka://{self.direct}") as bus:
                request = AlterPartitionReassignmentsRequest(10_000, [(topic, [(partition, replicas, {})], {})], {})
                answer = await bus._cluster.send(None, request)  # type: ignore[attr-defined]  # no product needs it
                assert answer.error_code == 0, answer

        anyio.run(reassign)
        self._until(
            lambda: self._led_as_preferred() and self.leader(topic, partition) == node,
            f"led by node {node} in {topic}/{partition}",
            time.monotonic() + READY_WITHIN,
        )

    def controller(self) -> int:
        """The active controller: the leader of the highest epoch that any node has written down. (The metadata's
        "controller" is a random broker.)"""
        found: list[tuple[int, int]] = []
        for broker in self.brokers.values():
            state = broker.folder / "data" / "__cluster_metadata-0" / "quorum-state"
            text = state.read_text() if state.exists() else ""
            fields = dict(
                pair.split(":", 1) for pair in text.strip("{}\n").replace('"', "").split(",") if pair.count(":") == 1
            )
            if int(fields.get("leaderId", "-1")) >= 0:
                found.append((int(fields["leaderEpoch"]), int(fields["leaderId"])))
        if not found:
            raise BrokerError("no node has written down who controls the cluster")
        return max(found)[1]

    # --- inside -------------------------------------------------------------------------------------------------

    def _made(self, topic: str) -> bool:
        try:
            self.create([NewTopic(topic, 1, len(self.brokers))])
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:  # an answer to an earlier try was lost
                raise
        return True

    def _in_sync(self, topics: Sequence[str] | None = None) -> bool:
        found = self.admin.list_topics(timeout=5).topics
        return all(
            len(partition.isrs) == len(partition.replicas) == len(self.brokers)
            for name, topic in found.items()
            if topics is None or name in topics
            for partition in topic.partitions.values()
        ) and set(topics or ()) <= set(found)

    def _led_as_preferred(self) -> bool:
        names = list(self.admin.list_topics(timeout=5).topics)
        described = self.admin.describe_topics(TopicCollection(names), request_timeout=10)
        partitions = [
            partition
            for future in described.values()
            for partition in future.result(15).partitions
            if partition.replicas
        ]
        if all(partition.leader and partition.leader.id == partition.replicas[0].id for partition in partitions):
            return True
        self.admin.elect_leaders(ElectionType.PREFERRED).result(15)
        return False

    def _until(self, condition: Callable[[], bool], what: str, deadline: float) -> None:
        trouble: Exception | None = None
        while time.monotonic() < deadline:
            for node, broker in self.brokers.items():
                if not broker.running:
                    raise BrokerError(f"node {node} has ended\n{broker.log_tail()}")
            try:
                if condition():
                    return
            except KafkaException as error:
                trouble = error
            time.sleep(0.1)
        tails = "\n".join(f"--- node {node}\n{broker.log_tail()}" for node, broker in self.brokers.items())
        raise BrokerError(f"the cluster is not {what} in time ({trouble})\n{tails}")


def _coordinated(identity: str) -> tuple[str, int]:
    """The partition whose leader coordinates a transactional id."""
    return "__transaction_state", abs(java_hash(identity)) % INTERNAL_PARTITIONS


def java_hash(text: str) -> int:
    """Java's String.hashCode, by which Kafka spreads transactional ids over partitions."""
    found = 0
    for unit in text:
        found = (31 * found + ord(unit)) & 0xFFFFFFFF
    return found - (1 << 32) if found >= 1 << 31 else found


@contextmanager
def running(cluster: KafkaCluster) -> Iterator[KafkaCluster]:
    """Start a cluster, and end it whatever happens."""
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
