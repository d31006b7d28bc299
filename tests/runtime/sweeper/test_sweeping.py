"""What is nobody's becomes a dead letter once, whoever starts, crashes or takes over meanwhile (embedded bus).

On real brokers with several managers: test_sweeping_on_kafka.py.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from msgspec import UNSET, structs

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, CommitUnknownError, Entry, Message
from outfitter_proto.codec import decode_dead_letter, encode
from outfitter_proto.keys import host_key, host_writer
from outfitter_proto.partitioning import murmur2, partition_of
from outfitter_proto.records import DeadLetter
from outfitter_service.config import load
from outfitter_service.metrics import Metrics
from outfitter_service.runtime import dead_letter_quota
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from outfitter_service.runtime.identity import host_identity
from outfitter_service.runtime.input.scope import PartitionScope, nobodys
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.service import Service
from outfitter_service.runtime.sweeper import group_member as sweeper_module
from outfitter_service.runtime.sweeper.group_member import CANDIDATES, SweeperMember, at_work, is_candidate
from support import verdict as checker
from support.faulty_bus import FaultyBus
from support.in_process_manager import (
    CLUSTER,
    HOST,
    TOPICS,
    InProcessManager,
    deregister,
    heartbeat,
    register,
    serving,
    static,
)
from support.wire_samples import SAMPLES

WITHIN_S = 20.0
GRACE_S = 0.3


@asynccontextmanager
async def sweeping(bus: Bus, *, grace: float = GRACE_S, partitions: int = 1) -> AsyncIterator[Metrics]:
    """A sweeper on `bus` while the block runs; leaving it ends the sweeper as a crash would."""
    metrics = Metrics()
    sweeper = SweeperMember(
        bus, partitions=partitions, identity=host_identity(CLUSTER, "s"), instruments=Instruments.of(metrics),
        grace_s=grace, session_s=2.0, heartbeat_s=0.1,
    )  # fmt: skip
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run)
        yield metrics
        tasks.cancel_scope.cancel()


@pytest.fixture
async def made(bus: FaultyBus) -> FaultyBus:
    """The bus, with topics of one partition."""
    await all_topics.create(bus, CLUSTER, partitions=1)
    return bus


async def say(bus: Bus, body: dict[str, Any] | bytes, key: str | None, partition: int = 0) -> int:
    value = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await bus.publish(TOPICS.registrations, partition, Entry(key.encode() if key is not None else None, value))


async def letters(bus: Bus, count: int, partition: int = 0) -> list[DeadLetter]:
    """All dead letters, once there are `count`."""
    with anyio.fail_after(WITHIN_S):
        async with await bus.open_reader(TOPICS.dead_letters, partition, start=None, committed=True) as reader:
            found: list[DeadLetter] = []
            while len(found) < count:
                found += [decode_dead_letter(m.value or b"") for m in await reader.fetch(timeout=0.2)]
            return found


async def swept(bus: Bus, position: int, partition: int = 0) -> None:
    """Wait until everything before `position` is swept: what comes after a dead letter can be counted on."""
    while max(letter.source.offset for letter in await letters(bus, 1, partition)) < position:  # noqa: ASYNC110
        await anyio.sleep(0.02)


async def test_a_message_without_a_key_becomes_a_dead_letter_with_the_remedy(made: FaultyBus) -> None:
    async with sweeping(made) as metrics:
        offset = await say(made, register("w"), None)
        [letter] = await letters(made, 1)
        assert (letter.source.offset, letter.code, letter.writer) == (offset, "no-key", "sweeper/0")
        assert "partitioner=murmur2_random" in letter.reason
        assert letter.body == json.dumps(register("w")).encode()
        assert metrics.registry.get_sample_value("outfitter_swept_partitions") == 1
        await swept(made, await say(made, b"", None))  # the one before is counted by then
        assert (metrics.registry.get_sample_value("outfitter_swept_total", {"reason": "no-key"}) or 0) >= 1


async def test_a_key_that_names_no_host_becomes_a_dead_letter(made: FaultyBus) -> None:
    async with sweeping(made):
        await made.publish(TOPICS.registrations, 0, Entry(b"\xff/", b"{}"))
        assert [letter.code for letter in await letters(made, 1)] == ["bad-key"]


async def test_a_message_in_a_wrong_partition_becomes_a_dead_letter_there_with_the_remedy(bus: FaultyBus) -> None:
    await all_topics.create(bus, CLUSTER, partitions=3)
    wrong = (partition_of(HOST, 3) + 1) % 3
    async with sweeping(bus, partitions=3):
        await say(bus, register("w"), HOST, wrong)
        [letter] = await letters(bus, 1, wrong)
        assert letter.code == "wrong-partition"
        assert letter.message_key == HOST
        assert f"partition {partition_of(HOST, 3)} of 3, not to {wrong}" in letter.reason
        assert "partitioner=murmur2_random" in letter.reason


async def test_a_message_for_a_host_without_a_manager_becomes_a_dead_letter_that_names_those_with_one(
    made: FaultyBus, tmp_path: Path
) -> None:
    async with serving(made, static(), tmp_path), sweeping(made):
        offset = await say(made, register("w", host="nowhere"), "nowhere")
        [letter] = await letters(made, 1)
        assert (letter.source.offset, letter.code, letter.message_key) == (offset, "no-manager", "nowhere")
        assert f"no manager serves host 'nowhere'; hosts served: {HOST}." in letter.reason
        assert "outfitter serve --host nowhere" in letter.reason


async def test_managers_and_sweepers_take_their_identities_for_all_topics_that_they_write_to(
    made: FaultyBus, tmp_path: Path
) -> None:
    """Only in those is what an earlier holder left open ended."""
    async with serving(made, static(1), tmp_path) as house, sweeping(made):
        await house.say(register("w", gpu=1))
        await house.state("w", "allocated")
        await say(made, b"garbage", HOST)
        await say(made, register("w"), None)
        await letters(made, 2)
    assert dict(made.written) == {
        f"{CLUSTER}-host-{HOST}": set(TOPICS) - {TOPICS.registrations},
        f"{CLUSTER}-sweeper-0": {TOPICS.allocations, TOPICS.dead_letters},
    }
    assert made.named == made.written


async def test_heartbeats_and_farewells_to_a_host_without_a_manager_want_no_answer(made: FaultyBus) -> None:
    """They can be many, and their registration has its dead letter. What cannot be read has one of its own."""
    async with sweeping(made, grace=0.0):
        for body in (heartbeat("w"), deregister("w")):
            await say(made, body, HOST)
        garbage = await say(made, b"\xff", HOST)
        after = await say(made, b"", None)
        await swept(made, after)
        assert [letter.source.offset for letter in await letters(made, 2)] == [garbage, after]
    assert (await checker.verdict(made.url)).violations == ()


async def test_messages_for_a_host_whose_manager_stopped_or_died_wait_for_it(made: FaultyBus, tmp_path: Path) -> None:
    async with serving(made, static(), tmp_path) as house:
        await house.stop()
    async with sweeping(made, grace=0.0):
        await say(made, register("w", gpu=1), HOST)
        after = await say(made, b"", None)
        await swept(made, after)
        assert [letter.source.offset for letter in await letters(made, 1)] == [after]
        async with serving(made, static(), tmp_path) as house:
            await house.state("w", "allocated")


async def test_a_served_hosts_messages_are_its_managers_whatever_they_are(made: FaultyBus, tmp_path: Path) -> None:
    async with serving(made, static(), tmp_path) as house, sweeping(made, grace=0.0):
        garbage = await say(made, b"\xff", HOST)
        after = await say(made, b"", None)
        await swept(made, after)
        await house.say(register("w", gpu=1))
        await house.state("w", "allocated")
        assert sorted((x.source.offset, x.writer) for x in await letters(made, 2)) == [
            (garbage, f"host/{HOST}"), (after, "sweeper/0"),
        ]  # fmt: skip


async def test_a_manager_that_starts_within_the_grace_answers_what_came_before_it(
    made: FaultyBus, tmp_path: Path
) -> None:
    async with sweeping(made, grace=600.0):
        await say(made, register("w", gpu=1), HOST)
        async with serving(made, static(), tmp_path) as house:
            await house.state("w", "allocated")


async def test_a_manager_that_starts_after_the_dead_letter_does_not_answer_too(made: FaultyBus, tmp_path: Path) -> None:
    async with sweeping(made):
        await say(made, register("early", gpu=1), HOST)
        await letters(made, 1)
        async with serving(made, static(), tmp_path) as house:
            await house.say(register("late", gpu=1))
            await house.state("late", "allocated")
            assert f"{HOST}/early/1" not in await house.records()
        async with serving(made, static(), tmp_path) as house:  # and neither does the next one
            await house.say(register("later", gpu=1))
            await house.state("later", "allocated")
            assert f"{HOST}/early/1" not in await house.records()
    assert (await checker.verdict(made.url)).violations == ()


async def test_a_flood_of_nobodys_messages_is_split_over_transactions_and_answered_in_order(made: FaultyBus) -> None:
    offsets = [await say(made, b"\xab" * 60_000, None) for _ in range(60)]
    async with sweeping(made):
        assert [letter.source.offset for letter in await letters(made, 60)] == offsets


async def test_what_was_swept_is_swept_again_by_nobody(made: FaultyBus) -> None:
    for _ in range(3):
        async with sweeping(made):
            offset = await say(made, b"", None)
            await swept(made, offset)
    assert len(await letters(made, 3)) == 3


async def test_two_sweepers_share_the_partitions_and_repeat_nothing(bus: FaultyBus) -> None:
    await all_topics.create(bus, CLUSTER, partitions=4)
    async with sweeping(bus, partitions=4):
        for partition in range(4):
            await say(bus, b"", None, partition)
            await letters(bus, 1, partition)
        sweeper = SweeperMember(
            bus, partitions=4, identity=host_identity(CLUSTER, "t"), instruments=Instruments.of(Metrics()),
            grace_s=GRACE_S, session_s=2.0, heartbeat_s=0.1,
        )  # fmt: skip
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sweeper.run)
            for partition in range(4):
                await say(bus, b"", None, partition)
                await letters(bus, 2, partition)
            tasks.cancel_scope.cancel()
    for partition in range(4):
        assert [letter.source.offset for letter in await letters(bus, 2, partition)] == [0, 1]


# --- at any moment -------------------------------------------------------------------------------------


class At:
    """A script that does something once, at the `n`th point after it was armed."""

    def __init__(self, n: int, act: Callable[[], Awaitable[None]]) -> None:
        self.armed = True
        self.done = False
        self._left = n
        self._act = act

    async def __call__(self, point: str) -> None:
        if not self.armed or self.done or point.startswith(("fetch", "publish")):
            return
        self._left -= 1
        if self._left < 0:
            self.done = True
            await self._act()


async def answered_once(bus: Bus, house: InProcessManager, offset: int) -> str:
    """Wait until the registration at `offset` is answered by one, and everything after it; say by whom."""
    after = await say(bus, b"", None)
    await house.say(register("after", gpu=1))
    await house.state("after", "allocated")
    await swept(bus, after)
    mine = f"{HOST}/w/1" in await house.records()
    by_sweeper = [letter for letter in await letters(bus, 1) if letter.source.offset == offset]
    assert (len(by_sweeper), mine) in {(1, False), (0, True)}
    report = await checker.verdict(house.bus.url)
    assert report.violations == ()
    return "the manager" if mine else "the sweeper"


Race = Callable[[str, Path, int], Awaitable[str | None]]


async def at_each_point(race: Race, folder: Path, points: int) -> list[str]:
    """Run `race` for each of its points, some side by side; return who has answered, for those that were met."""
    limiter = anyio.CapacityLimiter(8)
    found: list[str] = []

    async def run(n: int) -> None:
        async with limiter:
            (folder / str(n)).mkdir()
            who = await race(f"sqlite://{folder}/{n}/bus.db?synchronous=NORMAL", folder / str(n), n)
            if who is not None:
                found.append(who)

    async with anyio.create_task_group() as tasks:
        for n in range(points):
            tasks.start_soon(run, n)
    return found


async def a_manager_starts_at(url: str, folder: Path, n: int) -> str | None:
    """The sweeper stands still at its `n`th point while the host's first manager starts. None: no such point."""
    async with FaultyBus(url) as said, FaultyBus(url) as bus:
        await all_topics.create(said, CLUSTER, partitions=1)
        offset = await say(said, register("w", gpu=1), HOST)
        met, go = anyio.Event(), anyio.Event()

        async def stand() -> None:
            met.set()
            await go.wait()

        bus.script = At(n, stand)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await met.wait()
            async with serving(said, static(4), folder) as house:
                go.set()
                who = await answered_once(said, house, offset)
                return who if met.is_set() else None


