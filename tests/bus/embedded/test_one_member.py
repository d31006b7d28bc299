"""A group on the embedded bus has one member, which has all partitions. Another is refused while the first lives."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from outfitter_proto.bus import Bus, BusConfigurationError, Membership, TopicSpec, connect
from outfitter_proto.support.processes import boot_id
from support.processes.freezing import freeze
from support.processes.member import LIMIT_S, member_process

ALL = frozenset(range(3))


async def join(bus: Bus, group: str = "g", *, replica: str | None = None) -> Membership:
    return await bus.join(group, "t", replica=replica, session_timeout=60.0, heartbeat_interval=0.2)


async def make(bus: Bus) -> None:
    await bus.create_topics([TopicSpec("t", 3, {})])


@pytest.mark.parametrize("replica", [None, "a"])
async def test_a_second_member_is_refused_and_gets_everything_once_the_first_has_left(
    embedded_url: str, replica: str | None
) -> None:
    async with connect(embedded_url) as bus, connect(embedded_url) as other:
        await make(bus)
        async with await join(bus, replica=replica) as first:
            for each in (bus, other):
                with pytest.raises(BusConfigurationError, match=r"more replicas need Kafka.*fuser .*bus\.member-"):
                    await join(each, replica=replica)
            assert await first.changed() == ALL
            assert await first.confirmed(2)
        assert not await first.confirmed(2)
        async with await join(other, replica=replica) as second:
            assert await second.changed() == ALL


async def test_whoever_starts_after_a_member_was_killed_is_never_refused(embedded_url: str) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        for _ in range(3):
            async with member_process(embedded_url, "g", "t", session=60) as victim:
                assert await victim.has() == ALL
                victim.signal(signal.SIGKILL)
                await victim.process.wait()
                async with await join(bus) as heir:
                    assert await heir.confirmed(0)


async def test_a_frozen_member_keeps_its_place_until_it_is_killed(embedded_url: str) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        async with member_process(embedded_url, "g", "t", session=0.1) as frozen:
            assert await frozen.has() == ALL
            freeze(frozen.process.pid)
            with pytest.raises(BusConfigurationError, match="more replicas need Kafka"):
                await join(bus)
            frozen.signal(signal.SIGCONT)
            await frozen.tell("confirm", 1)
            assert await frozen.heard("confirmed") == "confirmed 1 True"
            freeze(frozen.process.pid)
            frozen.signal(signal.SIGKILL)
            await frozen.process.wait()
            async with await join(bus) as heir:
                assert await heir.confirmed(0)


async def test_a_join_that_is_cancelled_keeps_no_place(embedded_url: str) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await join(bus)
        assert scope.cancelled_caught
        async with await join(bus) as member:
            assert await member.confirmed(0)


async def test_a_copy_of_the_file_is_a_bus_of_its_own(embedded_url: str, tmp_path: Path) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "bus.db", tmp_path / "copy" / "bus.db")
    async with (
        connect(embedded_url) as bus,
        connect(f"sqlite://{tmp_path}/copy/bus.db") as copy,
        await join(bus) as one,
        await join(copy) as other,
    ):
        assert await one.confirmed(0)
        assert await other.confirmed(0)


async def test_a_member_whose_lock_was_removed_confirms_nothing_for_another_one_may_have_joined(
    embedded_url: str, tmp_path: Path
) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        async with await join(bus) as first:
            [lock] = tmp_path.glob("bus.member-*")
            lock.unlink()
            async with await join(bus) as second:
                assert await second.confirmed(0)
                assert not await first.confirmed(0)


# --- members of version 0.2, which stand in a table ---

MEMBER = """CREATE TABLE IF NOT EXISTS member (
    topic INTEGER NOT NULL, grp TEXT NOT NULL, name TEXT NOT NULL, process TEXT NOT NULL, boot TEXT NOT NULL,
    until REAL NOT NULL, PRIMARY KEY (topic, grp, name)
) WITHOUT ROWID"""


def former(path: Path, *, boot: str | None = None, until: float = 1e9, group: str = "g") -> None:
    """Write the row of a member of version 0.2."""
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(MEMBER)
        row = (1, group, "member 1", "1", boot if boot is not None else boot_id() or "", time.monotonic() + until)
        database.execute("INSERT OR REPLACE INTO member VALUES (?, ?, ?, ?, ?, ?)", row)


@pytest.mark.parametrize(
    "dead",
    [
        lambda path: former(path, until=-1.0),
        lambda path: former(path, boot="another"),
        lambda path: former(path, group="another"),
    ],
    ids=["silent", "of an earlier boot", "of another group"],
)
async def test_a_dead_member_of_the_last_release_is_in_nobodys_way(
    embedded_url: str, tmp_path: Path, dead: Callable[[Path], None]
) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        dead(tmp_path / "bus.db")
        async with await join(bus) as member:
            assert await member.confirmed(0)


async def test_a_living_member_of_the_last_release_has_the_partitions_whoever_came_first(
    embedded_url: str, tmp_path: Path
) -> None:
    async with connect(embedded_url) as bus:
        await make(bus)
        async with await join(bus) as member:
            former(tmp_path / "bus.db")
            assert not await member.confirmed(0)
            former(tmp_path / "bus.db", until=-1.0)
            assert await member.confirmed(0)
        former(tmp_path / "bus.db")
        with pytest.raises(BusConfigurationError, match="an earlier version"):
            await join(bus)
        former(tmp_path / "bus.db", until=-1.0)
        with anyio.fail_after(LIMIT_S):
            await (await join(bus)).aclose()
