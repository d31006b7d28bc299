"""The tables of an embedded bus and all statements on them except housekeeping's, as functions over a connection.

A partition's next offset has a row of its own, so it survives compaction and retention. The transaction that writes
records assigns their offsets. So offsets have no gaps at first, and every record below `next` is committed. Only
`database` begins and ends transactions. Every cursor is read to its end.

A program that may write the file can put any type into any column, even by mistake, such as a string for a key. The
tables of older files do not refuse it. So each statement that reads casts to its type. A wrong value in a record
damages only that record. A wrong row of a topic or partition is an error.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from outfitter_proto.bus.port import (
    BusConfigurationError,
    BusError,
    Entry,
    FencedError,
    Message,
    OffsetOutOfRangeError,
    TooLargeError,
    TopicSpec,
    UnknownTopicError,
)

APPLICATION_ID: Final = 0x6F757466
"""'outf': a bus's `PRAGMA application_id`, which distinguishes it from other SQLite databases."""

FORMAT: Final = 1
"""The tables' version, in `PRAGMA user_version`."""

DEFAULT_MAX_MESSAGE_BYTES: Final = 1_048_588
"""Kafka's default of `max.message.bytes`."""

MAX_FETCH_BYTES: Final = 16 * 1024 * 1024
"""Approximate limit of a fetch in bytes, for any number of records, to limit a manager's memory."""

_CHUNK: Final = 500
_DAMAGED: Final = "the embedded bus is damaged; stop every process on it, put it aside, start anew or from a copy"
_NUMBERS: Final = ("max.message.bytes", "retention.ms", "delete.retention.ms", "min.cleanable.dirty.ratio")
_TABLES: Final = """
CREATE TABLE topic (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, uuid TEXT NOT NULL,
    partitions INTEGER NOT NULL, config BLOB NOT NULL
);
CREATE TABLE part (
    topic INTEGER NOT NULL, part INTEGER NOT NULL,
    start INTEGER NOT NULL DEFAULT 0,  -- the first offset there is
    next INTEGER NOT NULL DEFAULT 0,   -- the one after the last
    clean INTEGER NOT NULL DEFAULT 0,  -- housekeeping's: compacted up to here,
    live INTEGER NOT NULL DEFAULT 0,   -- and this many records were left
    PRIMARY KEY (topic, part),
    CHECK (typeof(start) = 'integer' AND typeof(next) = 'integer')
) WITHOUT ROWID;
CREATE TABLE record (
    topic INTEGER NOT NULL, part INTEGER NOT NULL, off INTEGER NOT NULL,
    time INTEGER NOT NULL,             -- milliseconds since the epoch
    key BLOB, value BLOB,
    PRIMARY KEY (topic, part, off),
    -- SQLite takes any type in any column. Its STRICT tables would need 3.37
    CHECK (typeof(off) = 'integer' AND typeof(time) = 'integer'
        AND typeof(key) IN ('blob', 'null') AND typeof(value) IN ('blob', 'null'))
) WITHOUT ROWID;
CREATE TABLE tombstone (
    topic INTEGER NOT NULL, part INTEGER NOT NULL, off INTEGER NOT NULL,
    until INTEGER NOT NULL,            -- housekeeping's: when this tombstone may go
    PRIMARY KEY (topic, part, off)
) WITHOUT ROWID;
CREATE TABLE writer (identity TEXT NOT NULL PRIMARY KEY, epoch INTEGER NOT NULL) WITHOUT ROWID
"""


class StoredTopic(NamedTuple):
    """A topic's row. Only its number of partitions ever changes, and no topic is ever deleted from a file."""

    id: int
    """Its number in this file."""
    name: str
    uuid: str
    """Tells it from a topic of the same name in another file."""
    partitions: int
    config: dict[str, str]
    """Its settings by Kafka's names."""

    @property
    def compacted(self) -> bool:
        return "compact" in self.policies

    @property
    def policies(self) -> frozenset[str]:
        """The cleanup policies: `delete` (Kafka's default), `compact` or both."""
        return frozenset(p.strip() for p in self.config.get("cleanup.policy", "delete").split(","))

    def number(self, setting: str, default: float) -> float:
        return float(self.config.get(setting, default))

    def check_partition(self, partition: int) -> None:
        if not 0 <= partition < self.partitions:
            raise UnknownTopicError(
                f"topic {self.name!r} has the partitions 0 to {self.partitions - 1}, not {partition}"
            )


class Slice(NamedTuple):
    """The result of a fetch. `position`: the offset after the messages and the holes behind them."""

    messages: list[Message]
    position: int


