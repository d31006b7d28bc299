"""Groups that share a topic's partitions out: what both adapters promise of the only member, and Kafka's of several.

Nobody is asked how long it took, but sessions are either short and must end, or so long that nothing waited for one.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from aiokafka.client import AIOKafkaClient

from outfitter_proto.bus import (
    Bus,
    BusConfigurationError,
    BusError,
    MemberReplacedError,
    Membership,
    TopicSpec,
    UnknownTopicError,
    connect,
)
from outfitter_proto.bus.kafka.connecting import log_throttle
from outfitter_proto.bus.ownership import Ownership
from support.kafka.broker import Broker, KafkaBroker
from support.processes.freezing import freeze
from support.processes.member import LIMIT_S, MemberProcess, member_process

pytestmark = pytest.mark.slow

MakeTopic = Callable[..., Awaitable[str]]
Join = Callable[..., Awaitable[Membership]]

several = pytest.mark.parametrize("bus_url", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
"""Several members of one group: a group on the embedded bus has one (embedded/test_one_member.py)."""

LONG = 60.0
"""A session that no test waits for."""
SHORT = 2.0


@pytest.fixture
async def join(bus: Bus) -> AsyncIterator[Join]:
    """Joins a group that no other test knows; every member leaves at the end."""
    group = f"group-{secrets.token_hex(5)}"

    async with AsyncExitStack() as leaving:

        async def join(
            topic: str, *, replica: str | None = None, session: float = LONG, group: str = group
        ) -> Membership:
            membership = await bus.join(group, topic, replica=replica, session_timeout=session, heartbeat_interval=0.2)
            leaving.push_async_callback(membership.leave)
            return membership

        yield join


async def settled(members: Sequence[Membership], *, partitions: int) -> list[frozenset[int]]:
    """Wait until the members share all partitions out, each with one owner, evenly; return the shares."""
    with anyio.fail_after(LIMIT_S):
        while True:
            shares = [member.partitions for member in members]
            counts = [len(share) for share in shares]
            if sum(counts) == partitions == len(frozenset[int]().union(*shares)) and max(counts) - min(counts) <= 1:
                return shares
            await anyio.sleep(0.02)


async def owns(member: Membership, wanted: frozenset[int]) -> None:
    """Wait until `changed` tells exactly `wanted`."""
    with anyio.fail_after(LIMIT_S):
        while await member.changed() != wanted:
            pass


@asynccontextmanager
async def listening(member: Membership) -> AsyncIterator[list[frozenset[int]]]:
    """Everything that `changed` tells meanwhile."""
    heard: list[frozenset[int]] = []

    async def listen() -> None:
        while True:
            heard.append(await member.changed())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        yield heard
        tasks.cancel_scope.cancel()


async def confirmed(member: Membership, partition: int) -> None:
    """Wait until it is so."""
    with anyio.fail_after(LIMIT_S):
        while not await member.confirmed(partition):  # noqa: ASYNC110  (an answer, no event of ours)
            await anyio.sleep(0.05)


async def silent(member: Membership) -> bool:
    """Whether `changed` has nothing to tell."""
    with anyio.move_on_after(0.05):
        await member.changed()
        return False
    return True


ALL = frozenset(range(6))


async def test_the_only_member_is_told_that_it_has_every_partition(make_topic: MakeTopic, join: Join) -> None:
    member = await join(await make_topic(partitions=6))
    await owns(member, ALL)
    assert member.partitions == ALL
    assert await silent(member)


@several
async def test_one_member_becomes_three_and_one_again_and_each_partition_has_one_owner(
    make_topic: MakeTopic, join: Join
) -> None:
    topic = await make_topic(partitions=6)
    first = await join(topic)
    await owns(first, ALL)
    second, third = await join(topic), await join(topic)
    shares = await settled([first, second, third], partitions=6)
    assert await first.changed() == shares[0]
    await third.leave()
    await settled([first, second], partitions=6)
    await second.leave()
    await owns(first, ALL)


@several
async def test_partitions_that_need_not_move_stay(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    first, second = await join(topic), await join(topic)
    before = await settled([first, second], partitions=6)
    third = await join(topic)
    with_third = await settled([first, second, third], partitions=6)
    assert with_third[0] < before[0]
    assert with_third[1] < before[1]
    await third.leave()
    after = await settled([first, second], partitions=6)
    assert with_third[0] < after[0]
    assert with_third[1] < after[1]


@several
async def test_more_members_than_partitions_leave_some_without_and_they_are_told_nothing(
    make_topic: MakeTopic, join: Join
) -> None:
    topic = await make_topic(partitions=1)
    first = await join(topic)
    await owns(first, frozenset({0}))
    second = await join(topic)
    shares = await settled([first, second], partitions=1)
    idle, working = (first, second) if not shares[0] else (second, first)
    await working.leave()
    await owns(idle, frozenset({0}))


@several
async def test_leaving_moves_partitions_at_once_also_those_of_a_replica(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    first, second = await join(topic, replica="a"), await join(topic, replica="b")
    await settled([first, second], partitions=6)
    await second.leave()
    await owns(first, ALL)
    assert second.partitions == frozenset()
    assert not await second.confirmed(0)
    await second.leave()
    await second.aclose()


async def test_a_member_that_leaves_or_closes_makes_room_for_the_next(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    for leaves in (True, False):
        member = await join(topic)
        await owns(member, ALL)
        await confirmed(member, 0)
        for _ in range(2):
            await (member.leave() if leaves else member.aclose())
        assert member.partitions == frozenset()
        assert not await member.confirmed(0)


@several
async def test_a_member_without_a_name_leaves_when_it_closes(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    first, second = await join(topic), await join(topic)
    await settled([first, second], partitions=6)
    await second.aclose()
    await second.aclose()
    await owns(first, ALL)


async def test_groups_know_nothing_of_each_other(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    first, other = await join(topic), await join(topic, group=f"other-{secrets.token_hex(5)}")
    await owns(first, ALL)
    await owns(other, ALL)
    assert first.partitions == ALL


@several
async def test_only_the_owner_is_confirmed(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    members = [await join(topic), await join(topic)]
    shares = await settled(members, partitions=6)
    for member, share in zip(members, shares, strict=True):
        for partition in share:
            await confirmed(member, partition)  # the group may be settling still
        assert not any([await member.confirmed(partition) for partition in ALL - share])


@several
async def test_a_killed_members_partitions_go_to_the_others_within_its_session(
    bus_url: str, make_topic: MakeTopic, join: Join
) -> None:
    topic, group = await make_topic(partitions=6), f"group-{secrets.token_hex(5)}"
    first = await join(topic, group=group)
    async with member_process(bus_url, group, topic, session=SHORT) as victim:
        await settled_with(first, victim)
        victim.signal(signal.SIGKILL)
        await owns(first, ALL)


@several
async def test_a_frozen_member_is_replaced_finds_out_when_it_wakes_and_takes_nothing_back(
    bus_url: str, make_topic: MakeTopic, join: Join
) -> None:
    """It is given what one of its heirs has too much, and no more."""
    topic, group = await make_topic(partitions=4), f"group-{secrets.token_hex(5)}"
    async with member_process(bus_url, group, topic, session=SHORT) as victim:
        assert await victim.has(frozenset(range(4)))
        freeze(victim.process.pid)
        heirs = [await join(topic, group=group) for _ in range(3)]
        shares = await settled(heirs, partitions=4)
        kept, two = min(min(shares, key=len)), max(shares, key=len)
        await victim.tell("confirm", kept)
        victim.signal(signal.SIGCONT)
        answer, given = "", frozenset[int]()
        while not (answer and given):  # in whatever order
            line = await victim.heard("")
            if line.startswith("confirmed"):
                answer = line.split()[2]
            elif line.startswith("has"):
                given = frozenset(int(word) for word in line.split()[1:])
        assert answer == "False"
        assert len(given) == 1
        assert given < two
        with anyio.fail_after(LIMIT_S):
            while [heir.partitions for heir in heirs] != [share - given for share in shares]:  # noqa: ASYNC110
                await anyio.sleep(0.02)


async def settled_with(first: Membership, other: MemberProcess) -> frozenset[int]:
    """Wait until `first` and the process have three partitions each; return the process's. It is told before it is
    asked: a process that has lost all says so first."""
    with anyio.fail_after(LIMIT_S):
        while True:
            told = await other.has()
            while len(told) == 3 and len(first.partitions) != 3:  # noqa: ASYNC110  (of the process's news, not ours)
                await anyio.sleep(0.02)
            if told and told == ALL - first.partitions:
                return told


@several
async def test_a_frozen_member_is_told_of_its_expulsion_before_anything_else(
    bus_url: str, make_topic: MakeTopic, join: Join
) -> None:
    topic, group = await make_topic(partitions=2), f"group-{secrets.token_hex(5)}"
    async with member_process(bus_url, group, topic, session=SHORT) as victim:
        assert await victim.has(frozenset({0, 1}))
        freeze(victim.process.pid)
        heir = await join(topic, group=group)
        await owns(heir, frozenset({0, 1}))
        await heir.leave()
        victim.signal(signal.SIGCONT)
        assert await victim.has() == frozenset()
        assert await victim.has() == frozenset({0, 1})


@several
@pytest.mark.parametrize("how", ["killed", "ended"])
async def test_a_replica_that_is_restarted_has_its_partitions_again_and_nobody_sees_a_change(
    bus_url: str, make_topic: MakeTopic, join: Join, how: str
) -> None:
    topic, group = await make_topic(partitions=6), f"group-{secrets.token_hex(5)}"
    first = await join(topic, replica="a", group=group)
    async with (
        member_process(bus_url, group, topic, replica="b", session=LONG) as victim,
        member_process(bus_url, group, topic, replica="b", session=LONG, wait=True) as restarted,
    ):
        had = await settled_with(first, victim)
        await owns(first, ALL - had)
        async with listening(first) as heard:
            if how == "killed":
                victim.signal(signal.SIGKILL)
            else:
                await victim.tell("end")
            await victim.process.wait()
            await restarted.tell("join")
            assert await restarted.has() == had
            await confirmed(first, min(first.partitions))
        assert heard == []
        await restarted.tell("leave")
        await restarted.heard("left")
        await owns(first, ALL)


@several
async def test_of_two_processes_with_one_replica_name_the_later_is_the_member_and_the_earlier_is_told(
    make_topic: MakeTopic, join: Join
) -> None:
    topic = await make_topic(partitions=6)
    earlier = await join(topic, replica="a")
    await owns(earlier, ALL)
    later = await join(topic, replica="a")
    await owns(later, ALL)
    with pytest.raises(MemberReplacedError, match="replica 'a'"):
        await owns(earlier, frozenset({99}))
    assert earlier.partitions == frozenset()
    assert not await earlier.confirmed(0)
    assert await silent(later)
    await earlier.leave()
    assert await later.confirmed(0)


@several
async def test_a_member_that_nobody_asks_holds_nobody_up(make_topic: MakeTopic, join: Join) -> None:
    topic = await make_topic(partitions=6)
    members = [await join(topic) for _ in range(3)]
    await settled(members, partitions=6)


async def test_a_group_over_a_topic_that_does_not_exist_is_refused(bus: Bus) -> None:
    with pytest.raises(UnknownTopicError, match="no-such-topic"):
        await bus.join("g", "no-such-topic", replica=None, session_timeout=LONG, heartbeat_interval=1)


# --- the bus away --------------------------------------------------------------------------------------


async def test_without_its_file_a_member_keeps_what_it_has_and_confirms_nothing(
    embedded_url: str, tmp_path: Path
) -> None:
    async with connect(embedded_url) as bus:
        await bus.create_topics([TopicSpec("t", 3, {})])
        async with await bus.join("g", "t", replica=None, session_timeout=LONG, heartbeat_interval=0.05) as member:
            await owns(member, frozenset(range(3)))
            (tmp_path / "bus.db").rename(tmp_path / "elsewhere.db")
            assert not await member.confirmed(0)
            assert member.partitions == frozenset(range(3))
            assert await silent(member)
            (tmp_path / "elsewhere.db").rename(tmp_path / "bus.db")
            assert await member.confirmed(0)
            assert await silent(member)


@pytest.mark.kafka
async def test_without_its_broker_a_member_keeps_what_it_has_and_confirms_nothing(own_broker: Broker) -> None:
    async with connect(own_broker.url) as bus:
        await bus.create_topics([TopicSpec("t", 3, {})])
        members = [
            await bus.join("g", "t", replica=replica, session_timeout=LONG, heartbeat_interval=0.2)
            for replica in ("a", None)
        ]
        shares = await settled(members, partitions=3)
        for member, share in zip(members, shares, strict=True):
            await owns(member, share)
        own_broker.kill9()
        assert not any([await member.confirmed(0) for member in members])
        await own_broker.restarted()
        assert [member.partitions for member in members] == shares
        for member, share in zip(members, shares, strict=True):
            await confirmed(member, min(share))
        assert [member.partitions for member in members] == shares
        assert [await silent(member) for member in members] == [True, True]
        own_broker.kill9()
        with anyio.fail_after(LIMIT_S):
            for member in members:
                await member.leave()
                await member.aclose()


@pytest.mark.kafka
async def test_a_session_that_the_broker_does_not_allow_is_said_to_be_so(kafka_broker: KafkaBroker) -> None:
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        member = await bus.join(topic, topic, replica=None, session_timeout=0.01, heartbeat_interval=0.001)
        async with member:
            with anyio.fail_after(LIMIT_S), pytest.raises(BusConfigurationError, match=r"group\.min\.session"):
                await member.changed()


@pytest.mark.kafka
async def test_a_join_that_is_cancelled_closes_its_connections(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    joining: list[AIOKafkaClient] = []
    connected = anyio.Event()

    connects = AIOKafkaClient.set_topics

    async def hang(client: AIOKafkaClient, topics: object) -> None:
        await connects(client, topics)
        joining.append(client)
        connected.set()
        await anyio.sleep_forever()

    def connections() -> list[bool]:
        return [connection.connected() for client in joining for connection in client._conns.values()]

    monkeypatch.setattr(AIOKafkaClient, "set_topics", hang)
    topic = KafkaBroker.new_cluster()
    async with connect(kafka_broker.url) as bus:
        await bus.create_topics([TopicSpec(topic, 1, {})])
        quiet = log_throttle._holders
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                partial(bus.join, topic, topic, replica=None, session_timeout=LONG, heartbeat_interval=0.2)
            )
            with anyio.fail_after(LIMIT_S):
                await connected.wait()
            assert any(connections())
            tasks.cancel_scope.cancel()
        assert not any(connections())
        assert log_throttle._holders == quiet


# --- the parts -----------------------------------------------------------------------------------------


async def test_an_expulsion_is_told_even_when_the_same_partitions_came_back_before_anybody_asked() -> None:
    ownership = Ownership()
    ownership.assign(frozenset({1}))
    assert await ownership.changed() == frozenset({1})
    ownership.expel()
    ownership.assign(frozenset({1}))
    assert await ownership.changed() == frozenset()
    assert await ownership.changed() == frozenset({1})


async def test_a_failed_membership_raises_its_first_reason_each_time() -> None:
    ownership = Ownership()
    ownership.assign(frozenset({1}))
    ownership.fail(MemberReplacedError("first"))
    ownership.fail(BusError("second"))
    for _ in range(2):
        with pytest.raises(MemberReplacedError, match="first"):
            await ownership.changed()
    assert ownership.partitions == frozenset()
