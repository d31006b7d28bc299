"""Retention and compaction of the embedded bus, at times of the tests' choosing."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.bus import Entry, Message, OffsetOutOfRangeError, TopicSpec, connect
from outfitter_proto.bus.embedded import EmbeddedBus, log
from outfitter_proto.bus.embedded.connecting.database import Database
from outfitter_proto.bus.embedded.connecting.location import parse
from outfitter_proto.bus.embedded.housekeeping import DAY_MS, Housekeeping
from outfitter_proto.bus.reading import fetch_what_is_left, read_on, read_to
from support.bus.committed import committed

COMPACT = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}


class Kept:
    """A bus with one topic of one partition, `t`, and housekeeping at any time."""

    def __init__(self, bus: EmbeddedBus, reading: Database, writing: Database) -> None:
        self.bus = bus
        self._reading = reading
        self._writing = writing

    async def write(self, *entries: tuple[bytes, bytes | None]) -> None:
        async with await self.bus.open_writer("w", 0) as writer:
            await writer.commit([("t", [Entry(*entry) for entry in entries])])

    async def run_housekeeping(self, *, days: float = 0.0) -> None:
        """As it would be done in `days`."""
        now_ms = time.time_ns() // 1_000_000 + int(days * DAY_MS)
        await Housekeeping(self._reading, self._writing, now_ms=now_ms).run()

    async def messages(self, start: int | None = None) -> list[Message]:
        return await committed(self.bus, "t", start=start)

    async def offsets_kept(self) -> list[int]:
        return [message.offset for message in await self.messages()]


@asynccontextmanager
async def kept(folder: Path, config: dict[str, str]) -> AsyncIterator[Kept]:
    url = f"sqlite://{folder}/bus.db?synchronous=NORMAL"
    bus = EmbeddedBus(url)
    async with bus:
        await bus.create_topics([TopicSpec("t", 1, config)])
        reading, writing = Database(parse(url)), Database(parse(url))
        await reading.open(log.recognise, log.set_up)
        await writing.open(log.recognise, log.set_up)
        try:
            yield Kept(bus, reading, writing)
        finally:
            await reading.close()
            await writing.close()


# --- compaction ----------------------------------------------------------------------------------------


async def test_compaction_keeps_the_last_record_of_every_key_at_its_offset(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT) as bus:
        await bus.write((b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
        await bus.write((b"c", b"1"), (b"a", b"3"))
        await bus.run_housekeeping()
        assert [(m.offset, m.key, m.value) for m in await bus.messages()] == [
            (1, b"b", b"1"),
            (3, b"c", b"1"),
            (4, b"a", b"3"),
        ]
        assert await bus.bus.offsets("t", 0) == (0, 5)
        # What has been compacted is compared with what comes later.
        await bus.write((b"b", b"2"))
        await bus.run_housekeeping()
        assert await bus.offsets_kept() == [3, 4, 5]


async def test_a_reader_passes_the_holes_that_compaction_leaves(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT) as bus:
        await bus.write(*[(b"a", b"%d" % n) for n in range(10)], (b"b", b""))
        await bus.run_housekeeping()
        async with await bus.bus.open_reader("t", 0, start=3, committed=True) as reader:
            assert [m.offset for m in await reader.fetch(max_records=1)] == [9]
            assert reader.position == 10


async def test_a_tombstone_goes_a_day_after_the_records_before_it_and_not_sooner(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT) as bus:
        await bus.write((b"a", b"1"), (b"b", b"1"), (b"a", None))
        # Housekeeping has not run for ten days: a reader may have seen the record just now, so the tombstone stays.
        await bus.run_housekeeping(days=10)
        assert await bus.offsets_kept() == [1, 2]
        await bus.run_housekeeping(days=10.9)
        assert await bus.offsets_kept() == [1, 2]
        await bus.run_housekeeping(days=11.1)
        assert await bus.offsets_kept() == [1]
        # The partition now ends in a hole, and a reader's position gets past it.
        async with await bus.bus.open_reader("t", 0, start=None, committed=True) as reader:
            await reader.fetch(timeout=0)
            assert reader.position == 3 == await bus.bus.stable_end("t", 0)


async def test_a_key_written_anew_after_its_tombstone_stays(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT) as bus:
        await bus.write((b"a", None))
        await bus.run_housekeeping()
        await bus.write((b"a", b"again"))
        await bus.run_housekeeping()
        await bus.run_housekeeping(days=30)
        assert [(m.offset, m.value) for m in await bus.messages()] == [(1, b"again")]


async def test_compaction_waits_until_enough_is_dirty(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT | {"min.cleanable.dirty.ratio": "0.5"}) as bus:
        await bus.write(*[(b"%d" % n, b"") for n in range(10)])
        await bus.run_housekeeping()
        await bus.write(*[(b"0", b"") for n in range(9)])
        await bus.run_housekeeping()
        assert len(await bus.messages()) == 19
        await bus.write((b"0", b""))
        await bus.run_housekeeping()
        assert len(await bus.messages()) == 10


async def test_compaction_goes_in_slices_and_passes_and_beside_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, value in {"READ_SLICE": 7, "REMOVE_SLICE": 3, "PASS_RECORDS": 20}.items():
        monkeypatch.setattr(f"outfitter_proto.bus.embedded.housekeeping.{limit}", value)
    async with kept(tmp_path, COMPACT) as bus:
        await bus.write(*[(b"%d" % (n % 13), b"%d" % n) for n in range(300)])
        async with anyio.create_task_group() as group:
            group.start_soon(bus.run_housekeeping)
            for n in range(300, 400):
                await bus.bus.publish("t", 0, Entry(b"%d" % (n % 13), b"%d" % n))
        await bus.run_housekeeping()
        assert [m.value for m in await bus.messages()] == [b"%d" % n for n in range(387, 400)]


Step = list[tuple[int, bool]] | None
"""Records to commit (a key, whether it is a tombstone), or None: run the housekeeping."""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.none() | st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), max_size=12))
def test_any_reader_of_a_compacted_topic_ends_with_the_same_state(steps: Sequence[Step]) -> None:
    async def run(folder: Path) -> None:
        async with kept(folder, COMPACT) as bus:
            state: dict[bytes | None, int] = {}
            half_way: dict[bytes | None, int] = {}
            followed, offset, day = 0, 0, 0.0
            for step in steps:
                if step is None:
                    # Less than the day between one round and the next, as whoever follows the topic reads within it.
                    day += 0.9
                    await bus.run_housekeeping(days=day)
                    half_way = apply(half_way, await bus.messages(followed))
                    followed = offset
                    assert half_way == state
                    assert apply({}, await bus.messages()) == state
                    continue
                await bus.write(*[(b"%d" % key, None if gone else b"") for key, gone in step])
                for key, gone in step:
                    state.pop(b"%d" % key, None)
                    if not gone:
                        state[b"%d" % key] = offset
                    offset += 1

    def apply(state: dict[bytes | None, int], messages: Sequence[Message]) -> dict[bytes | None, int]:
        result = dict(state)
        for message in messages:
            result.pop(message.key, None)
            if message.value is not None:
                result[message.key] = message.offset
        return result

    with tempfile.TemporaryDirectory() as name:
        anyio.run(run, Path(name))


# --- retention -----------------------------------------------------------------------------------------


async def test_retention_removes_the_old_and_moves_the_start_past_it(tmp_path: Path) -> None:
    async with kept(tmp_path, {"retention.ms": str(2 * DAY_MS)}) as bus:
        await bus.write(*[(b"k", b"%d" % n) for n in range(5)])
        await bus.run_housekeeping(days=1.9)
        assert await bus.offsets_kept() == [0, 1, 2, 3, 4]
        await bus.run_housekeeping(days=2.1)
        assert await bus.offsets_kept() == []
        assert await bus.bus.offsets("t", 0) == (5, 5)
        await bus.write((b"k", b"new"))
        assert await bus.offsets_kept() == [5]
        with pytest.raises(OffsetOutOfRangeError) as caught:
            await bus.messages(start=4)
        assert (caught.value.start, caught.value.end) == (5, 6)


async def test_a_reader_that_the_start_has_passed_goes_on_with_what_is_left(tmp_path: Path) -> None:
    async with kept(tmp_path, {"retention.ms": str(2 * DAY_MS)}) as bus:
        await bus.write(*[(b"old", b"%d" % n) for n in range(5)])
        async with await bus.bus.open_reader("t", 0, start=2, committed=True) as reader:
            await bus.run_housekeeping(days=2.1)
            await bus.write((b"new", b"5"), (b"new", b"6"))
            assert await fetch_what_is_left(reader) == []
            assert [message.offset for message in await fetch_what_is_left(reader, max_records=1)] == [5]
        async with await bus.bus.open_reader("t", 0, start=2, committed=True) as reader:
            found = [[message.offset for message in messages] async for messages in read_to(reader, 7, max_records=1)]
            assert (found, reader.position) == ([[], [5], [6]], 7)
        async with await bus.bus.open_reader("t", 0, start=2, committed=True) as reader:
            seconds_left = iter([60.0, 60.0, 0.0])
            found = [
                [message.offset for message in messages]
                async for messages in read_on(reader, seconds_left=lambda: next(seconds_left))
            ]
            assert (found, reader.position) == ([[], [5, 6]], 7)


async def test_the_default_retention_is_kafkas_week_and_minus_one_is_for_ever(tmp_path: Path) -> None:
    (tmp_path / "week").mkdir()
    (tmp_path / "ever").mkdir()
    async with kept(tmp_path / "week", {}) as bus:
        await bus.write((b"k", b"v"))
        await bus.run_housekeeping(days=6.9)
        assert await bus.offsets_kept() == [0]
        await bus.run_housekeeping(days=7.1)
        assert await bus.offsets_kept() == []
    async with kept(tmp_path / "ever", {"retention.ms": "-1"}) as bus:
        await bus.write((b"k", b"v"))
        await bus.run_housekeeping(days=3650)
        assert await bus.offsets_kept() == [0]


async def test_a_topic_that_is_only_compacted_never_evaporates(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT | {"retention.ms": "1"}) as bus:
        await bus.write((b"a", b"1"), (b"b", b"1"))
        await bus.run_housekeeping(days=3650)
        assert await bus.offsets_kept() == [0, 1]


async def test_a_topic_with_both_policies_is_compacted_and_evaporates(tmp_path: Path) -> None:
    async with kept(tmp_path, COMPACT | {"cleanup.policy": "compact,delete", "retention.ms": str(DAY_MS)}) as bus:
        await bus.write((b"a", b"1"), (b"b", b"1"), (b"a", b"2"))
        await bus.run_housekeeping()
        assert await bus.offsets_kept() == [1, 2]
        await bus.run_housekeeping(days=1.1)
        assert await bus.offsets_kept() == []
        assert await bus.bus.offsets("t", 0) == (3, 3)


async def test_removal_that_a_crash_cut_short_goes_on_at_the_next_round(tmp_path: Path) -> None:
    async with kept(tmp_path, {"retention.ms": str(DAY_MS)}) as bus, connected(tmp_path) as writing:
        await bus.write(*[(b"k", b"") for n in range(5)])
        # What a crash between the two steps of a removal leaves: the start has moved, the records are there.
        await writing.commit(lambda connection: connection.execute("UPDATE part SET start = 3").rowcount)
        await bus.run_housekeeping()
        count = await writing.read(lambda connection: connection.execute("SELECT count(*) FROM record").fetchall())
        assert count == [(2,)]


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Database]:
    database = Database(parse(f"sqlite://{folder}/bus.db"))
    await database.open(log.recognise, log.set_up)
    try:
        yield database
    finally:
        await database.close()


# --- the write-ahead log -------------------------------------------------------------------------------


async def test_housekeeping_cuts_the_write_ahead_log_to_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path, {}) as bus:
        await bus.write(*[(b"k", b"x" * 1000) for n in range(200)])
        assert (tmp_path / "bus.db-wal").stat().st_size > 200_000
        await bus.run_housekeeping()
        assert (tmp_path / "bus.db-wal").stat().st_size == 0


async def test_the_port_lets_a_manager_run_housekeeping_without_knowing_the_bus(tmp_path: Path) -> None:
    async with connect(f"sqlite://{tmp_path}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, COMPACT)])
        for n in range(3):
            await bus.publish("t", 0, Entry(b"k", b"%d" % n))
        await bus.maintain()
        async with await bus.open_reader("t", 0, start=None, committed=True) as reader:
            assert [message.offset for message in await reader.fetch()] == [2]
