"""What is nobody's becomes a dead letter once (embedded bus).

On real brokers with several managers: test_sweeping_on_kafka.py.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Entry, Message, TooLargeError
from outfitter_proto.codec import encode
from outfitter_proto.keys import checkpoint_key, sweeper_writer
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import NO_TOKEN, Checkpoint, CommitNumber, InputPosition
from outfitter_service.metrics import Metrics
from outfitter_service.runtime import dead_letter_quota
from outfitter_service.runtime.dead_letter_quota import A_MINUTE
from outfitter_service.runtime.identity import host_identity
from outfitter_service.runtime.input.scope import PartitionScope, unroutable
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager
from runtime.sweeper.conftest import GRACE_S, letters, say, sweeping, swept
from support.bus.faulty_bus import FaultyBus
from support.checker import verdict as checker
from support.managers.in_process import (
    CLUSTER,
    HOST,
    TOPICS,
    deregister,
    heartbeat,
    register,
    serving,
    static,
)


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
    async with serving(made, static(1), tmp_path) as manager, sweeping(made):
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
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
    async with serving(made, static(), tmp_path) as manager:
        await manager.stop()
    async with sweeping(made, grace=0.0):
        await say(made, register("w", gpu=1), HOST)
        after = await say(made, b"", None)
        await swept(made, after)
        assert [letter.source.offset for letter in await letters(made, 1)] == [after]
        async with serving(made, static(), tmp_path) as manager:
            await manager.state("w", "allocated")


async def test_a_served_hosts_messages_are_its_managers_whatever_they_are(made: FaultyBus, tmp_path: Path) -> None:
    async with serving(made, static(), tmp_path) as manager, sweeping(made, grace=0.0):
        garbage = await say(made, b"\xff", HOST)
        after = await say(made, b"", None)
        await swept(made, after)
        await manager.say(register("w", gpu=1))
        await manager.state("w", "allocated")
        assert sorted((x.source.offset, x.writer) for x in await letters(made, 2)) == [
            (garbage, f"host/{HOST}"), (after, "sweeper/0"),
        ]  # fmt: skip


async def test_a_manager_that_starts_within_the_grace_answers_what_came_before_it(
    made: FaultyBus, tmp_path: Path
) -> None:
    async with sweeping(made, grace=600.0):
        await say(made, register("w", gpu=1), HOST)
        async with serving(made, static(), tmp_path) as manager:
            await manager.state("w", "allocated")


async def test_a_manager_that_starts_after_the_dead_letter_does_not_answer_too(made: FaultyBus, tmp_path: Path) -> None:
    async with sweeping(made):
        await say(made, register("early", gpu=1), HOST)
        await letters(made, 1)
        async with serving(made, static(), tmp_path) as manager:
            await manager.say(register("late", gpu=1))
            await manager.state("late", "allocated")
            assert f"{HOST}/early/1" not in await manager.records()
        async with serving(made, static(), tmp_path) as manager:  # and neither does the next one
            await manager.say(register("later", gpu=1))
            await manager.state("later", "allocated")
            assert f"{HOST}/early/1" not in await manager.records()
    assert (await checker.verdict(made.url)).violations == ()


async def passed_over(bus: FaultyBus, end: int) -> None:
    """Write the position of a sweeper that took the ledger's topic for one that was deleted meanwhile."""
    input_id = (await bus.topic(TOPICS.registrations)).id
    checkpoint = Checkpoint(
        writer=sweeper_writer(0), instance="s", cluster=CLUSTER, scope="sweeper", commit=CommitNumber(1),
        token=NO_TOKEN, input=InputPosition(topic_id=input_id, partition=0, from_=0, to=end), at=datetime.now(UTC),
        ledger_id="of-a-topic-that-is-gone",
    )  # fmt: skip
    await bus.publish(TOPICS.allocations, 0, Entry(checkpoint.key.encode(), encode(checkpoint)))


