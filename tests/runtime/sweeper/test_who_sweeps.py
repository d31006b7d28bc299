"""Which of several managers sweeps: the first of those that live and say so; one at a time, whatever each believes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
import structlog
from msgspec import structs

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, TopicSpec
from outfitter_proto.codec import encode
from outfitter_proto.keys import host_writer, sweeper_writer
from outfitter_proto.names import managers_topic
from outfitter_proto.partitioning import murmur2, partition_of
from outfitter_proto.records import Beat
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.identity import host_identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper import partition_sweeper, sweeping_manager
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager
from runtime.sweeper.conftest import WITHIN_S, letters, say
from support.bus.faulty_bus import FaultyBus
from support.managers.in_process import CLUSTER, TOPICS, register
from support.wire_samples import SAMPLES

AT = SAMPLES["checkpoint"].at
LONG = 1000.0
"""Seconds between two signs: within three of them no test ends."""
PARTITIONS = 6


def ranked(count: int, partition: int | None = None) -> list[str]:
    """So many hosts (of a partition of `PARTITIONS`), whoever sweeps first at the front."""
    names = [name for n in range(400) if partition in (None, partition_of(name := f"h{n}", PARTITIONS))]
    return sorted(names[:count], key=lambda host: murmur2(host_writer(host).encode()))


async def live(bus: Bus, host: str, partition: int = 0, *, sweeps: bool = True, stopped: bool = False) -> None:
    """A sign of life of the host's manager."""
    beat = Beat(writer=host_writer(host), instance="i", version="0", sweeps=sweeps)
    if stopped:
        beat = Beat(writer=host_writer(host), instance="i", version="0", sweeps=sweeps, stopped_at=AT)
    await bus.publish(managers_topic(CLUSTER), partition, Entry(beat.key.encode(), encode(beat)))


def manager(bus: Bus, host: str, *, partitions: int = 1, beat_s: float | None = LONG) -> SweepingManager:
    identity, instruments = host_identity(CLUSTER, host), Instruments.of(Metrics())
    return SweepingManager(
        bus, partitions=partitions, identity=identity, instruments=instruments, beat_s=beat_s, grace_s=0.0
    )


@asynccontextmanager
async def running(sweeper: SweepingManager) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run)
        yield
        tasks.cancel_scope.cancel()


async def sweeps(sweeper: SweepingManager, count: int) -> None:
    """Wait until it sweeps so many partitions."""
    with anyio.fail_after(WITHIN_S):
        while len(sweeper._sweepers) != count:  # noqa: ASYNC110  (told by nobody)
            await anyio.sleep(0.01)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping_manager, "LOOK_S", 0.02)
    monkeypatch.setattr(partition_sweeper, "FENCED_S", 0.05)


async def test_of_the_live_managers_that_say_they_sweep_the_one_with_the_lowest_hash_does(made: FaultyBus) -> None:
    first, second, own, *rest = ranked(6)
    await live(made, first, sweeps=False)
    await live(made, second, stopped=True)
    for host in (own, *rest):
        await live(made, host)
    sweeper = manager(made, own)
    async with running(sweeper):
        await sweeps(sweeper, 1)
        await live(made, first)
        await sweeps(sweeper, 0)
        await live(made, first, sweeps=False)
        await sweeps(sweeper, 1)
        await live(made, second)
        await sweeps(sweeper, 0)
        await live(made, second, stopped=True)
        await sweeps(sweeper, 1)


@pytest.mark.parametrize("others", [set(), {3}, {0, 3}, {1, 2, 3, 4, 5}, {5, 1}])
async def test_every_partition_has_one_sweeper_and_those_without_a_manager_that_of_the_next_one(
    bus: FaultyBus, others: set[int]
) -> None:
    await all_topics.create(bus, CLUSTER, partitions=PARTITIONS)
    hosts = {partition: ranked(2, partition)[0] for partition in {2, *others}}
    for partition, host in hosts.items():
        await live(bus, host, partition)
    due = {partition: await manager(bus, host, partitions=PARTITIONS)._due() for partition, host in hosts.items()}
    assert all(partition in mine for partition, mine in due.items())
    assert sorted(each for mine in due.values() for each in mine) == list(range(PARTITIONS))
    if others == {0, 3}:
        assert due == {0: {0, 5, 4}, 2: {2, 1}, 3: {3}}


