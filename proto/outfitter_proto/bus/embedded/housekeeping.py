"""Retention and compaction of an embedded bus, and the truncation of its write-ahead log.

A manager calls it regularly, as Kafka's brokers run their own. Concurrent calls are harmless but repeat work. Searching
takes snapshots and no lock. Removing takes the lock for a thousand records at a time, so that commits continue in
between. After a crash at any point the log is valid for readers, and the next call continues.

The rules are Kafka's ("Log Compaction" in its design documentation). The last record of every key stays, and offsets
never change. A tombstone stays for `delete.retention.ms` *after the older records of its key are gone*. So a reader
that has seen one of these also sees the tombstone. SQLite uses free pages again; the file does not shrink.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from outfitter_proto.bus.embedded import log
from outfitter_proto.bus.embedded.connecting.database import Database

DAY_MS: Final = 86_400_000
DEFAULT_RETENTION_MS: Final = 7 * DAY_MS
DEFAULT_DELETE_RETENTION_MS: Final = DAY_MS
DEFAULT_DIRTY_RATIO: Final = 0.5
"""Kafka's defaults of `retention.ms`, `delete.retention.ms` and `min.cleanable.dirty.ratio`."""

READ_SLICE: Final = 2_000
"""Records read in one snapshot: about 5 ms."""

REMOVE_SLICE: Final = 1_000
"""Records removed under one lock: about 5 ms and an fsync."""

PASS_RECORDS: Final = 100_000
"""Uncompacted records whose keys one pass keeps in memory."""

WAL_WARNING_BYTES: Final = 64 * 1024 * 1024

_log = logging.getLogger(__name__)


class _Part(NamedTuple):
    """One partition's row, with its topic: the first offset and the one after the last, the offset up to which it is
    compacted, and the number of records that this left."""

    topic: log.StoredTopic
    partition: int
    start: int
    next: int
    clean: int
    live: int


class _RecordHeader(NamedTuple):
    """A record without its value. `tombstone`: it has none."""

    offset: int
    time_ms: int
    key: bytes | None
    tombstone: bool


class Housekeeping:
    """One round over every partition. `now_ms`: the current wall time, for retention."""

    def __init__(self, reading: Database, writing: Database, *, now_ms: int) -> None:
        self._reading = reading
        self._writing = writing
        self._now_ms = now_ms

    async def run(self) -> None:
        """Do retention and compaction, then free the write-ahead log's space.

        Raises:
            BusError: the file is missing, full or locked; finished work stays done.
        """
        for part in await self._reading.read(_parts):
            if "delete" in part.topic.policies:
                await self._retain(part)
            if part.topic.compacted:
                await self._compact(part)
                await self._drop_tombstones(part)
        await self._writing.exclusively(_checkpoint)

    # --- retention -------------------------------------------------------------------------------------

    async def _retain(self, part: _Part) -> None:
        """Move the partition's start past the records older than `retention.ms`, then remove those before it."""
        retention = part.topic.number("retention.ms", DEFAULT_RETENTION_MS)
        if retention < 0:
            return
        start = await self._first_kept(part, self._now_ms - retention)
        if start > part.start:
            # Move the start first. Readers must get an offset out of range, not a silent hole.
            await self._writing.commit(partial(_move_start, part=part, start=start))
        while await self._writing.commit(partial(_remove_before, part=part, start=start)):
            pass

    async def _first_kept(self, part: _Part, oldest_ms: float) -> int:
        kept = part.start
        async for rows in self._read_slices(part, part.start, part.next):
            for row in rows:
                if row.time_ms >= oldest_ms:
                    return row.offset
            kept = rows[-1].offset + 1
        return kept

    # --- compaction ------------------------------------------------------------------------------------

    async def _compact(self, part: _Part) -> None:
        """Remove records that a later one of the same key replaces, once there are enough new records."""
        dirty = part.next - part.clean
        ratio = part.topic.number("min.cleanable.dirty.ratio", DEFAULT_DIRTY_RATIO)
        if dirty == 0 or dirty / (dirty + part.live) < ratio:
            return
        head = part.clean
        while head < part.next:
            head = await self._compact_pass(part, head)

    async def _compact_pass(self, part: _Part, clean: int) -> int:
        """Compact one pass from `clean` on; return its end."""
        latest: dict[bytes | None, _RecordHeader] = {}
        gone: list[int] = []
        head = clean
        async for rows in self._read_slices(part, clean, part.next):
            for row in rows:
                if (superseded := latest.get(row.key)) is not None:
                    gone.append(superseded.offset)
                latest[row.key] = row
            head = rows[-1].offset + 1
            if head - clean >= PASS_RECORDS:
                break
        else:
            head = part.next
        live = len(latest)
        async for rows in self._read_slices(part, part.start, clean):
            superseded_here = [row.offset for row in rows if row.key in latest]
            gone += superseded_here
            live += len(rows) - len(superseded_here)
        for offsets in _sliced(gone):
            await self._writing.commit(partial(_remove, part=part, offsets=offsets))
        until = self._now_ms + int(part.topic.number("delete.retention.ms", DEFAULT_DELETE_RETENTION_MS))
        tombstones = [row.offset for row in latest.values() if row.tombstone]
        await self._writing.commit(
            partial(_set_clean, part=part, clean=head, live=live, tombstones=tombstones, until=until)
        )
        return head

    async def _drop_tombstones(self, part: _Part) -> None:
        due = await self._reading.read(partial(_due_tombstones, part=part, now_ms=self._now_ms))
        for offsets in _sliced(due):
            await self._writing.commit(partial(_remove, part=part, offsets=offsets))

    async def _read_slices(self, part: _Part, start: int, end: int) -> AsyncIterator[list[_RecordHeader]]:
        """The records from `start` to before `end`, without values, one snapshot a slice."""
        while rows := await self._reading.read(partial(_headers, part=part, start=start, end=end)):
            yield rows
            start = rows[-1].offset + 1