async def test_a_manager_answers_what_was_passed_over_for_the_hosts_of_another_ledger(
    made: FaultyBus, tmp_path: Path
) -> None:
    await passed_over(made, await say(made, register("early", gpu=1), HOST) + 1)
    async with serving(made, static(), tmp_path) as manager:
        await manager.state("early", "allocated")


async def test_a_sweeper_begins_anew_after_a_position_of_another_ledger(made: FaultyBus) -> None:
    await passed_over(made, await say(made, register("early", gpu=1), HOST) + 1)
    async with sweeping(made):
        assert [letter.code for letter in await letters(made, 1)] == ["no-manager"]
    [*_, last] = [m for m in await _ledger(made) if m.key == checkpoint_key(sweeper_writer(0)).encode()]
    assert json.loads(last.value or b"")["ledger_id"] == (await made.topic(TOPICS.allocations)).id


async def _ledger(bus: FaultyBus) -> list[Message]:
    async with await bus.open_reader(TOPICS.allocations, 0, start=None, committed=True) as reader:
        return await reader.fetch()


async def test_a_flood_of_nobodys_messages_is_split_over_transactions_and_answered_in_order(made: FaultyBus) -> None:
    offsets = [await say(made, b"\xab" * 60_000, None) for _ in range(60)]
    async with sweeping(made):
        assert [letter.source.offset for letter in await letters(made, 60)] == offsets


async def test_while_dead_letters_are_refused_for_their_size_the_log_says_so_once_with_the_remedy(
    made: FaultyBus,
) -> None:
    left = 3

    async def refuse(point: str) -> None:
        nonlocal left
        if point == "commit:before" and left:
            left -= 1
            raise TooLargeError("it takes 300 bytes", topic=TOPICS.dead_letters, size=301)

    made.script = refuse
    with capture_logs() as said:
        async with sweeping(made, grace=0.0):
            await say(made, register("w"), None)
            await letters(made, 1)
            await say(made, register("w"), None)  # by the next letter the log has what was said about the first
            await letters(made, 2)
    refused, works = (line for line in said if line["log_level"] in ("warning", "info") and "bus" in line["event"])
    assert refused["event"] == "the bus refuses this manager, trying until it does not"
    assert f"topic {TOPICS.dead_letters} takes less than a commit" in refused["error"]
    assert works["event"] == "the bus works again"
    assert left == 0


async def test_what_was_swept_is_swept_again_by_nobody(made: FaultyBus) -> None:
    for _ in range(3):
        async with sweeping(made):
            offset = await say(made, b"", None)
            await swept(made, offset)
    assert len(await letters(made, 3)) == 3


async def test_two_sweepers_of_the_same_partitions_repeat_nothing(bus: FaultyBus) -> None:
    await all_topics.create(bus, CLUSTER, partitions=4)
    async with sweeping(bus, partitions=4):
        for partition in range(4):
            await say(bus, b"", None, partition)
            await letters(bus, 1, partition)
        sweeper = SweepingManager(
            bus, partitions=4, identity=host_identity(CLUSTER, "t"), instruments=Instruments.of(Metrics()),
            grace_s=GRACE_S,
        )  # fmt: skip
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sweeper.run)
            for partition in range(4):
                await say(bus, b"", None, partition)
                await letters(bus, 2, partition)
            tasks.cancel_scope.cancel()
    for partition in range(4):
        assert [letter.source.offset for letter in await letters(bus, 2, partition)] == [0, 1]


def test_a_batch_that_cannot_be_read_says_so_to_its_sender_and_not_that_it_has_no_key() -> None:
    why = "the record batch at offset 7 unpacks to more than 2097152 bytes"
    batch = Message("t", 0, 7, None, b"packed", 0, why)
    found = unroutable(batch, 1)
    assert found is not None
    assert found.code == "unreadable"
    assert found.reason.startswith(why)
    assert PartitionScope(0, 1, "partition/0").refusal(batch) == found.reason
    keyless = unroutable(Message("t", 0, 7, None, b"{}", 0), 1)
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