def recognise(connection: sqlite3.Connection) -> bool:
    """Whether the file is a bus. False: it is empty and may become one. Changes nothing.

    Raises:
        BusConfigurationError: it is another program's, or of a later version.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    if (owner, version) == (APPLICATION_ID, FORMAT):
        return True
    if owner == APPLICATION_ID:
        raise BusConfigurationError(
            f"the embedded bus has format {version} and this program knows {FORMAT}: run the program that made it"
        )
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables or owner or version:
        raise BusConfigurationError("this is another program's SQLite database, no bus: name the bus's own file")
    return False


def set_up(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty file; refuse a file that is no bus."""
    if recognise(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    for table in _TABLES.split(";"):
        connection.execute(table)
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={FORMAT}")
    connection.execute("COMMIT")


# --- topics --------------------------------------------------------------------------------------------


def check_spec(spec: TopicSpec) -> None:
    """Refuse a topic with invalid settings. Settings without effect on an embedded bus are kept unchanged.

    Raises:
        BusConfigurationError: the message has the topic, the setting and the valid values.
    """
    if spec.partitions < 1:
        raise BusConfigurationError(f"topic {spec.name!r} needs at least 1 partition, not {spec.partitions}")
    topic = StoredTopic(0, spec.name, "", spec.partitions, dict(spec.config))
    if not topic.policies or topic.policies - {"delete", "compact"}:
        raise BusConfigurationError(
            f"topic {spec.name!r}: cleanup.policy is delete, compact or both with a comma, not "
            f"{spec.config['cleanup.policy']!r}"
        )
    for setting in _NUMBERS:
        try:
            topic.number(setting, 0)
        except ValueError as error:
            raise BusConfigurationError(
                f"topic {spec.name!r}: {setting} is a number, not {spec.config[setting]!r}"
            ) from error


def find_topic(connection: sqlite3.Connection, name: str) -> StoredTopic | None:
    row = connection.execute("SELECT id, name, uuid, partitions, config FROM topic WHERE name = ?", (name,)).fetchone()
    return None if row is None else _topic(*row)


def _topic(*row: object) -> StoredTopic:
    """Raises BusConfigurationError for a row that `create_topic` did not write."""
    match row:
        case (int(number), str(name), str(uuid), int(partitions), (bytes() | str()) as config) if partitions > 0:
            with suppress(ValueError):
                topic = StoredTopic(number, name, uuid, partitions, msgspec.json.decode(config, type=dict[str, str]))
                for setting in _NUMBERS:
                    topic.number(setting, 0)
                return topic
    raise BusConfigurationError(f"its table topic holds {row!s:.200}, which is no topic: {_DAMAGED}")


def all_topics(connection: sqlite3.Connection) -> list[StoredTopic]:
    """All valid topics."""
    topics: list[StoredTopic] = []
    for row in connection.execute("SELECT id, name, uuid, partitions, config FROM topic ORDER BY id").fetchall():
        with suppress(BusConfigurationError):
            topics.append(_topic(*row))
    return topics


def create_topic(connection: sqlite3.Connection, spec: TopicSpec) -> bool:
    """Create a topic with a random id, which reveals a replaced file. False: the topic exists and stays unchanged."""
    if find_topic(connection, spec.name) is not None:
        return False
    inserted = connection.execute(
        "INSERT INTO topic (name, uuid, partitions, config) VALUES (?, ?, ?, ?)",
        (spec.name, os.urandom(16).hex(), spec.partitions, msgspec.json.encode(dict(spec.config))),
    )
    connection.executemany(
        "INSERT INTO part (topic, part) VALUES (?, ?)", [(inserted.lastrowid, n) for n in range(spec.partitions)]
    )
    return True


# --- records -------------------------------------------------------------------------------------------


def bounds(connection: sqlite3.Connection, topic: StoredTopic, partition: int) -> tuple[int, int]:
    """The first offset and the one after the last."""
    row = connection.execute(
        "SELECT start, next FROM part WHERE topic = ? AND part = ?", (topic.id, partition)
    ).fetchone()
    match row:
        case (int(start), int(following)) if 0 <= start <= following:
            return start, following
    raise BusConfigurationError(
        f"its table part holds {row!s:.200} for topic {topic.name!r}, partition {partition}, and no two offsets: "
        f"{_DAMAGED}"
    )


def first_since(connection: sqlite3.Connection, topic: StoredTopic, partition: int, ms: int) -> int:
    """The offset of the first record with a time of `ms` or later; the end, if there is none."""
    _, end = bounds(connection, topic, partition)
    (first,) = connection.execute(
        "SELECT min(off) FROM record WHERE topic = ? AND part = ? AND CAST(time AS INTEGER) >= ?"
        " AND typeof(off) = 'integer'",
        (topic.id, partition, ms),
    ).fetchone()
    return end if first is None else min(int(first), end)


def check_entries(topic: StoredTopic, entries: Sequence[Entry]) -> None:
    """Refuse a record over `max.message.bytes`, or without a key on a compacted topic, as Kafka's brokers do.

    Raises:
        TooLargeError, BusError: the message names the record.
    """
    limit = topic.number("max.message.bytes", DEFAULT_MAX_MESSAGE_BYTES)
    for number, entry in enumerate(entries):
        key = entry.key
        size = len(key or b"") + len(entry.value or b"")
        if size > limit:
            raise TooLargeError(
                f"record {number} (key {key!r:.80}) has {size} bytes, and topic {topic.name!r} takes "
                f"{limit:.0f} (max.message.bytes)"
            )
        if key is None and topic.compacted:
            raise BusError(f"record {number} has no key, and topic {topic.name!r} is compacted: give it one")


def append(connection: sqlite3.Connection, topic: StoredTopic, partition: int, entries: Sequence[Entry]) -> int:
    """Write `entries`; return the first one's offset."""
    _, first = bounds(connection, topic, partition)
    now_ms = time.time_ns() // 1_000_000
    connection.execute(
        "UPDATE part SET next = next + ? WHERE topic = ? AND part = ?", (len(entries), topic.id, partition)
    )
    connection.executemany(
        "INSERT INTO record (topic, part, off, time, key, value) VALUES (?, ?, ?, ?, ?, ?)",
        [(topic.id, partition, first + n, now_ms, entry.key, entry.value) for n, entry in enumerate(entries)],
    )
    return first


def fetch(connection: sqlite3.Connection, topic: StoredTopic, partition: int, position: int, max_records: int) -> Slice:
    """The records from `position` on: at most `max_records`, and about `MAX_FETCH_BYTES`.

    Raises:
        OffsetOutOfRangeError: `position` is before the first or after the end.
    """
    start, end = bounds(connection, topic, partition)
    if not start <= position <= end:
        raise OffsetOutOfRangeError(
            f"{topic.name!r} partition {partition} has the offsets {start} to {end}, not {position}",
            start=start,
            end=end,
        )
    if position == end:
        return Slice([], end)
    cursor = connection.execute(
        "SELECT ?, part, off, CAST(key AS BLOB), CAST(value AS BLOB), CAST(time AS INTEGER) FROM record"
        " WHERE topic = ? AND part = ? AND off >= ? AND off < ? AND typeof(off) = 'integer' ORDER BY off LIMIT ?",
        (topic.name, topic.id, partition, position, end, max_records),
    )
    messages: list[Message] = []
    size = 0
    while len(messages) < max_records and size < MAX_FETCH_BYTES:
        chunk = [Message(*row) for row in cursor.fetchmany(_CHUNK)]
        if not chunk:
            cursor.close()
            return Slice(messages, end)
        messages += chunk
        size += sum(len(message.value) for message in chunk if message.value is not None)
    cursor.close()
    return Slice(messages, messages[-1].offset + 1)


# --- writers -------------------------------------------------------------------------------------------


def take_identity(connection: sqlite3.Connection, identity: str) -> int:
    """Raise the identity's epoch, which fences all earlier holders; return it."""
    connection.execute(
        "INSERT INTO writer (identity, epoch) VALUES (?, 1) ON CONFLICT (identity) DO UPDATE SET epoch = epoch + 1",
        (identity,),
    )
    ours = epoch(connection, identity)
    assert ours is not None  # noqa: S101 - it was written just now
    return ours


def check_epoch(connection: sqlite3.Connection, identity: str, ours: int) -> None:
    """Raises FencedError if another writer has taken the identity since we got the epoch `ours`."""
    current = epoch(connection, identity)
    if current != ours:
        raise FencedError(
            f"writer {identity!r} was taken over (epoch {current}, ours was {ours}): nothing of this was written"
        )


def epoch(connection: sqlite3.Connection, identity: str) -> int | None:
    """The identity's epoch; None: no writer has ever had it."""
    row = connection.execute("SELECT CAST(epoch AS INTEGER) FROM writer WHERE identity = ?", (identity,)).fetchone()
    return int(row[0]) if row is not None else None
