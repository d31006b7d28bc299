"""The Kafka adapter when brokers refuse, freeze, die, or ask for a log-in.

Each test that hurts a broker has its own.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from aiokafka import AIOKafkaProducer

from outfitter_proto.bus import (
    Bus,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    CommitUnknownError,
    Entry,
    FencedError,
    Message,
    Reader,
    TooLargeError,
    TopicSpec,
    UnknownTopicError,
    Writer,
    connect,
)
from outfitter_proto.bus.kafka import KafkaBus
from outfitter_proto.bus.kafka.connecting.cluster import REQUEST_TIMEOUT
from outfitter_proto.bus.kafka.connecting.log_throttle import LOGGERS
from support.kafka.broker import Broker, KafkaBroker
from support.kafka.limits import limit_messages

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

WITHIN = 60.0


async def read_to(reader: Reader, end: int) -> list[Message]:
    messages: list[Message] = []
    with anyio.fail_after(WITHIN):
        while reader.position < end:
            messages += await reader.fetch(timeout=0.2)
    return messages


async def test_an_absent_broker_is_named_by_its_address_and_so_is_every_other_that_was_tried() -> None:
    bus = connect("kafka://127.0.0.1:1,127.0.0.1:2")
    with pytest.raises(BusUnavailableError, match=r"127\.0\.0\.1:1 refuses connections.*127\.0\.0\.1:2"):
        await bus.start()
    with pytest.raises(BusUnavailableError, match=r"127\.0\.0\.1:1"):
        await bus.open_writer("w", 0)
    await bus.aclose()


async def test_an_absent_broker_does_not_keep_another_from_being_used(kafka_broker: KafkaBroker) -> None:
    async with connect(f"kafka://127.0.0.1:1,{kafka_broker.bootstrap}") as bus:
        topic = KafkaBroker.new_cluster()
        await bus.create_topics([TopicSpec(topic, 1, {})])
        assert await bus.publish(topic, 0, Entry(b"k", b"v")) == 0
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"v")])])


async def test_a_missing_topic_comes_with_its_remedy_and_a_missing_partition_with_the_count(
    kafka_broker: KafkaBroker,
) -> None:
    async with connect(kafka_broker.url) as bus:
        for ask in (bus.topic("t-no"), bus.offsets("t-no", 0), bus.publish("t-no", 0, Entry(b"k", b"v"))):
            with pytest.raises(UnknownTopicError, match="outfitter topics create"):
                await ask
        topic = KafkaBroker.new_cluster()
        await bus.create_topics([TopicSpec(topic, 2, {})])
        with pytest.raises(UnknownTopicError, match="has the partitions 0 to 1, not "):
            await bus.open_reader(topic, 2, start=0, committed=True)


async def test_a_setting_that_kafka_refuses_is_an_error_with_kafkas_reason(kafka_broker: KafkaBroker) -> None:
    async with connect(kafka_broker.url) as bus:
        with pytest.raises(BusConfigurationError, match="shrink"):
            await bus.create_topics([TopicSpec(KafkaBroker.new_cluster(), 1, {"cleanup.policy": "shrink"})])
        with pytest.raises(BusConfigurationError, match="replication"):
            await bus.create_topics([TopicSpec(KafkaBroker.new_cluster(), 1, {}, 9)])


async def test_a_transaction_with_a_refused_record_is_not_committed_by_half(kafka_broker: KafkaBroker) -> None:
    """A broker commits a transaction although it has refused a batch: every answer must be looked at first."""
    history, ledger = KafkaBroker.new_cluster(), KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(history, 1, {}), TopicSpec(ledger, 1, {"max.message.bytes": "2000"})])
        async with await bus.open_writer(ledger, 0) as writer:
            with pytest.raises(TooLargeError, match=ledger):
                await writer.commit([(history, [Entry(b"h", b"x")]), (ledger, [Entry(b"k", b"x" * 5000)])])
            assert writer.must_reopen
        async with await bus.open_writer(ledger, 0) as writer:
            await writer.commit([(history, [Entry(b"h", b"y")]), (ledger, [Entry(b"k", b"y")])])
        async with await bus.open_reader(history, 0, start=None, committed=True) as reader:
            assert [m.value for m in await read_to(reader, await bus.stable_end(history, 0))] == [b"y"]


@pytest.mark.parametrize("narrow", ["history", "letters", "ledger"])
async def test_the_error_names_the_topic_that_refused_its_batch_and_the_bytes_that_it_would_have_to_take(
    kafka_broker: KafkaBroker, narrow: str
) -> None:
    topics = {name: f"{KafkaBroker.new_cluster()}-{name}" for name in ("history", "letters", "ledger")}
    batches = [(topic, [Entry(b"k", b"x" * 5000)]) for topic in topics.values()]
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {}) for topic in topics.values()])
        limit_messages(kafka_broker, topics[narrow], 100)
        async with await bus.open_writer("a", 0) as writer:
            with pytest.raises(TooLargeError, match=topics[narrow]) as refused:
                await writer.commit(batches)
        size = refused.value.size or 0
        assert refused.value.topic == topics[narrow]
        limit_messages(kafka_broker, topics[narrow], size - 1)
        async with await bus.open_writer("a", 0) as writer:
            with pytest.raises(TooLargeError):
                await writer.commit(batches)
        limit_messages(kafka_broker, topics[narrow], size)
        async with await bus.open_writer("a", 0) as writer:
            await writer.commit(batches)


async def test_a_clock_that_is_too_far_ahead_is_told_as_that(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka takes no record from more than an hour ahead, by its own clock."""
    topic, right = KafkaBroker.new_cluster(), time.time
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {"message.timestamp.type": "CreateTime"})])
        async with await bus.open_writer(topic, 0) as writer:
            with monkeypatch.context() as ahead:
                ahead.setattr(time, "time", lambda: right() + 2 * 3600)
                with pytest.raises(BusConfigurationError, match="set the clock of this machine"):
                    await writer.commit([(topic, [Entry(b"k", b"v")])])
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"v")])])


