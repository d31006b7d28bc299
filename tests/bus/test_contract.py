"""The bus port's contract: what both adapters promise, each test run against both.

What only one of them can show (a crash of the file's writers, a broker's faults) is in the modules beside this one.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import (
    Bus,
    Entry,
    FencedError,
    Message,
    OffsetOutOfRangeError,
    Reader,
    TooLargeError,
    TopicSpec,
    UnknownTopicError,
    connect,
)
from support.bus.remaking import add_partitions_to

MakeTopic = Callable[..., Awaitable[str]]

LIMIT_S = 30.0
ECHO = Path(__file__).parent / "echo_process.py"


def entries(*names: str) -> list[Entry]:
    return [Entry(name.encode(), f"value of {name}".encode()) for name in names]


def keys(messages: Sequence[Message]) -> list[str]:
    return [(message.key or b"").decode() for message in messages]


async def read_until(reader: Reader, end: int) -> list[Message]:
    """Everything up to the position `end`."""
    messages: list[Message] = []
    with anyio.fail_after(LIMIT_S):
        while reader.position < end:
            messages += await reader.fetch(timeout=1.0)
    return messages


async def read_all(bus: Bus, topic: str, partition: int = 0) -> list[Message]:
    """Everything that is committed now."""
    end = await bus.stable_end(topic, partition)
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        return await read_until(reader, end)


# --- publishing and reading ----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [True, False])
async def test_a_partition_is_read_in_the_order_it_was_published(
    bus: Bus, make_topic: MakeTopic, committed: bool
) -> None:
    topic = await make_topic()
    offsets = [await bus.publish(topic, 0, Entry(b"k%d" % n, b"v%d" % n)) for n in range(20)]
    async with await bus.open_reader(topic, 0, start=None, committed=committed) as reader:
        messages = await read_until(reader, offsets[-1] + 1)
    assert [message.offset for message in messages] == offsets == sorted(offsets)
    assert [(message.key, message.value) for message in messages] == [(b"k%d" % n, b"v%d" % n) for n in range(20)]
    assert {(message.topic, message.partition) for message in messages} == {(topic, 0)}
    assert all(message.timestamp_ms > 0 for message in messages)


async def test_partitions_are_apart(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic(partitions=3)
    for partition in (0, 2, 2):
        await bus.publish(topic, partition, Entry(b"k", b"%d" % partition))
    assert [len(await read_all(bus, topic, partition)) for partition in range(3)] == [1, 0, 2]


@pytest.mark.parametrize("entry", [Entry(None, b"v"), Entry(b"k", None), Entry(b"", b""), Entry(b"\xff\x00", b"\x00")])
async def test_keys_and_values_come_back_byte_for_byte_and_none_stays_none(
    bus: Bus, make_topic: MakeTopic, entry: Entry
) -> None:
    topic = await make_topic()
    await bus.publish(topic, 0, entry)
    (message,) = await read_all(bus, topic)
    assert Entry(message.key, message.value) == entry


async def test_a_reader_may_begin_at_a_moment(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic(message_timestamp_type="LogAppendTime")
    assert await bus.offset_at(topic, 0, 0) == 0
    offsets = [await bus.publish(topic, 0, Entry(b"k%d" % n, b"v")) for n in range(3)]
    times = [message.timestamp_ms for message in await read_all(bus, topic)]
    for moment in (0, *times):
        first = next(offset for offset, time in zip(offsets, times, strict=True) if time >= moment)
        assert await bus.offset_at(topic, 0, moment) == first
    assert await bus.offset_at(topic, 0, times[-1] + 1) == offsets[-1] + 1
    with pytest.raises(UnknownTopicError):
        await bus.offset_at(topic, 7, 0)


async def test_a_fetch_of_nothing_ends_with_its_timeout_and_the_next_one_goes_on(
    bus: Bus, make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
        assert await reader.fetch(timeout=0.05) == []
        await bus.publish(topic, 0, Entry(b"k", b"v"))
        assert keys(await reader.fetch(timeout=LIMIT_S)) == ["k"]


async def test_a_fetch_returns_no_more_records_than_asked_for_and_its_position_follows(
    bus: Bus, make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    for n in range(7):
        await bus.publish(topic, 0, Entry(b"%d" % n, b""))
    async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
        seen: list[Message] = []
        while len(seen) < 7:
            messages = await reader.fetch(max_records=3, timeout=LIMIT_S)
            assert 1 <= len(messages) <= 3
            seen += messages
            assert reader.position == messages[-1].offset + 1
    assert keys(seen) == [str(n) for n in range(7)]


async def test_a_reader_starts_where_it_is_told_and_seeks(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    offsets = [await bus.publish(topic, 0, Entry(b"%d" % n, b"")) for n in range(5)]
    async with await bus.open_reader(topic, 0, start=offsets[3], committed=True) as reader:
        assert reader.position == offsets[3]
        assert keys(await read_until(reader, offsets[-1] + 1)) == ["3", "4"]
        await reader.seek(offsets[1])
        assert keys(await read_until(reader, offsets[-1] + 1)) == ["1", "2", "3", "4"]


async def test_several_readers_read_the_same_independently(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    end = [await bus.publish(topic, 0, Entry(b"%d" % n, b"")) for n in range(4)][-1] + 1
    readers = [await bus.open_reader(topic, 0, start=None, committed=True) for _ in range(3)]
    for reader in readers:
        assert keys(await read_until(reader, end)) == ["0", "1", "2", "3"]
        await reader.aclose()
        await reader.aclose()


async def test_a_cancelled_fetch_skips_no_record(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    before, published = 100, 130
    for n in range(before):
        await bus.publish(topic, 0, Entry(b"%d" % n, b""))
    seen: list[Message] = []

    async def publish_the_rest() -> None:
        for n in range(before, published):
            await bus.publish(topic, 0, Entry(b"%d" % n, b""))

    async with (
        await bus.open_reader(topic, 0, start=None, committed=True) as reader,
        anyio.create_task_group() as group,
    ):
        group.start_soon(publish_the_rest)
        patience = 0.0
        with anyio.fail_after(LIMIT_S):
            while len(seen) < published:
                # From "before the first step" to "long enough", in steps far shorter than a fetch takes: with
                # records there to be had, it is cancelled at every point.
                with anyio.move_on_after(patience):
                    seen += await reader.fetch(max_records=1, timeout=1.0)
                patience = (patience + 0.00001) % 0.02
    assert keys(seen) == [str(n) for n in range(published)]


async def test_an_offset_that_is_not_there_is_out_of_range_and_seeking_heals_it(
    bus: Bus, make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    await bus.publish(topic, 0, Entry(b"k", b""))
    start, end = await bus.offsets(topic, 0)
    async with await bus.open_reader(topic, 0, start=end + 1000, committed=True) as reader:
        for _ in range(2):
            with pytest.raises(OffsetOutOfRangeError) as caught:
                await reader.fetch(timeout=LIMIT_S)
            assert (caught.value.start, caught.value.end) == (start, end)
        await reader.seek(caught.value.start)
        assert keys(await reader.fetch(timeout=LIMIT_S)) == ["k"]


class _Read:
    """What a caller has read so far."""


async def test_a_fetch_that_fails_holds_nothing_of_its_caller(bus: Bus, make_topic: MakeTopic) -> None:
    """The error's traceback holds the caller's frame: whatever holds the error, in a cycle, would hold all of it."""
    read: list[weakref.ref[_Read]] = []

    async def fetch(reader: Reader) -> None:
        mine = _Read()
        read.append(weakref.ref(mine))
        await reader.fetch(timeout=LIMIT_S)
        pytest.fail("there is nothing to fetch")

    topic = await make_topic()
    _, end = await bus.offsets(topic, 0)
    gc.disable()
    try:
        async with await bus.open_reader(topic, 0, start=end + 1000, committed=True) as reader:
            with suppress(OffsetOutOfRangeError):
                await fetch(reader)
            assert [each() for each in read] == [None]
    finally:
        gc.enable()


# --- between processes ---------------------------------------------------------------------------------


async def test_a_waiting_reader_hears_of_what_another_process_publishes_and_answers(
    bus: Bus, bus_url: str, make_topic: MakeTopic
) -> None:
    calls, answers = await make_topic(), await make_topic()
    command = [sys.executable, str(ECHO), bus_url, calls, answers]
    async with (
        await bus.open_reader(answers, 0, start=None, committed=True) as reader,
        await anyio.open_process(command, stdin=subprocess.PIPE, stdout=None, stderr=None) as process,
    ):
        for n in range(10):
            await bus.publish(calls, 0, Entry(b"%d" % n, b"call"))
            with anyio.fail_after(LIMIT_S):
                while not (messages := await reader.fetch(timeout=5.0)):
                    pass
            assert [(message.key, message.value) for message in messages] == [(b"%d" % n, b"answer")]
        assert process.stdin is not None
        await process.stdin.aclose()
        assert await process.wait() == 0


# --- writers -------------------------------------------------------------------------------------------


async def test_a_commit_writes_all_its_batches_in_order_and_readers_reach_the_stable_end(
    bus: Bus, make_topic: MakeTopic
) -> None:
    history, ledger = await make_topic(), await make_topic(cleanup_policy="compact")
    async with await bus.open_writer(f"writer-{ledger}", 0) as writer:
        assert not writer.must_reopen
        assert writer.max_part_bytes >= 256 * 1024
        await writer.commit([(history, entries("h1", "h2")), (ledger, entries("a", "b")), (ledger, entries("c"))])
        await writer.commit([(history, []), (ledger, entries("d"))])
        await writer.commit([])
    assert keys(await read_all(bus, history)) == ["h1", "h2"]
    assert keys(await read_all(bus, ledger)) == ["a", "b", "c", "d"]


async def test_a_writer_writes_its_own_partition_number_of_every_topic(bus: Bus, make_topic: MakeTopic) -> None:
    first, second = await make_topic(partitions=3), await make_topic(partitions=3)
    async with await bus.open_writer(f"writer-{first}", 2) as writer:
        assert writer.partition == 2
        await writer.commit([(first, entries("a")), (second, entries("b"))])
    assert [keys(await read_all(bus, topic, 2)) for topic in (first, second)] == [["a"], ["b"]]
    assert [keys(await read_all(bus, topic, 0)) for topic in (first, second)] == [[], []]


async def test_a_fenced_writer_can_write_nothing_more(bus: Bus, make_topic: MakeTopic) -> None:
    history, ledger = await make_topic(), await make_topic()
    identity = f"writer-{ledger}"
    async with await bus.open_writer(identity, 0) as old:
        await old.commit([(history, entries("h-old")), (ledger, entries("old"))])
        async with await bus.open_writer(identity, 0) as new:
            with pytest.raises(FencedError):
                await old.commit([(history, entries("h-late")), (ledger, entries("late"))])
            await new.commit([(history, entries("h-new")), (ledger, entries("new"))])
    assert keys(await read_all(bus, history)) == ["h-old", "h-new"]
    assert keys(await read_all(bus, ledger)) == ["old", "new"]


async def test_a_writer_is_fenced_from_another_connection(bus: Bus, bus_url: str, make_topic: MakeTopic) -> None:
    ledger = await make_topic()
    identity = f"writer-{ledger}"
    async with (
        await bus.open_writer(identity, 0) as old,
        connect(bus_url) as other,
        await other.open_writer(identity, 0) as new,
    ):
        await new.commit([(ledger, entries("new"))])
        with pytest.raises(FencedError):
            await old.commit([(ledger, entries("late"))])
    assert keys(await read_all(bus, ledger)) == ["new"]


async def test_a_tenure_lasts_until_somebody_takes_the_identity(bus: Bus, make_topic: MakeTopic) -> None:
    ledger = await make_topic()
    identity = f"writer-{ledger}"
    assert await bus.tenure(identity) is None
    async with await bus.open_writer(identity, 0) as old, await bus.open_writer(f"{identity}-other", 0) as other:
        for key in "ab":
            await old.commit([(ledger, entries(key))])
            await other.commit([(ledger, entries(key))])
            assert await bus.tenure(identity) == old.tenure
    assert await bus.tenure(identity) == old.tenure
    async with await bus.open_writer(identity, 0) as new:
        assert await bus.tenure(identity) == new.tenure
        assert new.tenure != old.tenure


async def test_writers_of_different_identities_share_a_partition(bus: Bus, make_topic: MakeTopic) -> None:
    ledger = await make_topic()

    async def write(name: str) -> None:
        async with await bus.open_writer(f"writer-{name}-{ledger}", 0) as writer:
            for n in range(10):
                await writer.commit([(ledger, entries(f"{name}{n}a", f"{name}{n}b"))])

    with anyio.fail_after(LIMIT_S):
        async with anyio.create_task_group() as group:
            group.start_soon(write, "x")
            group.start_soon(write, "y")
    found = keys(await read_all(bus, ledger))
    for name in "xy":
        expected = [f"{name}{n}{part}" for n in range(10) for part in "ab"]
        assert [key for key in found if key.startswith(name)] == expected
    # Each ledger batch is indivisible: its two records are neighbours.
    assert [key[:-1] for key in found[::2]] == [key[:-1] for key in found[1::2]]


@pytest.mark.parametrize("patience", [0.0, 0.0005, 0.002, 0.005, 0.02])
async def test_a_cancelled_commit_is_decided_as_a_whole_once_a_new_writer_is_open(
    bus: Bus, make_topic: MakeTopic, patience: float
) -> None:
    history, ledger = await make_topic(), await make_topic()
    identity = f"writer-{ledger}"
    async with await bus.open_writer(identity, 0) as old:
        with anyio.move_on_after(patience):
            await old.commit([(history, entries(*"abcdef")), (ledger, entries(*"uvwxyz"))])
    async with await bus.open_writer(identity, 0) as new:
        before = keys(await read_all(bus, history)), keys(await read_all(bus, ledger))
        await new.commit([(history, entries("later")), (ledger, entries("later"))])
    assert before in ((list("abcdef"), list("uvwxyz")), ([], []))
    after = keys(await read_all(bus, history)), keys(await read_all(bus, ledger))
    assert after == ([*before[0], "later"], [*before[1], "later"])


async def test_a_record_too_large_for_its_topic_is_refused_and_the_next_one_is_not(
    bus: Bus, make_topic: MakeTopic
) -> None:
    topic = await make_topic(max_message_bytes="2000")
    with pytest.raises(TooLargeError):
        await bus.publish(topic, 0, Entry(b"k", b"x" * 20_000))
    await bus.publish(topic, 0, Entry(b"k", b"x" * 100))
    assert [len(message.value or b"") for message in await read_all(bus, topic)] == [100]


async def test_nothing_of_a_commit_with_too_large_a_record_is_visible_and_the_writer_goes_on(
    bus: Bus, make_topic: MakeTopic
) -> None:
    history, ledger = await make_topic(), await make_topic()
    async with await bus.open_writer(f"writer-{ledger}", 0) as writer:
        with pytest.raises(TooLargeError):
            await writer.commit([(history, entries("h")), (ledger, [Entry(b"big", b"x" * 2_000_000)])])
        await writer.commit([(history, entries("h2")), (ledger, entries("a"))])
    assert keys(await read_all(bus, history)) == ["h2"]
    assert keys(await read_all(bus, ledger)) == ["a"]


async def test_a_commit_may_have_more_for_a_topic_than_fits_into_one_record_batch(
    bus: Bus, make_topic: MakeTopic
) -> None:
    history, ledger = await make_topic(), await make_topic()
    many = [Entry(b"%d" % n, b"x" * 10_000) for n in range(250)]
    async with await bus.open_writer(f"writer-{ledger}", 0) as writer:
        with pytest.raises(TooLargeError):
            await writer.commit([(history, [*many, Entry(b"big", b"x" * 2_000_000), *many]), (ledger, entries("a"))])
        await writer.commit([(history, [*many, Entry(b"gone", None)]), (ledger, entries("a"))])
    found = await read_all(bus, history)
    assert [(message.key, message.value) for message in found] == [(e.key, e.value) for e in many] + [(b"gone", None)]
    assert keys(await read_all(bus, ledger)) == ["a"]


async def test_a_last_batch_far_larger_than_a_writer_says_it_takes_is_refused_whole(
    bus: Bus, make_topic: MakeTopic
) -> None:
    history, ledger = await make_topic(), await make_topic()
    async with await bus.open_writer(f"writer-{ledger}", 0) as writer:
        many = [Entry(b"%d" % n, b"x" * 10_000) for n in range(writer.max_part_bytes // 5_000)]
        with pytest.raises(TooLargeError):
            await writer.commit([(history, entries("h")), (ledger, many)])
        await writer.commit([(ledger, many[: len(many) // 3])])
    assert await read_all(bus, history) == []
    assert len(await read_all(bus, ledger)) == len(many) // 3


# --- topics --------------------------------------------------------------------------------------------


async def test_a_topic_is_described_as_it_was_made(bus: Bus, make_topic: MakeTopic) -> None:
    name = await make_topic(partitions=3, cleanup_policy="compact", retention_ms="86400000")
    info = await bus.topic(name)
    assert (info.name, info.partitions, info.replication) == (name, 3, 1)
    assert info.config["cleanup.policy"] == "compact"
    assert info.config["retention.ms"] == "86400000"
    assert info.id == (await bus.topic(name)).id
    assert info.id != (await bus.topic(await make_topic())).id


async def test_topics_that_exist_stay_as_they_are_when_made_again(bus: Bus, make_topic: MakeTopic) -> None:
    old = await make_topic(partitions=2)
    before = await bus.topic(old)
    await bus.publish(old, 1, Entry(b"k", b"v"))
    new = f"{old}-new"
    assert await bus.create_topics([TopicSpec(old, 5, {}), TopicSpec(new, 1, {})]) == [new]
    assert await bus.topic(old) == before
    assert keys(await read_all(bus, old, 1)) == ["k"]


async def test_an_unknown_topic_is_an_error_that_names_it(bus: Bus) -> None:
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        await bus.topic("no-such-topic")
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        await bus.publish("no-such-topic", 0, Entry(b"k", b"v"))
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        await bus.offsets("no-such-topic", 0)


async def test_offsets_count_from_the_first_there_is_to_the_one_after_the_last(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic()
    assert await bus.offsets(topic, 0) == (0, 0)
    assert [await bus.publish(topic, 0, Entry(b"k", b"v")) for _ in range(3)] == [0, 1, 2]
    assert await bus.offsets(topic, 0) == (0, 3)
    assert await bus.stable_end(topic, 0) == 3


async def test_compaction_keeps_the_last_record_of_every_key_at_its_offset(bus: Bus, make_topic: MakeTopic) -> None:
    topic = await make_topic(
        cleanup_policy="compact",
        min_cleanable_dirty_ratio="0.01",
        segment_ms="1000",
        max_compaction_lag_ms="1000",
    )
    history = [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"gone", b"1"), (b"b", None), (b"a", b"3"), (b"gone", None)]
    last = {key: (await bus.publish(topic, 0, Entry(key, value)), value) for key, value in history}
    with anyio.fail_after(90):
        while True:
            # A broker compacts by its own clock, and never the segment that is still written to.
            await bus.publish(topic, 0, Entry(b"filler", b""))
            await bus.maintain()
            messages = [message for message in await read_all(bus, topic) if message.key != b"filler"]
            if len(messages) == len(last):
                break
            await anyio.sleep(0.5)
    assert {message.key: (message.offset, message.value) for message in messages} == last
    assert (await bus.offsets(topic, 0))[0] == 0


# --- the layout of topics -------------------------------------------------------------------------------


async def test_layouts_tell_ids_and_partitions_and_leave_out_what_is_not_there(bus: Bus, make_topic: MakeTopic) -> None:
    first, second = await make_topic(partitions=2), await make_topic()
    found = await bus.layouts([first, "not-there", second])
    assert {name: layout.partitions for name, layout in found.items()} == {first: 2, second: 1}
    assert [found[name].id for name in (first, second)] == [(await bus.topic(name)).id for name in (first, second)]
    assert found[first].id != found[second].id
    assert await bus.layouts([]) == {}


async def test_added_partitions_are_empty_and_everybody_sees_them(
    bus: Bus, bus_url: str, make_topic: MakeTopic
) -> None:
    topic = await make_topic(partitions=2)
    await bus.publish(topic, 1, Entry(b"k", b"v"))
    async with connect(bus_url) as other:
        before = (await other.layouts([topic]))[topic]
        await other.publish(topic, 0, Entry(b"k", b"v"))
        await add_partitions_to(bus, topic, 5)
        assert await other.publish(topic, 4, Entry(b"k", b"w")) == 0
        after = (await other.layouts([topic]))[topic]
        assert (after.id, before.partitions, after.partitions) == (before.id, 2, 5)
        async with await other.open_writer(f"{topic}-writer", 3) as writer:
            await writer.commit([(topic, entries("a"))])
    assert [len(await read_all(bus, topic, partition)) for partition in range(5)] == [1, 1, 0, 1, 1]


async def test_a_bus_that_says_of_an_identity_that_it_has_committed_says_so_until_it_is_taken_anew(
    bus: Bus, make_topic: MakeTopic
) -> None:
    topic = await make_topic()
    identity = f"{topic}-writer"
    assert not await bus.has_committed(identity)
    async with await bus.open_writer(identity, 0) as writer:
        assert not await bus.has_committed(identity)
        await writer.commit([(topic, entries("a"))])
    assert await bus.has_committed(identity) is not bus.local
    async with await bus.open_writer(identity, 0):
        assert not await bus.has_committed(identity)
