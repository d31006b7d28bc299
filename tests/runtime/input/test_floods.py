"""One host's flood does not starve the other hosts of its partition, in cluster scope."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from outfitter_proto import topics as all_topics
from outfitter_proto.bus import Bus, Entry, Message, Reader, TooLargeError, connect
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.runtime.identity import of_partition, replica_identity
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.processor.limits import Limits
from support.bus.faulty_bus import FaultyBus
from support.checker.verdict import verdict
from support.kafka.broker import KafkaBroker
from support.managers.fleet import CONFIG as FLEET
from support.managers.fleet import PARTITIONS, Fleet
from support.managers.in_process import CLUSTER, TOPICS, InProcessManager, register, serving, static

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

HANGS_AFTER_S = 240.0
"""A flood takes as long as a busy machine lets it."""
FLOOD = 20_000
"""Registrations: several times what is read ahead."""
LITTLE = Limits(lease_grace_s=0.1, read_ahead=200, events_per_commit=50, checkpoint_records=1)
"""So that a small flood is one, and that the position is written even where there is nothing else to write."""
SMALL_FLOOD = 3000
BATCH = 400
"""Registrations that Kafka takes at once."""


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[FaultyBus]:
    async with FaultyBus(f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL") as bus:
        await all_topics.create(bus, CLUSTER, partitions=1)
        yield bus


@asynccontextmanager
async def managed(bus: Bus, folder: Path, limits: Limits | None = None) -> AsyncIterator[InProcessManager]:
    """A manager of the whole partition, another one each time."""
    identity = of_partition(replica_identity(CLUSTER), 0)
    scope = PartitionScope(0, 1, identity.writer)
    async with serving(bus, static(1), folder, identity=identity, scope=scope, limits=limits, ready=False) as manager:
        yield manager


async def say(bus: Bus, *bodies: dict[str, Any], cluster: str = CLUSTER, partition: int = 0) -> None:
    """Put many messages into the input at once."""
    names = topics(cluster)
    async with await bus.open_writer("flood", partition) as writer:
        for start in range(0, len(bodies), BATCH):
            part = bodies[start : start + BATCH]
            entries = [Entry(body["host"].encode(), json.dumps(body).encode()) for body in part]
            await writer.commit([(names.registrations, entries), (names.history, [])])


def flood(count: int, host: str = "loud") -> list[dict[str, Any]]:
    return [register(f"w{number}", host=host, gpu=1) for number in range(count)]


async def place(
    bus: Bus, key: str, *, state: str | None = None, cluster: str = CLUSTER, partition: int = 0
) -> dict[str, Any]:
    """Wait until `key` has a record (in that `state`); return where in the input the partition was with the commit that
    made it."""
    commit: int | None = None
    topic = topics(cluster).allocations
    async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
        with anyio.fail_after(HANGS_AFTER_S):
            while True:
                for message in await reader.fetch(max_records=10_000):
                    body = json.loads(message.value or b"{}")
                    if message.key == key.encode() and commit is None and state in (None, body["state"]):
                        commit = body["commit"]
                    elif body.get("type") == "checkpoint" and body["commit"] == commit:
                        found: dict[str, Any] = body["input"]
                        return found


async def through(manager: InProcessManager, end: int) -> None:
    """Wait until everything before `end` is decided, in turn."""
    await manager.until(lambda records: records.get("@checkpoint/partition/0", {}).get("input", {}).get("to", 0) >= end)


async def test_a_flood_of_one_host_does_not_hold_up_anothers_registration(bus: FaultyBus, tmp_path: Path) -> None:
    await say(bus, *flood(FLOOD), register("quiet", host="other", gpu=1))
    async with managed(bus, tmp_path):
        told = await place(bus, "other/quiet/1")
        assert told["to"] < FLOOD
        assert told["ahead"] == {"other": FLOOD + 1}


async def test_whoever_takes_the_partition_in_a_flood_answers_everything_once(bus: FaultyBus, tmp_path: Path) -> None:
    """Each manager is killed with the flood half decided; what was ahead of it is not decided again."""
    letters = [b"no registration"] * 3
    await say(bus, *flood(SMALL_FLOOD))
    end = SMALL_FLOOD
    for number in range(3):
        await bus.publish(TOPICS.registrations, 0, Entry(b"other", letters[number]))
        await say(bus, register(f"quiet{number}", host="other", gpu=1))
        end += 2
        async with managed(bus, tmp_path, LITTLE) as manager:
            told = await place(bus, f"other/quiet{number}/1")
            assert told["to"] < SMALL_FLOOD
            assert told["ahead"]["other"] == end
    async with managed(bus, tmp_path, LITTLE) as manager:
        await through(manager, end)
        records = await manager.records()
        assert "ahead" not in records["@checkpoint/partition/0"]["input"]
        assert len([key for key in records if key.startswith("loud/")]) == SMALL_FLOOD
        assert [letter["source"]["offset"] for letter in await manager.dead_letters(3)] == [
            SMALL_FLOOD + 2 * number for number in range(3)
        ]
        assert records["other/quiet0/1"]["state"] == "allocated"
    report = await verdict(bus.url)
    assert report.violations == ()
    assert report.counts["unread"] == 0


async def test_a_flood_of_one_host_does_not_hold_up_the_end_of_anothers_lease(bus: FaultyBus, tmp_path: Path) -> None:
    await say(bus, register("silent", host="other", gpu=1, lease_s=0.5))
    async with managed(bus, tmp_path, LITTLE):
        await place(bus, "other/silent/1")
    await say(bus, *flood(FLOOD))
    async with managed(bus, tmp_path, LITTLE):
        told = await place(bus, "other/silent/1", state="ended")
        assert told["to"] < FLOOD


async def test_a_hosts_messages_are_decided_in_order_however_far_ahead(bus: FaultyBus, tmp_path: Path) -> None:
    """Some of a host's messages are ahead of a flood, and as it says a lot as well, the rest is decided in turn."""
    limits = structs.replace(LITTLE, quiet_limit=20)
    bodies = flood(SMALL_FLOOD)
    busy = [register(f"w{number}", host="busy", gpu=1) for number in range(300)]
    for number, body in enumerate(busy):
        bodies.insert(SMALL_FLOOD // 2 + number * 5, body)
    await say(bus, *bodies)
    async with managed(bus, tmp_path, limits) as manager:
        told = await place(bus, "busy/w10/1")
        assert told["to"] < SMALL_FLOOD // 2
        assert "ahead" in told
        await through(manager, len(bodies))
        told = await place(bus, "busy/w299/1")
        assert told["to"] > SMALL_FLOOD // 2
        records = await manager.records()
        commits = [records[f"busy/w{number}/1"]["source"]["offset"] for number in range(300)]
        assert commits == sorted(commits)
        steps = [step["worker"] for step in await manager.history() if step.get("host") == "busy"]
        assert list(dict.fromkeys(steps)) == [body["worker"] for body in busy]
    assert (await verdict(bus.url)).violations == ()


class Unhurried(FaultyBus):
    """An embedded bus of which the first reader of registrations gets no further than `line` before `go` is set."""

    line = 0

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.go = anyio.Event()
        self._first = True

    async def open_reader(
        self, topic: str, partition: int, *, start: int | None, committed: bool, lenient: bool = False
    ) -> Reader:
        reader = await super().open_reader(topic, partition, start=start, committed=committed, lenient=lenient)
        if topic == TOPICS.registrations and self._first:
            self._first = False
            return _Held(self, reader)
        return reader


class _Held(Reader):
    def __init__(self, bus: Unhurried, inner: Reader) -> None:
        self._bus = bus
        self._inner = inner
        self.position = inner.position

    async def fetch(self, *, max_records: int = 1000, timeout: float = 1.0) -> list[Message]:
        if self.position >= self._bus.line:
            await self._bus.go.wait()
        found = await self._inner.fetch(max_records=max_records, timeout=timeout)
        self.position = self._inner.position
        return found

    async def seek(self, offset: int) -> None:
        await self._inner.seek(offset)

    async def aclose(self) -> None:
        await self._inner.aclose()


async def test_what_was_decided_ahead_and_come_by_is_not_lost_when_the_commit_fails(tmp_path: Path) -> None:
    """The look-ahead has read it, the input reader has skipped it, and then it turns out that nothing was committed."""
    url = f"sqlite://{tmp_path}/bus.db?synchronous=NORMAL"
    asked, fail = anyio.Event(), anyio.Event()

    async def refuse(point: str) -> None:
        if point == "commit:before" and not fail.is_set():
            asked.set()
            await fail.wait()
            raise TooLargeError("for a reason of its own")

    async with FaultyBus(url) as teller, Unhurried(url) as bus:
        await all_topics.create(teller, CLUSTER, partitions=1)
        bus.line = 1
        async with managed(bus, tmp_path, structs.replace(LITTLE, read_ahead=10, events_per_commit=1000)) as manager:
            await manager.ready()
            bus.script = refuse
            await say(teller, register("first", host="loud", gpu=1))
            await asked.wait()
            end = 32
            bus.line = 11
            await say(teller, *flood(10), register("x", host="other", gpu=1), *flood(20, host="louder"))
            bus.go.set()
            bus.go = anyio.Event()
            loop = manager.processor._loop
            assert loop is not None
            await _until(lambda: b"other" in loop._open.ahead)
            bus.go.set()
            await _until(
                lambda: loop._open.position == end and manager.processor.inputs.lookahead.lookahead_buffer is None
            )
            fail.set()
            await through(manager, end)
            assert "other/x/1" in await manager.records()
        assert (await verdict(url)).violations == ()


async def _until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - it tells nobody
            await anyio.sleep(0.01)


@pytest.mark.kafka
async def test_on_kafka_too_a_replica_answers_other_hosts_before_a_flood_is_decided(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    """…and the one that takes over from it while it lasts answers everything once."""
    cluster = kafka_broker.new_cluster()
    loud, quiet = _neighbours()
    partition = partition_of(loud, PARTITIONS)
    unhurried = FLEET.replace('lease = "60s"', 'lease = "1h"')  # else leases end in the flood, which then grows
    async with Fleet(tmp_path, kafka_broker.url, cluster, config=unhurried) as fleet, connect(kafka_broker.url) as bus:
        await say(bus, *flood(FLOOD, loud), cluster=cluster, partition=partition)
        await fleet.register([quiet], ["a"])
        one = fleet.start("one")
        told = await place(bus, f"{quiet}/a/1", cluster=cluster, partition=partition)
        assert told["ahead"][quiet] > FLOOD > told["to"]
        await anyio.to_thread.run_sync(one.kill9)
        await fleet.register([quiet], ["b"])
        fleet.start("one")
        await fleet.answered(within=HANGS_AFTER_S)
        await fleet.say(register("last", host=loud, gpu=1))  # with no marker behind it
        _, end = await bus.offsets(topics(cluster).registrations, partition)

        def reached(records: dict[str, Any]) -> bool:
            """The last one may have been decided before its turn: the position itself is then written much later."""
            here = records[f"@checkpoint/partition/{partition}"]["input"]
            return max(here["to"], *here.get("ahead", {}).values(), 0) >= end

        await fleet.until(reached, within=HANGS_AFTER_S)
        report = await verdict(fleet.url, cluster)
        assert report.violations == ()
        assert report.counts["unread"] == 0


def _neighbours() -> tuple[str, str]:
    """Two hosts of one partition."""
    one = f"host-{secrets.token_hex(3)}"
    while True:
        other = f"host-{secrets.token_hex(3)}"
        if partition_of(one, PARTITIONS) == partition_of(other, PARTITIONS):
            return one, other
