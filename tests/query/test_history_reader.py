"""Finding the way in a long history: where a moment is in the log, and where a replay may begin."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, Message, Reader, connect
from outfitter_proto.names import topics
from outfitter_service.config import BusConnection
from outfitter_service.query import history_reader, rebuild
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.processor.limits import Limits
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import CLUSTER, HOST, deregister, register, serving, static

MESSAGES = 60


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look as closely as a history of weeks would be looked at."""
    monkeypatch.setattr(history_reader, "MAX_SCANNED", 2)
    monkeypatch.setattr(history_reader, "MARGIN", timedelta())
    monkeypatch.setattr(rebuild, "FIRST_GUESS", timedelta(milliseconds=1))


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Bus, str]]:
    """A bus with topics of a cluster of its own, and the history topic's name."""
    if request.param == "embedded":
        url, cluster = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL", CLUSTER
    else:
        broker = request.getfixturevalue("kafka_broker")
        url, cluster = broker.url, broker.new_cluster()
    async with connect(url) as bus:
        await all_topics.create(bus, cluster, partitions=1)
        yield bus, topics(cluster).history


@pytest.mark.usefixtures("fine")
async def test_a_moment_is_found_in_the_log_by_halves(place: tuple[Bus, str]) -> None:
    bus, topic = place
    for number in range(MESSAGES):
        await bus.publish(topic, 0, Entry(b"k", b"%d" % number))
    async with await bus.open_reader(topic, 0, start=None, committed=True) as reader:
        found = []
        while len(found) < MESSAGES:
            found += await reader.fetch()
    for message in found:
        moment = datetime.fromtimestamp(message.timestamp_ms / 1000, UTC)
        offset = await history_reader.offset_at(bus, topic, 0, moment)
        assert all(one.timestamp_ms < message.timestamp_ms for one in found if one.offset < offset)
        assert (
            sum(one.timestamp_ms < message.timestamp_ms for one in found if one.offset >= offset)
            <= history_reader.MAX_SCANNED
        )
    assert await history_reader.offset_at(bus, topic, 0, datetime(2000, 1, 1, tzinfo=UTC)) == found[0].offset
    end = (await bus.offsets(topic, 0))[1]
    last = await history_reader.offset_at(bus, topic, 0, datetime(2999, 1, 1, tzinfo=UTC))
    assert last >= end - history_reader.MAX_SCANNED


class Hesitant(FaultyBus):
    """An embedded bus that has nothing to say yet whenever it is asked first."""

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        fetch, asked = reader.fetch, set[int]()

        async def hesitate(*, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
            if reader.position in asked:
                return await fetch(max_records=max_records, timeout=timeout)
            asked.add(reader.position)
            return []

        reader.fetch = hesitate  # type: ignore[method-assign]
        return reader


@pytest.mark.usefixtures("fine")
async def test_a_moment_is_found_however_slow_the_bus_is(tmp_path: Path) -> None:
    async with Hesitant(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)
        topic = topics(CLUSTER).history
        for number in range(MESSAGES):
            await bus.publish(topic, 0, Entry(b"k", b"%d" % number))
        found = await history_reader.offset_at(bus, topic, 0, datetime(2999, 1, 1, tzinfo=UTC))
        assert found >= MESSAGES - history_reader.MAX_SCANNED


@pytest.mark.usefixtures("fine")
async def test_a_replay_goes_back_until_it_finds_a_whole_snapshot_of_the_time(tmp_path: Path) -> None:
    seen: list[tuple[datetime, dict[str, dict[str, Any]]]] = []
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    limits = Limits(history=Pace(piece_bytes=1, between_bytes=1))
    async with connect(url) as bus, serving(bus, static(4), tmp_path, limits=limits) as manager:
        for number in range(25):
            await manager.say(register(f"w{number}", gpu=1, lease_s=None))
            await manager.state(f"w{number}", "allocated")
            await manager.say(deregister(f"w{number}"))
            await manager.state(f"w{number}", "ended")
            seen.append((datetime.now(UTC), dict(await manager.records())))
        assert sum(line["type"] == "snapshot" and line.get("last", False) for line in await manager.history()) > 1
    where = BusConnection(bus=url, host=HOST, cluster=CLUSTER)
    async with connect(url) as bus:
        for moment, records in seen[::4]:
            (part,) = await rebuild.rebuild(bus, where, None, moment)
            told = {key: json.loads(kept.wire) for key, kept in part.replay.records.items()}
            assert {key for key in told if not key.startswith("@")} == {
                key for key in records if not key.startswith("@")
            }
            assert all(told[key] == records[key] for key in records if not key.startswith("@"))