async def test_whenever_a_hosts_first_manager_starts_a_message_is_answered_by_one(tmp_path: Path) -> None:
    answers = await at_each_point(a_manager_starts_at, tmp_path, 26)
    assert set(answers) == {"the manager", "the sweeper"}


async def the_sweeper_works_at(url: str, folder: Path, n: int) -> str | None:
    """The host's first manager stands still at its `n`th point while the sweeper does what it can."""
    async with FaultyBus(url) as said, FaultyBus(url) as bus:
        await all_topics.create(said, CLUSTER, partitions=1)
        offset = await say(said, register("w", gpu=1), HOST)
        script = bus.script = At(n, lambda: anyio.sleep(GRACE_S + 1.0))
        async with sweeping(said), serving(bus, static(4), folder) as house:
            house.bus = said
            who = await answered_once(said, house, offset)
            return who if script.done else None


async def test_whatever_the_sweeper_does_while_a_hosts_first_manager_starts_a_message_is_answered_by_one(
    tmp_path: Path,
) -> None:
    answers = await at_each_point(the_sweeper_works_at, tmp_path, 44)
    assert set(answers) == {"the manager", "the sweeper"}


async def a_manager_starts_after_a_crash_at(url: str, folder: Path, n: int) -> str | None:
    """The sweeper crashes at its `n`th point, then the host's first manager starts, then another sweeper."""
    async with FaultyBus(url) as said, FaultyBus(url) as bus:
        await all_topics.create(said, CLUSTER, partitions=1)
        offset = await say(said, register("w", gpu=1), HOST)
        met = anyio.Event()

        async def crash() -> None:
            met.set()
            await anyio.sleep_forever()

        bus.script = At(n, crash)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await met.wait()
        async with serving(said, static(4), folder) as house:
            await house.say(register("first", gpu=1))
            await house.state("first", "allocated")
            async with sweeping(said):
                who = await answered_once(said, house, offset)
                return who if met.is_set() else None


