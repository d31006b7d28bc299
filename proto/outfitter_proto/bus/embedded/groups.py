"""Groups on an embedded bus: the members, their deadlines and their partitions. Functions over a connection, as in
`log`; each is part of one transaction.

A member lives while it sends heartbeats. Each heartbeat removes members that were silent for too long. Time is the
machine's monotonic clock, which all processes share and which stops during suspension, so a wake-up expels no member.
Rows of an earlier boot are dead.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from outfitter_proto.bus.embedded.log import StoredTopic
from outfitter_proto.support.processes import boot_id

_TABLES: Final = """
CREATE TABLE IF NOT EXISTS member (
    topic INTEGER NOT NULL, grp TEXT NOT NULL, name TEXT NOT NULL,
    process TEXT NOT NULL,             -- the process that is the member of this name now
    boot TEXT NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (topic, grp, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS owner (
    topic INTEGER NOT NULL, grp TEXT NOT NULL, part INTEGER NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (topic, grp, part)
) WITHOUT ROWID
"""


class Member(NamedTuple):
    """One member. `name` is the replica's name or random, `process` is always random. `session_timeout` is in seconds:
    a member that is silent for longer is removed."""

    topic: StoredTopic
    group: str
    name: str
    process: str
    session_timeout: float


class GroupView(NamedTuple):
    """A member's state. `holder`: the process that is the member of this name now; None: no process is.

    `partitions`: those assigned to the member, empty unless it is the holder.
    """

    holder: str | None
    partitions: frozenset[int]
    moved: bool = False
    """Whether this transaction has moved partitions to another member."""


def new_member(topic: StoredTopic, group: str, *, replica: str | None, session_timeout: float) -> Member:
    name = f"replica {replica}" if replica is not None else f"member {os.urandom(8).hex()}"
    return Member(topic, group, name, os.urandom(8).hex(), session_timeout)


def join(connection: sqlite3.Connection, member: Member) -> GroupView:
    """Become the member of this name and replace any other process."""
    for table in _TABLES.split(";"):
        connection.execute(table)
    connection.execute(
        "INSERT INTO member (topic, grp, name, process, boot, until) VALUES (?, ?, ?, ?, ?, 0)"
        " ON CONFLICT (topic, grp, name) DO UPDATE SET process = excluded.process",
        (member.topic.id, member.group, member.name, member.process, _boot()),
    )
    return beat(connection, member)


def beat(connection: sqlite3.Connection, member: Member) -> GroupView:
    """Send a heartbeat, remove silent members and assign free partitions. Only a member may do so."""
    view = view_of(connection, member)
    if view.holder != member.process:
        return view
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
    return view_of(connection, member)._replace(moved=moved)


def leave(connection: sqlite3.Connection, member: Member) -> GroupView:
    """End this process's membership, if it still has one."""
    connection.execute(
        "DELETE FROM member WHERE topic = ? AND grp = ? AND name = ? AND process = ?",
        (member.topic.id, member.group, member.name, member.process),
    )
    return GroupView(None, frozenset(), moved=_share_out(connection, member))


def view_of(connection: sqlite3.Connection, member: Member) -> GroupView:
    """The group's current state for this member. Changes nothing."""
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


def _name(raw: bytes) -> str:
    """Decode a name; SQLite lets other programs write any bytes there."""
    return raw.decode("utf-8", "replace")


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
    """Assign the partitions evenly (counts differ by at most one) and move as few as possible from `owners`."""
    if not members:
        return {}
    held: dict[str, list[int]] = {name: [] for name in members}
    for partition in range(partitions):
        if owners.get(partition) in held:
            held[owners[partition]].append(partition)
    least, more = divmod(partitions, len(members))
    shares: dict[int, str] = {}
    takers: list[str] = []  # one entry for each partition that a member still gets
    # The members with most partitions may have one more, so that the remainder moves nothing.
    for rank, name in enumerate(sorted(held, key=lambda name: (-len(held[name]), name))):
        share = least + (rank < more)
        shares |= dict.fromkeys(held[name][:share], name)
        takers += [name] * (share - len(held[name]))
    free = [partition for partition in range(partitions) if partition not in shares]
    return shares | dict(zip(free, takers, strict=True))