def _sliced(offsets: Sequence[int]) -> list[Sequence[int]]:
    return [offsets[at : at + REMOVE_SLICE] for at in range(0, len(offsets), REMOVE_SLICE)]


# --- statements ----------------------------------------------------------------------------------------


def _parts(connection: sqlite3.Connection) -> list[_Part]:
    topics = {topic.id: topic for topic in log.all_topics(connection)}
    rows = connection.execute(
        "SELECT topic, part, start, next, CAST(clean AS INTEGER), CAST(live AS INTEGER) FROM part"
    ).fetchall()
    return [
        _Part(topics[topic], part, start, following, *rest)
        for topic, part, start, following, *rest in rows
        if topic in topics and isinstance(start, int) and isinstance(following, int)
    ]


def _headers(connection: sqlite3.Connection, part: _Part, start: int, end: int) -> list[_RecordHeader]:
    rows = connection.execute(
        "SELECT off, CAST(time AS INTEGER), CAST(key AS BLOB), value IS NULL FROM record"
        " WHERE topic = ? AND part = ? AND off >= ? AND off < ? AND typeof(off) = 'integer' ORDER BY off LIMIT ?",
        (part.topic.id, part.partition, start, end, READ_SLICE),
    ).fetchall()
    return list(map(_RecordHeader._make, rows))


def _move_start(connection: sqlite3.Connection, part: _Part, start: int) -> None:
    connection.execute(
        "UPDATE part SET start = max(start, ?), clean = max(clean, ?) WHERE topic = ? AND part = ?",
        (start, start, part.topic.id, part.partition),
    )


def _remove_before(connection: sqlite3.Connection, part: _Part, start: int) -> bool:
    """Remove a slice of the records before `start`. False: there are none."""
    offsets = connection.execute(
        "SELECT off FROM record WHERE topic = ? AND part = ? AND off < ? ORDER BY off LIMIT ?",
        (part.topic.id, part.partition, start, REMOVE_SLICE),
    ).fetchall()
    _remove(connection, part, [offset for (offset,) in offsets])
    return bool(offsets)


def _remove(connection: sqlite3.Connection, part: _Part, offsets: Sequence[int]) -> None:
    rows = [(part.topic.id, part.partition, offset) for offset in offsets]
    connection.executemany("DELETE FROM record WHERE topic = ? AND part = ? AND off = ?", rows)
    connection.executemany("DELETE FROM tombstone WHERE topic = ? AND part = ? AND off = ?", rows)


def _set_clean(
    connection: sqlite3.Connection, *, part: _Part, clean: int, live: int, tombstones: Sequence[int], until: int
) -> None:
    where = (part.topic.id, part.partition)
    connection.execute(
        "UPDATE part SET clean = max(clean, ?), live = ? WHERE topic = ? AND part = ?", (clean, live, *where)
    )
    connection.executemany(
        "INSERT OR IGNORE INTO tombstone (topic, part, off, until) VALUES (?, ?, ?, ?)",
        [(*where, offset, until) for offset in tombstones],
    )


def _due_tombstones(connection: sqlite3.Connection, part: _Part, now_ms: int) -> list[int]:
    rows = connection.execute(
        "SELECT off FROM tombstone WHERE topic = ? AND part = ? AND until <= ?",
        (part.topic.id, part.partition, now_ms),
    ).fetchall()
    return [offset for (offset,) in rows]


def _checkpoint(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file and cut it to 0, unless a process still reads an old snapshot."""
    (patience,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout=0").fetchone()  # do not wait for a reader while holding the lock
    try:
        busy, pages, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        (page_size,) = connection.execute("PRAGMA page_size").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout={patience}").fetchone()
    if busy and pages * page_size > WAL_WARNING_BYTES:
        _log.warning(
            "the embedded bus's write-ahead log has %d MiB and cannot be cut: some process holds an old snapshot",
            pages * page_size // 2**20,
        )