async def test_what_a_sweeper_had_claimed_when_it_crashed_is_answered_by_its_successor_alone(tmp_path: Path) -> None:
    answers = await at_each_point(a_manager_starts_after_a_crash_at, tmp_path, 26)
    assert set(answers) == {"the manager", "the sweeper"}


async def it_goes_wrong_at(url: str, folder: Path, n: int, *, error: Exception | None) -> str | None:
    async with FaultyBus(url) as said, FaultyBus(url) as bus:
        await all_topics.create(said, CLUSTER, partitions=1)
        offsets = [await say(said, register("w", host=host), host) for host in ("a", "b")]
        offsets += [await say(said, heartbeat("w"), None), await say(said, register("w", host="a"), "a")]
        crashed = anyio.Event()

        async def act() -> None:
            crashed.set()
            if error is not None:
                raise error
            await anyio.sleep_forever()

        bus.script = At(n, act)
        async with sweeping(bus):
            with anyio.move_on_after(GRACE_S + 2.0):
                await crashed.wait()
            if error is not None:
                await letters(said, 4)
        async with sweeping(said, grace=0.0):
            last = await say(said, b"", None)
            await swept(said, last)
        assert [letter.source.offset for letter in await letters(said, 5)] == [*offsets, last], f"at point {n}"
        assert (await checker.verdict(said.url)).violations == ()
        return "the sweeper" if crashed.is_set() else None


