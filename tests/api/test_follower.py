"""The follower: what the topics say is in the model, from the start on and as it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import (
    Bus,
    BusAuthorizationError,
    BusConfigurationError,
    BusError,
    BusUnavailableError,
    Entry,
    connect,
)
from outfitter_proto.codec import encode
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import DeadLetter, MessageSource, Note, Transition
from outfitter_service.api import follower as followers
from outfitter_service.api import stream
from outfitter_service.api.follower import Follower
from outfitter_service.api.model.fleet import Fleet
from support.api import NOW, PARTITIONS, Events, allocation, checkpoint, host_record, serving_api
from support.bus.remaking import add_partitions_to

pytestmark = pytest.mark.slow

WITHIN_S = 30.0


async def publish(bus: Bus, topic: str, host: str, *records: Any, key: str | None = None) -> None:
    """Publish records to the host's partition; None deletes `key`."""
    for record in records:
        value = None if record is None else encode(record)
        entry = Entry((key or record.key).encode(), value)
        await bus.publish(topic, partition_of(host, PARTITIONS), entry)


@asynccontextmanager
async def following(url: str, cluster: str, **options: Any) -> AsyncIterator[Follower]:
    async with followers.opened(url, {}, cluster, **options) as follower, anyio.create_task_group() as tasks:
        tasks.start_soon(follower.run)
        yield follower
        tasks.cancel_scope.cancel()


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - what is waited for is in another place
            await anyio.sleep(0.01)


async def caught_up(follower: Follower) -> Fleet:
    await until(lambda: follower.fleet is not None)
    assert follower.fleet is not None
    return follower.fleet


def step(host: str, worker: str, at: datetime = NOW) -> Transition:
    return Transition(
        at=at, host=host, worker=worker, incarnation="i", event="register", to="allocated", explanation="granted",
        record=allocation(host, worker),
    )  # fmt: skip


def letter(offset: int) -> DeadLetter:
    source = MessageSource(topic="t", partition=0, offset=offset)
    return DeadLetter(at=NOW, writer="host/a", source=source, reason="bad", length=0, sha256="", body=b"")


async def test_it_begins_with_the_newest_record_of_each_key(bus: Bus, bus_url: str, cluster: str) -> None:
    ledger = topics(cluster).allocations
    for host in ("a", "b", "c", "d"):
        await publish(bus, ledger, host, host_record(host), host_record(host, gpus=3), allocation(host, "w"))
    await publish(bus, ledger, "b", None, key="b/w/run-1")
    await publish(bus, ledger, "c", checkpoint("host/c"))
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        assert fleet.hosts == ["a", "b", "c", "d"]
        assert [len(fleet.devices(host)) for host in fleet.hosts] == [3, 3, 3, 3]
        assert [len(fleet.allocations(host)) for host in fleet.hosts] == [1, 0, 1, 1]
        assert fleet.events.last == 0
        assert follower.condition == "serving"
        await until(lambda: follower.behind == 0 and fleet.writers[0].end is not None)


async def test_it_follows_each_topic_and_makes_an_event_of_each_change(bus: Bus, bus_url: str, cluster: str) -> None:
    of = topics(cluster)
    await publish(bus, of.history, "a", step("a", "before"), key="a/before/i")
    await publish(bus, of.dead_letters, "a", letter(1))
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        await until(lambda: len(fleet.steps) == len(fleet.letters) == 1)
        assert fleet.events.last == 0
        await publish(bus, of.allocations, "a", host_record("a"), allocation("a", "w"))
        await until(lambda: fleet.events.last == 2)
        await publish(bus, of.allocations, "a", None, key="a/w/run-1")
        await until(lambda: fleet.events.last == 3)
        await publish(bus, of.history, "a", step("a", "w"), key="a/w/i")
        await publish(bus, of.history, "a", Note(at=NOW, writer="host/a", event="stop", explanation=""), key="host/a")
        await until(lambda: fleet.events.last == 5)
        await publish(bus, of.dead_letters, "a", letter(2))
        await until(lambda: fleet.events.last == 6)
        kinds = [event.kind for event in fleet.events.after(0, 10)]
        assert kinds == ["host", "allocation", "allocation", "step", "step", "dead-letter"]
        assert (len(fleet.steps), len(fleet.letters), fleet.allocations("a")) == (3, 2, [])
        assert fleet.steps.oldest is None