async def test_without_signs_each_manager_tries_and_what_one_of_them_leaves_the_next_one_answers(
    made: FaultyBus,
) -> None:
    first, second = (manager(made, host, beat_s=None) for host in ranked(2))
    async with running(first):
        await say(made, b"", None)
        await letters(made, 1)
        async with running(second):
            await say(made, b"", None)
            await letters(made, 2)
            await sweeps(second, 1)
        await say(made, b"", None)
        await letters(made, 3)
    assert [letter.source.offset for letter in await letters(made, 3)] == [0, 1, 2]


@pytest.mark.parametrize("partitions", [1, 0])
async def test_where_the_signs_cannot_be_read_each_manager_tries(bus: FaultyBus, partitions: int) -> None:
    """The topic of managers is not there, or has fewer partitions."""
    if partitions:
        await bus.create_topics([TopicSpec(managers_topic(CLUSTER), partitions, {})])
    assert await manager(bus, "h0", partitions=3)._due() == {0, 1, 2}


async def test_two_that_both_believe_to_be_the_one_answer_every_message_once(made: FaultyBus) -> None:
    """Neither sees the other's signs; each fences the other again and again."""
    async with running(manager(made, "h1", beat_s=None)), running(manager(made, "h2", beat_s=None)):
        for n in range(30):
            await say(made, register(f"w{n}", host="nowhere"), "nowhere")
            await letters(made, n + 1)
    assert [letter.source.offset for letter in await letters(made, 30)] == list(range(30))


async def test_a_manager_that_loses_the_right_says_that_it_does_not_sweep_and_sweeps_again_with_it(
    made: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[str] = []

    async def missing_rights(*_: object) -> list[str]:
        return list(missing)

    monkeypatch.setattr(made, "missing_rights", missing_rights)
    sweeper = manager(made, "h0")
    with structlog.testing.capture_logs() as lines:
        async with running(sweeper):
            await sweeps(sweeper, 1)
            assert sweeper.sweeps
            missing.append("Write on transactional id x")
            await sweeps(sweeper, 0)
            assert not sweeper.sweeps
            missing.clear()
            await sweeps(sweeper, 1)
            assert sweeper.sweeps
    assert [line["missing"] for line in lines if line["log_level"] == "warning"] == [["Write on transactional id x"]]


LATER = structs.replace(
    SAMPLES["checkpoint"], writer=sweeper_writer(2), cluster=CLUSTER, scope="sweeper", format=2, needs=["cordon"]
)


@pytest.mark.parametrize(
    ("unusable", "said"),
    [(encode(LATER), "needs cordon"), (b'{"type":"later"}', "later"), (b"{", "partition 2 is not swept")],
)
async def test_a_checkpoint_that_cannot_be_used_stops_the_sweeping_of_no_other_partition(
    bus: FaultyBus, unusable: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await all_topics.create(bus, CLUSTER, partitions=4)
    key = LATER.key.encode()
    await bus.publish(TOPICS.allocations, 2, Entry(key, unusable))
    sweeper = manager(bus, "h0", partitions=4, beat_s=None)

    async def swept_partitions(count: int) -> None:
        with anyio.fail_after(WITHIN_S):
            metrics = sweeper.instruments.metrics.registry
            while metrics.get_sample_value("outfitter_swept_partitions") != count:  # noqa: ASYNC110  (told by nobody)
                await anyio.sleep(0.01)

    monkeypatch.setattr(partition_sweeper, "REFUSED_S", 0.05)
    with structlog.testing.capture_logs() as lines:
        async with running(sweeper):
            await sweeps(sweeper, 4)
            await swept_partitions(3)
            for partition in (0, 1, 3):
                await say(bus, b"", None, partition)
                await letters(bus, 1, partition)
            assert sweeper.sweeps
            await say(bus, b"", None, 2)
            await bus.publish(TOPICS.allocations, 2, Entry(key, None))  # it was repaired
            await letters(bus, 1, 2)
            await swept_partitions(4)
    errors = [line for line in lines if line["log_level"] == "error"]
    assert [(line["event"], line["partition"]) for line in errors] == [("a partition cannot be swept", 2)]
    assert LATER.key in errors[0]["error"]
    assert said in errors[0]["error"]