@pytest.mark.parametrize("error", [None, CommitUnknownError("who knows")])
async def test_a_sweeper_that_crashes_or_fails_at_any_point_repeats_and_forgets_nothing(
    tmp_path: Path, error: Exception | None
) -> None:
    answers = await at_each_point(partial(it_goes_wrong_at, error=error), tmp_path, 26)
    assert len(answers) >= 12


# --- who takes part ------------------------------------------------------------------------------------


NOW = SAMPLES["checkpoint"].at


def neighbours(*hosts: str, stopped: bool = False, at: datetime = NOW) -> dict[bytes, bytes]:
    """The ledger's records of `hosts`, whose managers committed last `at` that time."""
    record, last = SAMPLES["host"], SAMPLES["checkpoint"]
    manager = type(record.manager)(
        instance="i", version="0", since=record.since, stopped_at=record.since if stopped else None, pid_ns=UNSET
    )
    found: dict[bytes, bytes] = {}
    for host in hosts:
        found[host_key(host).encode()] = encode(type(record)(host=host, manager=manager, since=record.since))
        checkpoint = structs.replace(last, writer=host_writer(host), at=at)
        found[checkpoint.key.encode()] = encode(checkpoint)
    return found


def test_all_managers_of_a_small_cluster_and_some_of_a_large_one_take_part_in_sweeping() -> None:
    few = [f"h{n}" for n in range(CANDIDATES)]
    assert all(is_candidate(host, [other for other in few if other != host]) for host in few)
    many = [f"h{n}" for n in range(100)]
    chosen = {host for host in many if is_candidate(host, [other for other in many if other != host])}
    assert chosen == set(sorted(many, key=lambda host: murmur2(host.encode()))[:CANDIDATES])