async def test_it_begins_with_the_last_steps_of_a_long_history_and_says_that_others_are_left_out(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "NEWEST", 2)
    for worker in ("1", "2", "3"):
        await publish(bus, topics(cluster).history, "a", step("a", worker), key=f"a/{worker}/i")
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        await until(lambda: len(fleet.steps) == 2)
        assert {item.value.record.worker for item in fleet.steps.newest_first()} == {"2", "3"}
        assert fleet.steps.oldest == NOW


async def test_steps_begin_where_those_of_the_partition_with_the_shortest_part_begin(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "NEWEST", 2)
    history, month = topics(cluster).history, timedelta(days=30)
    quiet = next(host for host in "bcdef" if partition_of(host, PARTITIONS) != partition_of("a", PARTITIONS))
    await publish(bus, history, quiet, step(quiet, "w", NOW - month), key=f"{quiet}/w/i")
    async with following(bus_url, cluster) as follower:
        assert (await caught_up(follower)).steps.oldest is None
    for hour in range(4):
        await publish(bus, history, "a", step("a", "w", NOW + timedelta(hours=hour)), key="a/w/i")
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        assert len(fleet.steps) == 3
        assert fleet.steps.oldest == NOW + timedelta(hours=2)


async def test_for_one_host_it_reads_its_partition_and_shows_nothing_else(bus: Bus, bus_url: str, cluster: str) -> None:
    for host in ("a", "b", "c", "d"):
        await publish(bus, topics(cluster).allocations, host, host_record(host))
    async with following(bus_url, cluster, host="b") as follower:
        assert (await caught_up(follower)).hosts == ["b"]


async def test_when_topics_grow_it_begins_again_with_another_model(bus: Bus, bus_url: str, cluster: str) -> None:
    of = topics(cluster)
    await publish(bus, of.allocations, "a", host_record("a"))
    async with following(bus_url, cluster) as follower:
        before = await caught_up(follower)
        for topic in (of.registrations, of.allocations, of.history, of.dead_letters):
            await add_partitions_to(bus, topic, PARTITIONS + 1)
        await until(lambda: follower.fleet not in {None, before})
        after = await caught_up(follower)
        assert (after.partitions, after.hosts) == (PARTITIONS + 1, ["a"])
        assert after.events.name != before.events.name


async def test_streams_end_as_soon_as_it_begins_again_and_readers_are_told_that_events_are_missing(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 1e6)
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.1)
    async with following(bus_url, cluster) as follower:
        await caught_up(follower)
        async with serving_api(follower) as client:
            async with client.get("/api/v1/events") as response:
                events = Events(response)
                await events.until_open()
                await add_partitions_to(bus, topics(cluster).allocations, PARTITIONS + 1)
                assert await events.next() == ("end", None)
            await caught_up(follower)
            async with client.get("/api/v1/events", headers={"Last-Event-ID": events.last_id}) as response:
                assert (await Events(response).next())[0] == "reset"


async def test_without_topics_it_says_what_is_missing_and_begins_as_soon_as_they_are_there(
    bus_url: str, cluster: str
) -> None:
    async with following(bus_url, cluster) as follower:
        await until(lambda: cluster in follower.condition or "there is no bus" in follower.condition)
        assert follower.fleet is None
        async with connect(bus_url) as bus:
            await all_topics.create(bus, cluster, partitions=PARTITIONS, replication=1)
        assert (await caught_up(follower)).hosts == []


async def test_without_a_topic_of_history_the_rest_is_there_and_the_reason(
    bus: Bus, bus_url: str, cluster: str
) -> None:
    other = f"{cluster}-without"
    await all_topics.create(bus, other, partitions=1, replication=1, history=False)
    async with following(bus_url, other) as follower:
        fleet = await caught_up(follower)
        await until(lambda: fleet.steps.unavailable is not None)
        assert topics(other).history in str(fleet.steps.unavailable)
        assert fleet.letters.unavailable is None


