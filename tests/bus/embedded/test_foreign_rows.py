"""What others have written into the file with a program of theirs damages itself only."""

from __future__ import annotations

import sqlite3
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest

from outfitter_proto.bus import (
    BusError,
    Entry,
    FencedError,
    TopicSpec,
    connect,
)
from outfitter_proto.support.processes import boot_id

ODD = ("'text'", "x'ff00'", "7", "1.5", "NULL", "'\u2028'", "CAST(x'ff' AS TEXT)", str(2**63 - 1), "-9e999")


def without_checks(path: Path) -> sqlite3.Connection:
    """A connection of somebody's who writes as the tables of older files let them."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    return connection


@pytest.mark.parametrize("column", ["key", "value", "time", "off"])
@pytest.mark.parametrize("odd", ODD)
async def test_a_row_of_a_wrong_type_damages_itself_only(tmp_path: Path, column: str, odd: str) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {"cleanup.policy": "compact,delete"}), TopicSpec("u", 1, {})])
        await bus.publish("t", 0, Entry(b"a", b"1"))
        values = {"key": "x'6b'", "value": "x'76'", "time": "5", "off": "1"} | {column: odd}
        with closing(without_checks(tmp_path / "bus.db")) as stranger:
            try:
                stranger.execute(
                    f"INSERT INTO record (topic, part, {', '.join(values)}) VALUES (1, 0, {', '.join(values.values())})"
                )
            except sqlite3.IntegrityError:
                assert odd == "NULL"  # NOT NULL was there from the first
            stranger.execute("UPDATE part SET next = 2 WHERE topic = 1")
        await bus.publish("t", 0, Entry(b"b", b"2"))
        for _ in range(2):
            async with await bus.open_reader("t", 0, start=0, committed=True) as reader:
                messages = []
                while reader.position < 3:
                    messages += await reader.fetch(timeout=0)
            assert {(type(m.offset), type(m.timestamp_ms)) for m in messages} == {(int, int)}
            assert all(isinstance(part, bytes | None) for m in messages for part in (m.key, m.value))
            assert [m.value for m in messages if m.key in (b"a", b"b")][-1] == b"2"
            await bus.maintain()


@pytest.mark.parametrize("odd", ["'text'", "x'ff00'", "7", "1.5"])
async def test_the_tables_refuse_what_is_no_bytes(tmp_path: Path, odd: str) -> None:
    async with connect(f"sqlite://{tmp_path}/bus.db") as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
        with closing(sqlite3.connect(tmp_path / "bus.db", isolation_level=None)) as stranger:
            for column in ("key", "value"):
                statement = f"INSERT INTO record (topic, part, off, time, {column}) VALUES (1, 0, 0, 0, {odd})"
                with nullcontext() if odd.startswith("x") else pytest.raises(sqlite3.IntegrityError, match="CHECK"):
                    stranger.execute(statement)
                stranger.execute("DELETE FROM record")


@pytest.mark.parametrize(
    "damage",
    [
        *(f"UPDATE part SET {column} = {odd}" for column in ("start", "next") for odd in ("'x'", "x'00'", "1.5", "-7")),
        "DELETE FROM part",
        *(f"UPDATE topic SET partitions = {odd}" for odd in ("'x'", "0", "x'00'")),
        *(f"UPDATE topic SET config = {odd}" for odd in ("'x'", "'[]'", "7", "CAST(x'ff' AS TEXT)")),
        """UPDATE topic SET config = '{"retention.ms": "soon"}'""",
        "UPDATE topic SET uuid = x'ff'",
    ],
)
async def test_a_topic_or_partition_of_a_wrong_type_is_said_and_nothing_worse(tmp_path: Path, damage: str) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("t", 1, {})])
    with closing(without_checks(tmp_path / "bus.db")) as stranger:
        stranger.execute(damage)
    async with connect(url) as bus:
        for use in (lambda: bus.publish("t", 0, Entry(b"k", b"v")), lambda: bus.offsets("t", 0)):
            with pytest.raises(BusError, match=r"damaged|UTF-8"):
                await use()
        with suppress(BusError):
            await bus.maintain()


FORMER_GROUPS = "CREATE TABLE member (topic, grp, name, process, boot, until, odd)"
"""Where version 0.2 had the members of groups."""


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("statement", ["UPDATE member SET {} = {}", "UPDATE writer SET epoch = {1}"])
async def test_a_group_or_writer_of_a_wrong_type_ends_nobody_s_process(
    tmp_path: Path, odd: str, statement: str
) -> None:
    url = f"sqlite://{tmp_path}/bus.db"
    async with connect(url) as bus:
        await bus.create_topics([TopicSpec("t", 2, {})])
        writer = await bus.open_writer("w", 0)
        with closing(without_checks(tmp_path / "bus.db")) as stranger:
            stranger.execute(FORMER_GROUPS)
            stranger.execute(f"INSERT INTO member VALUES (1, 'g', 'a', 'a', '{boot_id()}', -1.0, 0)")
            for column in ("name", "process", "boot", "until", "odd"):
                with suppress(sqlite3.Error):
                    stranger.execute(statement.format(column, odd))
        member = await bus.join("g", "t", replica=None, session_timeout=6.0, heartbeat_interval=0.05)
        with suppress(FencedError):
            await writer.commit([("t", [Entry(b"k", b"v")])])
        assert await bus.tenure("w") is not None
        assert await member.confirmed(0)
        await member.leave()
