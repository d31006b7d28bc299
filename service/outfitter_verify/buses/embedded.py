"""The embedded bus as a source: one snapshot of its SQLite file, read with the standard library.

The tables are documented: `topic` (id, name, uuid, partitions), `part` (topic, part, start, next) and `record` (topic,
part, off, time, key, value).
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, unquote

from outfitter_verify.buses import CONTROL, TOPICS, UnreadableError
from outfitter_verify.logs import Control, Log, Partition, Reading, Record

APPLICATION_ID = 0x6F757466
FORMAT = 1
_LOG = "-wal"


def reading(url: str, cluster: str) -> Reading:
    """Read all of `cluster` from the file of `url` (`sqlite:///path`). Raises `UnreadableError`."""
    path = Path(unquote("/" + url.removeprefix("sqlite:").partition("?")[0].lstrip("/")))
    _refuse_second_names(path)
    try:
        # read-only: the last connection to close would otherwise write the log back into the file
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None)) as database:
            database.execute("BEGIN")
            return _all(database, path, cluster)
    except sqlite3.Error as error:
        raise UnreadableError(
            f"{path}: {error}. It must be readable, and its directory writable, for this user"
        ) from error


def _refuse_second_names(path: Path) -> None:
    """Refuse a file that is not there, or not alone: SQLite finds a bus's log by the file's name, so under a second one
    it would show another state of the bus, and might begin a second log.

    Raises:
        UnreadableError: there is no such file, or it or its log has another name as well.
    """
    log = path.with_name(f"{path.name}{_LOG}")
    if not path.is_symlink() and not path.is_file():
        if _size(log):
            raise UnreadableError(
                f"{path} is not there, but its log {log} is: the file was renamed, moved or deleted. Give the file its "
                "name back"
            )
        raise UnreadableError(f"{path}: this file does not exist, so there is no bus")
    for each in (path, log, path.with_name(f"{path.name}-shm")):
        _refuse_second_name(each)
    for other in sorted(path.parent.glob(f"*{_LOG}")) if not _size(log) else ():
        former = other.with_name(other.name.removesuffix(_LOG))
        if _size(other) and not former.exists():
            raise UnreadableError(
                f"{other} is the log of a file that is not there. If {path} is that file, give it its name back: its "
                "last commits are in the log. If it is not, remove the log"
            )


def _refuse_second_name(path: Path) -> None:
    what = None
    if path.is_symlink():
        what = "is a symbolic link"
    elif path.exists() and (links := path.stat().st_nlink) > 1:
        what = f"has more than one name ({links} hard links)"
    elif os.fspath(path.parent.resolve() / path.name) in _mount_points():
        what = "is a mount point of its own, and not its directory"
    if what is not None:
        raise UnreadableError(f"{path} {what}: name the bus's own file, in the directory that has its log")


def _mount_points() -> set[str]:
    """The places of all mounts that this process sees, by proc(5); none without /proc."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4]) for line in lines}


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _all(database: sqlite3.Connection, path: Path, cluster: str) -> Reading:
    marks = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if marks != [APPLICATION_ID, FORMAT]:
        raise UnreadableError(f"{path} is no embedded bus of format {FORMAT}")
    topics = {name: rest for name, *rest in database.execute("SELECT name, id, uuid, partitions FROM topic")}
    names = [f"{cluster}.{topic}" for topic in TOPICS]
    if missing := [name for name in names if name not in topics]:
        raise UnreadableError(f"{path} has no topic {missing[0]}: is {cluster!r} the right cluster?")
    counts = {topics[name][2] for name in names}
    if len(counts) > 1:
        raise UnreadableError(f"the topics of {cluster!r} differ in their partition counts: {sorted(counts)}")
    (partitions,) = counts
    control, orders = f"{cluster}.{CONTROL}", Control()
    if control in topics:
        orders = Control(_log(database, control, topics[control][0], 0), topics[control][1])
    logs = []
    for number in range(partitions):
        registrations, allocations, history, letters = (_log(database, name, topics[name][0], number) for name in names)
        logs.append(Partition(registrations, allocations, history, letters, orders))
    return Reading(cluster, partitions, topics[names[0]][1], markers=False, logs=logs)


def _log(database: sqlite3.Connection, name: str, topic: int, partition: int) -> Log:
    start, end = database.execute(
        "SELECT start, next FROM part WHERE topic = ? AND part = ?", (topic, partition)
    ).fetchone()
    return Log(name, partition, start, end, list(_records(database, topic, partition, start)))


def _records(database: sqlite3.Connection, topic: int, partition: int, start: int) -> Iterator[Record]:
    rows = database.execute(
        # SQLite allows any type in any column: a string instead of bytes damages only its own record
        "SELECT off, CAST(key AS BLOB), CAST(value AS BLOB), CAST(time AS INTEGER) FROM record"
        " WHERE topic = ? AND part = ? AND off >= ? AND typeof(off) = 'integer' ORDER BY off",
        (topic, partition, start),
    )
    return map(Record._make, rows)