async def test_a_record_that_is_no_json_costs_itself_only(bus: Bus, bus_url: str, cluster: str) -> None:
    ledger = topics(cluster).allocations
    await bus.publish(ledger, partition_of("a", PARTITIONS), Entry(b"a/bad/run-1", b"{"))
    await publish(bus, ledger, "a", host_record("a"))
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        await bus.publish(ledger, partition_of("a", PARTITIONS), Entry(b"a/bad/run-2", b"{\n"))
        await publish(bus, ledger, "b", host_record("b"))
        await until(lambda: fleet.hosts == ["a", "b"])


async def test_while_the_bus_is_away_the_model_stays_and_says_how_old_it_is(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    await publish(bus, topics(cluster).allocations, "a", host_record("a"))
    away = False

    async with connect(bus_url) as own:
        stable_end = own.stable_end

        async def stable_end_or_none(topic: str, partition: int) -> int:
            if away:
                raise BusUnavailableError("the bus is away")
            return await stable_end(topic, partition)

        own.stable_end = stable_end_or_none  # type: ignore[method-assign]
        follower = Follower(own, cluster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            fleet = await caught_up(follower)
            away = True
            await until(lambda: follower.outage == "the bus is away")
            last = follower.as_of
            assert (follower.fleet, fleet.hosts) == (fleet, ["a"])
            away = False
            await until(lambda: follower.outage is None and follower.as_of != last)
            tasks.cancel_scope.cancel()


async def test_it_says_how_far_it_is_also_while_records_come_without_a_pause(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    ledger = topics(cluster).allocations
    async with connect(bus_url) as own:
        stable_end = own.stable_end

        async def stable_end_with_the_next_record(topic: str, partition: int) -> int:
            """An end that nobody can have reached yet: the record before it is written with the next call."""
            if topic != ledger:
                return await stable_end(topic, partition)
            await bus.publish(ledger, partition, Entry(b"a/w/run-1", encode(allocation("a", "w"))))
            return await stable_end(topic, partition) + 1

        follower = Follower(own, cluster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            await caught_up(follower)
            own.stable_end = stable_end_with_the_next_record  # type: ignore[method-assign]
            first = follower.as_of
            await until(lambda: follower.behind)
            await until(lambda: follower.as_of != first)
            tasks.cancel_scope.cancel()


async def test_it_has_what_it_says_it_has_also_in_the_middle_of_many_records(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(followers, "SLICE", 1)
    ledger, partition, count = topics(cluster).allocations, partition_of("a", PARTITIONS), 1000
    records = [allocation("a", f"w{number}") for number in range(count)]
    async with following(bus_url, cluster) as follower:
        fleet = await caught_up(follower)
        writer = await bus.open_writer(f"{cluster}-host-a", partition, topics=[ledger])
        await writer.commit([(ledger, [Entry(record.key.encode(), encode(record)) for record in records])])
        committed = datetime.now(UTC)
        while fleet.events.last < count:
            assert follower.as_of is not None
            assert follower.as_of < committed, (follower.behind, fleet.events.last)
            await anyio.lowlevel.checkpoint()
        await writer.aclose()


async def test_the_ledger_is_followed_while_history_is_slow_so_that_the_first_picture_is_no_old_one(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    of = topics(cluster)
    is_slow, goes_on = anyio.Event(), anyio.Event()
    async with connect(bus_url) as own:
        offsets = own.offsets

        async def slow_offsets(topic: str, partition: int) -> tuple[int, int]:
            if topic == of.history:
                is_slow.set()
                await goes_on.wait()
            return await offsets(topic, partition)

        own.offsets = slow_offsets  # type: ignore[method-assign]
        follower = Follower(own, cluster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            await is_slow.wait()
            await publish(bus, of.allocations, "a", allocation("a", "w"))
            published = datetime.now(UTC)
            await until(lambda: follower.as_of is not None and follower.as_of > published)
            assert follower.fleet is None
            goes_on.set()
            assert (await caught_up(follower)).hosts == ["a"]
            tasks.cancel_scope.cancel()


async def test_after_a_long_pause_it_begins_again_because_deletions_may_be_compacted_away(
    bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    await publish(bus, topics(cluster).allocations, "a", host_record("a"))
    async with following(bus_url, cluster) as follower:
        before = await caught_up(follower)
        assert follower.as_of is not None
        follower.as_of -= timedelta(seconds=followers.LONGEST_GAP_S + 60)  # as if the machine had been suspended
        await until(lambda: follower.fleet not in {None, before})
        assert (await caught_up(follower)).hosts == ["a"]


@pytest.mark.parametrize(
    ("error", "where"),
    [(BusAuthorizationError("no right any more"), "unavailable"), (BusUnavailableError("no leader"), "outage")],
    ids=["its right is gone", "its partition is away"],
)
async def test_dead_letters_that_cannot_be_read_any_further_are_no_current_picture(
    error: BusError, where: str, bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    of = topics(cluster)
    await publish(bus, of.dead_letters, "a", letter(1))
    away = False
    async with connect(bus_url) as own:
        open_reader = own.open_reader

        async def open_reader_that_fails(topic: str, *args: Any, **options: Any) -> Any:
            reader = await open_reader(topic, *args, **options)
            fetch = reader.fetch

            async def fetch_or_fail(**limits: Any) -> Any:
                if away and topic == of.dead_letters:
                    raise error
                return await fetch(**limits)

            reader.fetch = fetch_or_fail  # type: ignore[method-assign]
            return reader

        own.open_reader = open_reader_that_fails  # type: ignore[method-assign]
        follower = Follower(own, cluster)

        def reason() -> str | None:
            return follower.outage if where == "outage" else fleet.letters.unavailable

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            fleet = await caught_up(follower)
            away = True
            await until(lambda: reason() == str(error))
            away = False
            await publish(bus, of.dead_letters, "a", letter(2))
            await until(lambda: reason() is None and len(fleet.letters) == 2)
            assert follower.fleet is fleet
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("fails", [True, False], ids=["reading fails", "nothing comes"])
async def test_a_ledger_that_is_not_read_any_further_is_said_although_its_end_is_known(
    fails: bool, bus: Bus, bus_url: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(followers, "LATE_S", 0.05)
    await publish(bus, topics(cluster).allocations, "a", host_record("a"))
    away = False
    partitions: set[int] = set()

    async with connect(bus_url) as own:
        open_reader = own.open_reader

        async def open_reader_that_ends(topic: str, *args: Any, **options: Any) -> Any:
            reader = await open_reader(topic, *args, **options)
            fetch = reader.fetch

            async def fetch_or_none(**limits: Any) -> Any:
                if away and topic == topics(cluster).allocations:
                    partitions.add(args[0])
                    if fails:
                        raise BusUnavailableError("no right to read")
                    await anyio.sleep(0.01)
                    return []
                return await fetch(**limits)

            reader.fetch = fetch_or_none  # type: ignore[method-assign]
            return reader

        own.open_reader = open_reader_that_ends  # type: ignore[method-assign]
        follower = Follower(own, cluster)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follower.run)
            fleet = await caught_up(follower)
            await until(lambda: follower.behind == 0)
            away = True
            await until(lambda: len(partitions) == PARTITIONS)
            await publish(bus, topics(cluster).allocations, "b", host_record("b"))
            await until(lambda: follower.outage)
            assert ("no right to read" if fails else "have not been read") in str(follower.outage)
            away = False
            await until(lambda: follower.outage is None and fleet.hosts == ["a", "b"])
            tasks.cancel_scope.cancel()


async def test_a_bus_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "bus.db").write_text("this is no database, and long enough to be looked at: " * 100)
    async with followers.opened(f"sqlite://{tmp_path}/bus.db", {}, "c") as follower:
        with pytest.raises(BusConfigurationError):
            await follower.reach()