async def test_a_record_that_is_not_bytes_fails_its_publisher_and_nobody_else(kafka_broker: KafkaBroker) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        with anyio.fail_after(WITHIN), pytest.raises(TypeError):
            await bus.publish(topic, 0, Entry(b"k", "text"))  # type: ignore[arg-type]  # on purpose
        assert await bus.publish(topic, 0, Entry(b"k", b"bytes")) == 0


async def test_without_cramjam_a_codec_of_its_own_stops_the_ledger_but_not_the_input(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger must not lose a batch in silence; no worker may block the input. The broker compresses here."""
    monkeypatch.setitem(sys.modules, "cramjam", None)
    gzip, zstd = KafkaBroker.new_cluster(), KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(gzip, 1, {"compression.type": "gzip"})])
        await bus.create_topics([TopicSpec(zstd, 1, {"compression.type": "zstd"})])
        for topic in gzip, zstd:
            for value in b"1", b"2":
                await bus.publish(topic, 0, Entry(b"k", value))
        async with await bus.open_reader(gzip, 0, start=None, committed=True) as reader:
            assert [m.value for m in await read_to(reader, 2)] == [b"1", b"2"]
        async with await bus.open_reader(zstd, 0, start=None, committed=False) as reader:
            assert [(m.offset, m.key) for m in await read_to(reader, 2)] == [(0, None), (1, None)]
        async with await bus.open_reader(zstd, 0, start=None, committed=True) as reader:
            for _ in range(2):
                with pytest.raises(BusConfigurationError, match="offset 0 is compressed with zstd"):
                    await read_to(reader, 2)
            assert reader.position == 0


async def test_the_last_batch_of_a_commit_is_one_record_batch(kafka_broker: KafkaBroker) -> None:
    """A stray commit or a reader can then never see half of it."""
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.open_writer(topic, 0) as writer:
            value = b"x" * (writer.max_part_bytes // 1000 - 3)
            await writer.commit([(topic, [Entry(b"%03d" % n, value) for n in range(1000)])])
            with pytest.raises(TooLargeError, match="one record batch"):
                await writer.commit([(topic, [Entry(b"%03d" % n, 2 * value) for n in range(1000)])])
            assert not writer.must_reopen
        async with await bus.open_reader(topic, 0, start=500, committed=False) as reader:
            assert [m.offset for m in await reader.fetch(timeout=10)] == list(range(500, 1000))
            await bus.stable_end(topic, 0)  # until the marker is written, too
            assert await bus.offsets(topic, 0) == (0, 1001)


async def test_a_writer_whose_broker_froze_knows_nothing_or_that_nothing_happened_and_the_next_one_goes_on(
    own_broker: Broker,
) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(own_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        writer = await bus.open_writer(topic, 0)
        await writer.commit([(topic, [Entry(b"k", b"1")])])
        assert not writer.must_reopen
        own_broker.pause()
        try:
            with anyio.fail_after(WITHIN), pytest.raises((BusUnavailableError, CommitUnknownError)):
                await writer.commit([(topic, [Entry(b"k", b"2")])])
            assert writer.must_reopen
            with anyio.fail_after(5):
                await writer.aclose()
        finally:
            own_broker.resume()
        async with await reopened(bus, topic) as after:
            await after.commit([(topic, [Entry(b"k", b"3")])])
            async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
                seen = [m.value for m in await read_to(reader, await bus.stable_end(topic, 0))]
            assert seen in ([b"1", b"3"], [b"1", b"2", b"3"])


async def test_a_broker_that_hangs_while_topics_are_made_is_asked_for_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = anyio.Event()
    broker = Broker(tmp_path / "kafka", {"broker.session.timeout.ms": "60000"})  # it freezes for less than a session
    exists = KafkaBus._exists

    async def freeze_then(bus: KafkaBus, topic: str) -> bool:
        found = await exists(bus, topic)
        if not frozen.is_set():
            broker.pause()
            frozen.set()
        return found

    monkeypatch.setattr(KafkaBus, "_exists", freeze_then)
    made: list[str] = []
    try:
        await anyio.to_thread.run_sync(broker.start)
        async with connect(broker.url) as bus, anyio.create_task_group() as tasks:

            async def make() -> None:
                made.extend(await bus.create_topics([TopicSpec("t", 2, {})]))

            tasks.start_soon(make)
            await frozen.wait()
            await anyio.sleep(1.5 * REQUEST_TIMEOUT)
            broker.resume()
    finally:
        broker.kill9()
    assert made == ["t"]


async def test_a_reader_says_whether_the_silence_is_the_topics_or_the_brokers(own_broker: Broker) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(own_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        await bus.offsets(topic, 0)
        own_broker.pause()
        try:
            async with await bus.open_reader(topic, 0, start=0, committed=False) as reader:
                assert await reader.fetch(timeout=0.01) == []
                assert not reader.has_answered
                own_broker.resume()
                with anyio.fail_after(WITHIN):
                    while not reader.has_answered:
                        assert await reader.fetch(timeout=0.1) == []
        finally:
            own_broker.resume()


@pytest.mark.parametrize("harm", [Broker.pause, Broker.kill9], ids=["silent", "refusing"])
async def test_a_reader_says_that_an_answer_is_late_before_a_request_has_failed(
    own_broker: Broker, harm: Callable[[Broker], None]
) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(own_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.open_reader(topic, 0, start=0, committed=False) as reader:
            while not reader.has_answered:
                assert await reader.fetch(timeout=1.0) == []
            assert not reader.late_s
            harm(own_broker)
            try:
                with anyio.fail_after(WITHIN):
                    while not reader.late_s:
                        assert await reader.fetch(timeout=0.1) == []
            finally:
                if harm is Broker.pause:
                    own_broker.resume()
                else:
                    await own_broker.restarted()
            with anyio.fail_after(WITHIN):
                while reader.late_s:
                    with suppress(BusUnavailableError):  # the request of before may have failed by now
                        assert await reader.fetch(timeout=0.1) == []


async def test_after_a_broker_was_killed_readers_publishers_and_writers_go_on_and_skip_nothing(
    own_broker: Broker,
) -> None:
    source, ledger = KafkaBroker.new_cluster(), KafkaBroker.new_cluster()
    async with connect(own_broker.url) as bus:
        await bus.create_topics([TopicSpec(source, 1, {}), TopicSpec(ledger, 1, {"cleanup.policy": "compact"})])
        writer = await bus.open_writer(ledger, 0)
        reader = await bus.open_reader(source, 0, start=None, committed=False)
        await bus.publish(source, 0, Entry(b"k", b"1"))
        await writer.commit([(ledger, [Entry(b"a", b"1")])])
        seen = await read_to(reader, 1)

        own_broker.kill9()
        with pytest.raises(BusUnavailableError, match=own_broker.bootstrap):
            await bus.publish(source, 0, Entry(b"k", b"lost"))
        with pytest.raises(BusUnavailableError, match=own_broker.bootstrap):
            await bus.offsets(source, 0)
        with anyio.fail_after(WITHIN), pytest.raises(BusUnavailableError):
            await read_to(reader, 2)
        with anyio.fail_after(WITHIN), pytest.raises((BusUnavailableError, CommitUnknownError)):
            await writer.commit([(ledger, [Entry(b"a", b"2")])])
        await writer.aclose()
        await own_broker.restarted()

        async with await reopened(bus, ledger) as writer:
            await writer.commit([(ledger, [Entry(b"a", b"3")])])
        assert await bus.publish(source, 0, Entry(b"k", b"2")) == 1
        seen += await read_to(reader, 2)
        await reader.aclose()
        assert [(m.offset, m.value) for m in seen] == [(0, b"1"), (1, b"2")]
        async with await bus.open_reader(ledger, 0, start=None, committed=True) as reader:
            assert (await read_to(reader, await bus.stable_end(ledger, 0)))[-1].value == b"3"
    assert [logging.getLogger(name).filters for name in LOGGERS] == [[]] * len(LOGGERS)


async def test_a_transaction_left_open_is_decided_when_the_identity_is_taken(kafka_broker: KafkaBroker) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        left = AIOKafkaProducer(bootstrap_servers=kafka_broker.bootstrap, transactional_id=topic)
        await left.start()
        await left.begin_transaction()
        await left.send_and_wait(topic, b"half", key=b"k", partition=0)
        await left.stop()  # which does not abort
        async with await bus.open_writer(topic, 0) as writer:
            with anyio.fail_after(10):  # not the minute of the transaction's time-out
                assert await bus.stable_end(topic, 0) == 2
            await writer.commit([(topic, [Entry(b"k", b"whole")])])
        async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
            assert [m.value for m in await read_to(reader, await bus.stable_end(topic, 0))] == [b"whole"]


async def test_a_writer_fenced_before_its_first_commit_hears_so_and_of_no_consequence(
    kafka_broker: KafkaBroker,
) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        writers = [await bus.open_writer(topic, 0) for _ in range(40)]
        for writer in writers[:-1]:
            with pytest.raises(FencedError):
                await writer.commit([(topic, [Entry(b"k", b"old")])])
        await writers[-1].commit([(topic, [Entry(b"k", b"new")])])
        for writer in writers:
            await writer.aclose()


async def test_the_stable_end_waits_for_another_writers_open_transaction(kafka_broker: KafkaBroker) -> None:
    topic = KafkaBroker.new_cluster()
    order: list[str] = []
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        other = AIOKafkaProducer(bootstrap_servers=kafka_broker.bootstrap, transactional_id=topic)
        await other.start()
        await other.begin_transaction()
        await other.send_and_wait(topic, b"v", key=b"k", partition=0)

        async def stable() -> None:
            end = await bus.stable_end(topic, 0)
            order.append("stable")
            async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
                assert [m.value for m in await read_to(reader, end)] == [b"v"]

        with anyio.fail_after(WITHIN):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stable)
                for _ in range(20):  # time enough for one that does not wait
                    await bus.offsets(topic, 0)
                order.append("committed")
                await other.commit_transaction()
        await other.stop()
    assert order == ["committed", "stable"]


@pytest.fixture
def guarded_broker(tmp_path: Path) -> Iterator[Broker]:
    """A broker that asks for a log-in."""
    accounts = 'username="admin" password="pw" user_admin="pw" user_manager="secret"'
    broker = Broker(
        tmp_path / "kafka",
        {
            "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.plaintext.plain.sasl.jaas.config": (
                f"org.apache.kafka.common.security.plain.PlainLoginModule required {accounts};"
            ),
        },
    )
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


async def test_logging_in_works_and_a_wrong_password_is_told_apart_from_an_absent_broker(
    guarded_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SECURITY_PROTOCOL": "SASL_PLAINTEXT", "SASL_MECHANISM": "PLAIN", "SASL_USERNAME": "manager",
        "SASL_PASSWORD": "secret",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"OUTFITTER_KAFKA_{name}", value)
    topic = KafkaBroker.new_cluster()
    async with connect(guarded_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        async with await bus.open_writer(topic, 0) as writer:
            await writer.commit([(topic, [Entry(b"k", b"v")])])
        async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
            assert [m.value for m in await reader.fetch(timeout=10)] == [b"v"]
    monkeypatch.setenv("OUTFITTER_KAFKA_SASL_PASSWORD", "wrong")
    bus = connect(guarded_broker.url)
    with pytest.raises(BusConfigurationError, match=r"User:manager.*wrong password"):
        await bus.start()
    with pytest.raises(BusConfigurationError, match="wrong password"):
        await bus.open_writer(topic, 0)
    await bus.aclose()


async def reopened(bus: Bus, identity: str) -> Writer:
    """Take the identity again, as often as it takes."""
    with anyio.fail_after(WITHIN):
        while True:
            try:
                return await bus.open_writer(identity, 0)
            except BusError:
                await anyio.sleep(0.1)
