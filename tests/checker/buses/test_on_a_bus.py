"""The checker and `outfitter verify` on real buses: a clean run passes, what a forger wrote is found."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record._crc32c import crc as crc32c
from confluent_kafka import KafkaError, KafkaException, Producer

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Entry, TopicSpec, connect
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.names import control_topic, topics
from outfitter_verify import Report, UnreadableError, verify
from outfitter_verify.buses import kafka
from support.kafka.broker import Broker, KafkaBroker
from support.managers.process import Manager, StartManager, files_config

pytestmark = pytest.mark.slow

WORKERS = 6


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """A bus with the topics of a cluster of its own: its URL, the cluster."""
    if request.param == "embedded":
        url, cluster = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", "outfitter"
    else:
        broker: KafkaBroker = request.getfixturevalue("kafka_broker")
        url, cluster = broker.url, broker.new_cluster()
    make_topics(url, cluster)
    return url, cluster


def make_topics(url: str, cluster: str) -> None:
    async def make() -> None:
        async with connect(url) as bus:
            await all_topics.create(bus, cluster, partitions=1)

    anyio.run(make)


def publish(place: tuple[str, str], host: str, *bodies: dict[str, object] | bytes) -> None:
    url, cluster = place

    async def send() -> None:
        async with connect(url) as bus:
            for body in bodies:
                value = body if isinstance(body, bytes) else json.dumps(body).encode()
                await bus.publish(topics(cluster).registrations, 0, Entry(host.encode(), value))

    anyio.run(send)


def order(place: tuple[str, str], host: str) -> None:
    """An operator takes a device out that no driver shows."""
    url, cluster = place
    body = {"type": "cordon-order", "id": "k", "host": host, "author": "ada", "reason": "hot", "device": "none"}

    async def send() -> None:
        async with connect(url) as bus:
            value = json.dumps(body | {"at": "2026-01-31T12:00:00Z"}).encode()
            await bus.publish(control_topic(cluster), 0, Entry(b"k", value))

    anyio.run(send)


def busy(place: tuple[str, str], manager: Manager) -> None:
    """Workers register, one goes, one speaks nonsense; the manager is killed in between."""
    order(place, manager.host)
    bodies = [
        {"type": "register", "host": manager.host, "worker": f"w{number}", "incarnation": "1", "lease_s": None}
        for number in range(WORKERS)
    ]
    publish(place, manager.host, *bodies[:3], b"nonsense")
    manager.wait_for(lambda: verify(*place).counts["dead letters"] == 1)
    manager.kill9()
    publish(place, manager.host, {**bodies[0], "type": "deregister", "lease_s": None}, *bodies[3:])
    manager.start()

    def settled() -> bool:
        counts = verify(*place).counts
        return (counts["unread"], counts["ended"], counts["allocated"]) == (0, 1, 2)  # its driver has reported, too

    manager.wait_for(settled)


def verified(manager: Manager, *arguments: str) -> subprocess.CompletedProcess[str]:
    return manager.outfitter("verify", *arguments)


def test_a_run_with_a_kill_verifies_clean_and_in_full_and_a_forged_record_is_found(
    place: tuple[str, str], start_manager: StartManager, tmp_path: Path
) -> None:
    url, cluster = place
    manager = start_manager(files_config(tmp_path / "gpus", gpus=2), bus=url, cluster=cluster)
    busy(place, manager)

    report = verify(url, cluster)
    assert report.violations == ()
    assert report.complete
    assert {check.name: check.looked_at for check in report.checks}["orders"] > 0
    assert report.counts["registrations"] == WORKERS
    assert report.counts["managers"] == 2
    assert report.counts["allocated"] == 2
    done = verified(manager)
    assert done.returncode == 0, done.stderr
    assert "exclusivity" in done.stdout
    assert "\n0 violations; " in done.stdout

    forge(place, report)
    done = verified(manager, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["ok"]
    by = {violation["check"]: violation for violation in found["violations"]}
    assert {"exclusivity", "commits"} <= by.keys()
    assert by["exclusivity"]["topic"] == f"{cluster}.allocations"
    assert by["exclusivity"]["at"]
    assert len(by["exclusivity"]["records"]) == 1
    assert verified(manager, "--since", "0s").returncode == 0
    assert verified(manager, "--since", "1h").returncode == 1
    forged_at = datetime.fromisoformat(by["exclusivity"]["at"])
    assert verified(manager, "--since", forged_at.isoformat()).returncode == 1
    assert verified(manager, "--since", (forged_at + timedelta(minutes=1)).isoformat()).returncode == 0


def forge(place: tuple[str, str], report: Report) -> None:
    """Write a grant of a device that somebody holds, as whoever may write to the topic can."""
    url, cluster = place
    holder = next(record for record in report.last.values() if record["state"] == "allocated")
    forged = {**holder, "worker": "forger", "token": 10_000}
    name = f"{holder['host']}/forger/{holder['incarnation']}".encode()
    value = json.dumps(forged).encode()
    if url.startswith("kafka:"):
        producer = Producer({"bootstrap.servers": url.removeprefix("kafka://")})
        producer.produce(topics(cluster).allocations, value, name, partition=0)
        assert producer.flush(20) == 0
        return

    async def write() -> None:
        async with connect(url) as bus:
            await bus.publish(topics(cluster).allocations, 0, Entry(name, value))

    anyio.run(write)


@pytest.mark.parametrize("kind", ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def test_a_cluster_without_a_topic_of_orders_is_looked_at_in_full(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, start_manager: StartManager
) -> None:
    url, cluster = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", "outfitter"
    if kind == "kafka":
        broker: KafkaBroker = request.getfixturevalue("kafka_broker")
        url, cluster = broker.url, broker.new_cluster()

    async def make() -> None:
        async with connect(url) as bus:
            for name, settings in all_topics.required(cluster).items():
                await bus.create_topics([TopicSpec(name, 1, {each.name: each.value for each in settings})])

    anyio.run(make)
    manager = start_manager(bus=url, cluster=cluster, gpus=1)
    publish((url, cluster), manager.host, {"type": "register", "host": manager.host, "worker": "w", "incarnation": "1"})
    manager.wait_for_state("w", "allocated")
    report = verify(url, cluster)
    assert (report.violations, report.complete) == ((), True)


@pytest.mark.kafka
def test_it_says_what_is_missing_when_it_cannot_look(kafka_broker: KafkaBroker, tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match=r"there is no topic t-nobody\.registrations"):
        verify(kafka_broker.url, "t-nobody")
    with pytest.raises(UnreadableError, match="this file does not exist"):
        verify(f"sqlite://{tmp_path}/none.db")
    with pytest.raises(UnreadableError, match="Kafka does not answer"):
        verify("kafka://127.0.0.1:9", patience_s=0.5)


class _LeaderMoves:
    """A consumer whose next questions for a partition's end meet a broker that leads it no more."""

    def __init__(self, inner: Any, times: int) -> None:
        self._inner = inner
        self.left = times

    def get_watermark_offsets(self, *partition: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        return self._inner.get_watermark_offsets(*partition, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.kafka
@pytest.mark.parametrize(("times", "patience_s"), [(3, 30.0), (1000, 0.5)])
def test_a_leader_that_has_moved_is_asked_for_again_as_long_as_its_patience_lasts(
    kafka_broker: KafkaBroker, times: int, patience_s: float
) -> None:
    cluster = kafka_broker.new_cluster()
    make_topics(kafka_broker.url, cluster)
    with kafka.KafkaSource(kafka.settings(kafka_broker.url, {}, {}), cluster, patience_s=30.0) as source:
        moving: Any = _LeaderMoves(source._everything, times)
        source._everything = moving
        reading = source.reading()
        source._patience_s = patience_s  # the logs are read when they are asked for
        if times == 3:
            [partition] = reading.logs
            assert partition.registrations.end == 0
            assert moving.left == 0
        else:
            with pytest.raises(UnreadableError, match=f"{cluster}.*NOT_LEADER|(?i:not leader)"):
                list(reading.logs)


@pytest.mark.kafka
def test_a_question_that_is_not_answered_in_time_is_no_error_where_the_answer_is_not_needed(
    kafka_broker: KafkaBroker,
) -> None:
    cluster = kafka_broker.new_cluster()
    make_topics(kafka_broker.url, cluster)
    with kafka.KafkaSource(kafka.settings(kafka_broker.url, {}, {}), cluster, patience_s=30.0) as source:
        assert source._topic_id(f"{cluster}.registrations") is not None
        source._patience_s = 0.001
        assert source._topic_id(f"{cluster}.registrations") is None


@pytest.mark.kafka
def test_the_command_has_a_code_of_its_own_for_what_it_cannot_look_at(
    kafka_broker: KafkaBroker, manager: Manager
) -> None:
    done = verified(manager, "--bus", kafka_broker.url, "--cluster", "t-nobody")
    assert done.returncode == 125
    assert done.stderr.startswith("outfitter: there is no topic t-nobody.registrations")
    done = verified(manager, "--since", "yesterday")
    assert done.returncode == 125
    assert "'yesterday' is no time: write RFC 3339 with a time zone" in done.stderr


def unreadable_batch(bad: tuple[int, ...]) -> bytes:
    """Three records packed with gzip, the `bad` of which say that their key has minus five bytes: brokers take it."""
    records = b""
    for delta in range(3):
        one = bytes([0, 0, delta * 2]) + (b"\x09" if delta in bad else b"\x02k") + b"\x02v" + b"\x00"
        records += bytes([len(one) * 2]) + one
    packed = gzip.compress(records)
    tail = struct.pack(">hiqqqhii", 1, 2, 1_000, 1_000, -1, -1, -1, 3) + packed
    head = struct.pack(">qiib", 0, 4 + 1 + 4 + len(tail), -1, 2)
    return head + struct.pack(">I", crc32c(tail)) + tail


def write_unreadable(url: str, topic: str, *bad: int) -> None:
    async def send() -> None:
        async with connect(url) as bus:
            assert isinstance(bus, KafkaBus)
            batch = unreadable_batch(bad)
            request = ProduceRequest(
                transactional_id=None, required_acks=-1, timeout=10_000, topics=[(topic, [(0, batch)])]
            )
            row = await bus._cluster.ask_leader(topic, 0, request)
            assert row[1] == 0

    anyio.run(send)


@pytest.mark.kafka
@pytest.mark.timeout(180)  # each place takes the client some seconds, and it is looked at twice
def test_a_place_that_its_client_cannot_pass_is_told_and_all_behind_it_is_looked_at(
    kafka_broker: KafkaBroker, start_manager: StartManager
) -> None:
    """Nobody who may register can blind the checker for what the others say."""
    place = kafka_broker.url, kafka_broker.new_cluster()
    make_topics(*place)
    manager = start_manager(bus=place[0], cluster=place[1], gpus=4)
    of = topics(place[1])
    for worker, bad in (("before", (1,)), ("between", (1, 2)), ("after", ())):
        registration = {"type": "register", "host": manager.host, "worker": worker, "incarnation": "1", "lease_s": None}
        publish(place, manager.host, registration)
        if bad:
            write_unreadable(place[0], of.registrations, *bad)
    for worker in ("before", "between", "after"):
        manager.wait_for_state(worker, "allocated")
    manager.wait_for(lambda: (manager.metric("outfitter_dead_letters_total") or 0) >= 2)
    report = verify(*place)
    assert report.violations == ()
    assert report.counts["registrations"] == 3
    assert not report.complete
    partial = {check.name: " ".join(check.partial) for check in report.checks}
    assert f"{of.registrations}/0/2 to 2 not looked at" in partial["answers"]  # 3 is read
    assert f"{of.registrations}/0/6 to 7 not looked at" in partial["answers"]
    forge(place, report)
    assert verified(manager).returncode == 1


@pytest.mark.kafka
@pytest.mark.timeout(180)
def test_a_batch_that_the_brokers_disk_has_damaged_is_told_and_all_behind_it_is_looked_at(own_broker: Broker) -> None:
    place = own_broker.url, "outfitter"
    make_topics(*place)
    for worker in ("before", "damaged", "after"):
        registration = {"type": "register", "host": "h", "worker": worker, "incarnation": "1"}
        publish(place, "h", registration)
    own_broker.stop()
    [segment] = (own_broker.folder / "data" / f"{topics(place[1]).registrations}-0").glob("*.log")
    segment.write_bytes(segment.read_bytes().replace(b"damaged", b"dam\xffged"))
    own_broker.start()
    report = verify(*place)
    assert report.counts["registrations"] == 2
    partial = {check.name: " ".join(check.partial) for check in report.checks}
    assert f"{topics(place[1]).registrations}/0/1 to 1 not looked at" in partial["answers"]