def test_managers_that_stopped_or_are_silent_are_not_counted_on_for_the_sweeping() -> None:
    before = NOW - timedelta(hours=1)
    known = {
        **neighbours("works"),
        **neighbours("stopped", stopped=True),
        **neighbours("silent", at=before),
        host_key("damaged").encode(): b"{",
        host_key("arriving").encode(): neighbours("arriving")[host_key("arriving").encode()],
        b"@checkpoint/sweeper/0": b"{}",
    }
    assert at_work(known, since=before) == ["works"]


async def test_those_who_need_not_sweep_do_it_by_turns_for_the_others_may_have_died(
    made: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = sorted((f"h{n}" for n in range(100)), key=lambda host: murmur2(host.encode()))
    host = others.pop()
    drawn: list[float] = []
    lots = itertools.cycle([0.99, 0.5, 0.0])

    def draw() -> float:
        drawn.append(next(lots))
        return drawn[-1]

    monkeypatch.setattr(random, "random", draw)
    monkeypatch.setattr(sweeper_module, "TURN_S", 0.5)
    metrics = Metrics()
    sweeper = SweeperMember(
        made, partitions=1, identity=host_identity(CLUSTER, host), instruments=Instruments.of(metrics),
        grace_s=0.0, session_s=2.0, heartbeat_s=0.1,
    )  # fmt: skip
    await say(made, register("w"), None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sweeper.run_by_turns, others)
        with anyio.fail_after(WITHIN_S):
            while not metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110  (told by nobody)
                await anyio.sleep(0.02)
            assert drawn[:3] == [0.99, 0.5, 0.0]
            while metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("silent", [False, True])
async def test_a_manager_leaves_the_sweeping_to_others_only_while_they_are_heard_of(
    made: FaultyBus, url: str, tmp_path: Path, silent: bool
) -> None:
    host, *others = sorted((f"h{n}" for n in range(20)), key=lambda host: murmur2(host.encode()), reverse=True)
    path = tmp_path / "outfitter.toml"
    path.write_text(f'bus = "{url}"\ncluster = "{CLUSTER}"\nhost = "{host}"\nhttp = "127.0.0.1:0"\n{static(1)}')
    manager = Service(load(path, environment={}))
    interval = timedelta(seconds=manager.settings.checkpoint_interval)
    now = datetime.now(UTC)
    for key, value in neighbours(*others, at=now - 3 * interval if silent else now + interval).items():
        await made.publish(TOPICS.allocations, 0, Entry(key, value))
    with structlog.testing.capture_logs() as lines:

        def leaves_it() -> bool:
            return any(line["event"].startswith("other managers look after") for line in lines)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(manager.run)
            with anyio.fail_after(WITHIN_S):
                while not leaves_it() and not manager.metrics.registry.get_sample_value("outfitter_swept_partitions"):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            manager.stop()
        assert leaves_it() != silent


def test_a_batch_that_cannot_be_read_says_so_to_its_sender_and_not_that_it_has_no_key() -> None:
    why = "the record batch at offset 7 unpacks to more than 2097152 bytes"
    batch = Message("t", 0, 7, None, b"packed", 0, why)
    found = nobodys(batch, 1)
    assert found is not None
    assert found.code == "unreadable"
    assert found.reason.startswith(why)
    assert PartitionScope(0, 1, "partition/0").refusal(batch) == found.reason
    keyless = nobodys(Message("t", 0, 7, None, b"{}", 0), 1)
    assert keyless is not None
    assert keyless.code == "no-key"


async def test_of_a_flood_of_nobodys_messages_so_many_are_written_down_a_minute_and_the_rest_is_counted(
    made: FaultyBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_quota, "WINDOW_S", 0.5)
    async with await made.open_writer("flood", 0) as writer:
        entries = [Entry(None, b"") for _ in range(A_MINUTE + 200)]
        await writer.commit([(TOPICS.registrations, entries), (TOPICS.history, [])])
    async with sweeping(made) as metrics:
        *each, last = await letters(made, A_MINUTE + 1)
        assert [letter.source.offset for letter in each] == list(range(A_MINUTE))
        assert (last.source.offset, last.count, last.until) == (A_MINUTE, 200, A_MINUTE + 200)
        assert metrics.registry.get_sample_value("outfitter_dead_letters_total") == A_MINUTE + 200
        assert metrics.registry.get_sample_value("outfitter_dead_letters_omitted_total") == 200
    assert (await checker.verdict(made.url)).violations == ()
