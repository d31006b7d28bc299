"""Groups on an embedded bus: who is a member of which, until when, and which partitions are whose. As functions over a
connection, like `log`; each is part of one transaction.

A member is alive while it is heard of; whoever is heard of next removes those that were silent for too long. Time is
the machine's monotonic clock, which all its processes share and which a suspended machine does not pass: when it wakes,
nobody has been silent. Rows of an earlier boot are dead.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from outfitter_proto.bus.embedded.log import Topic
from outfitter_proto.support.processes import boot_id

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS member (
    topic INTEGER NOT NULL, grp TEXT NOT NULL, name TEXT NOT NULL,
    process TEXT NOT NULL,             -- which of those that have used this name is the member now
    boot TEXT NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (topic, grp, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owner (
    topic INTEGER NOT NULL, grp TEXT NOT NULL, part INTEGER NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (topic, grp, part)
) WITHOUT ROWID
"""


class Member(NamedTuple):
    """One member: `name` is the replica's or a random one, `process` always random."""

    topic: Topic
    group: str
    name: str
    process: str
    session_timeout: float


class GroupView(NamedTuple):
    """How a member stands. `holder` is the process that is the member of this name, None if there is none."""

    holder: str | None
    partitions: frozenset[int]
    moved: bool = False
    """Whether this transaction has given partitions to somebody else than before."""


def new_member(topic: Topic, group: str, *, replica: str | None, session_timeout: float) -> Member:
    name = f"replica {replica}" if replica is not None else f"member {os.urandom(8).hex()}"
    return Member(topic, group, name, os.urandom(8).hex(), session_timeout)


def join(connection: sqlite3.Connection, member: Member) -> GroupView:
    """Become the member of this name, in place of any other process that is."""
    for table in _TABLES.split(";"):
        connection.execute(table)
    connection.execute(
        "INSERT INTO member (topic, grp, name, process, boot, until) VALUES (?, ?, ?, ?, ?, 0)"
        " ON CONFLICT (topic, grp, name) DO UPDATE SET process = excluded.process",
        (member.topic.id, member.group, member.name, member.process, _boot()),
    )
    return beat(connection, member)


def beat(connection: sqlite3.Connection, member: Member) -> GroupView:
    """A sign of life; then remove who gave none, and share out anew what is nobody's. Nothing if it is no member."""
    found = look(connection, member)
    if found.holder != member.process:
        return found
    now = time.monotonic()
    connection.execute(
        "UPDATE member SET until = ?, boot = ? WHERE topic = ? AND grp = ? AND name = ?",
        (now + member.session_timeout, _boot(), member.topic.id, member.group, member.name),
    )
    connection.execute(
        "DELETE FROM member WHERE topic = ? AND grp = ? AND (until < ? OR boot != ?)",
        (member.topic.id, member.group, now, _boot()),
    )
    moved = _share_out(connection, member)
    return look(connection, member)._replace(moved=moved)


def leave(connection: sqlite3.Connection, member: Member) -> GroupView:
    """End this process's membership, if it is one still."""
    connection.execute(
        "DELETE FROM member WHERE topic = ? AND grp = ? AND name = ? AND process = ?",
        (member.topic.id, member.group, member.name, member.process),
    )
    return GroupView(None, frozenset(), moved=_share_out(connection, member))


def look(connection: sqlite3.Connection, member: Member) -> GroupView:
    rows = connection.execute(
        "SELECT process FROM member WHERE topic = ? AND grp = ? AND name = ?",
        (member.topic.id, member.group, member.name),
    ).fetchall()
    if [(member.process,)] != rows:
        return GroupView(rows[0][0] if rows else None, frozenset())
    owned = connection.execute(
        "SELECT part FROM owner WHERE topic = ? AND grp = ? AND name = ?", (member.topic.id, member.group, member.name)
    ).fetchall()
    return GroupView(member.process, frozenset(part for (part,) in owned))


def _boot() -> str:
    return boot_id() or ""


def _name(found: bytes) -> str:
    """A name, whatever SQLite lets others write there."""
    return found.decode("utf-8", "replace")


def _share_out(connection: sqlite3.Connection, member: Member) -> bool:
    group = member.topic.id, member.group
    names = connection.execute("SELECT CAST(name AS BLOB) FROM member WHERE topic = ? AND grp = ?", group).fetchall()
    owners = {
        part: _name(name)
        for part, name in connection.execute(
            "SELECT part, CAST(name AS BLOB) FROM owner WHERE topic = ? AND grp = ?", group
        ).fetchall()
    }
    shares = share_out(member.topic.partitions, [_name(name) for (name,) in names], owners)
    if shares == owners:
        return False
    connection.execute("DELETE FROM owner WHERE topic = ? AND grp = ?", group)
    connection.executemany(
        "INSERT INTO owner (topic, grp, part, name) VALUES (?, ?, ?, ?)",
        [(*group, part, name) for part, name in shares.items()],
    )
    return True


def share_out(partitions: int, members: Sequence[str], owners: Mapping[int, str]) -> dict[int, str]:
    """Who owns which partition: evenly (counts differ by at most one), and moving as few as possible from `owners`."""
    if not members:
        return {}
    held: dict[str, list[int]] = {name: [] for name in members}
    for partition in range(partitions):
        if owners.get(partition) in held:
            held[owners[partition]].append(partition)
    least, more = divmod(partitions, len(members))
    shares: dict[int, str] = {}
    wanting: list[str] = []
    # Those that have most may have one more: so nothing moves for the remainder's sake.
    for rank, name in enumerate(sorted(held, key=lambda name: (-len(held[name]), name))):
        share = least + (rank < more)
        shares |= dict.fromkeys(held[name][:share], name)
        wanting += [name] * (share - len(held[name]))
    free = [partition for partition in range(partitions) if partition not in shares]
    return shares | dict(zip(free, wanting, strict=True))
