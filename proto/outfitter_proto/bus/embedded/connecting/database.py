"""One SQLite connection in its own thread: snapshots, transactions, and the bus error for each error of SQLite.

A whole commit is one job of the thread. So a cancelled task cannot stop in the middle of a transaction, and a commit
costs one thread switch instead of one for each statement. Topics are in `log`.
"""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Final, TypeVar

import anyio

from outfitter_proto.bus.embedded.connecting.location import FileIdentity, Location
from outfitter_proto.bus.embedded.connecting.lock import Lock
from outfitter_proto.bus.embedded.connecting.thread import TIME_LIMIT_S, EndTimeoutError, JobThread, TurnTimeoutError
from outfitter_proto.bus.port import BusConfigurationError, BusError, BusUnavailableError, CommitUnknownError, Create
from outfitter_proto.support import descriptors

T = TypeVar("T")
Identities = Mapping[Path, FileIdentity | None]
Job = Callable[[sqlite3.Connection], T]

BUSY_TIMEOUT_S: Final = 2.0
"""Seconds for which SQLite waits for a program that writes without our lock, such as the `sqlite3` shell."""

JOURNAL_SIZE_LIMIT: Final = 16 * 1024 * 1024
"""Size to which a checkpoint cuts the write-ahead log, in bytes, after an old snapshot has made it grow."""

_REMEDIES: Final = {
    "SQLITE_FULL": "the disk is full: make room, and nothing else is needed",
    "SQLITE_READONLY": "it is read-only: it must be writable for this user, and so must its directory",
    "SQLITE_BUSY": "another program holds it locked without going through the bus (a `sqlite3` shell?)",
    "SQLITE_LOCKED": "another program holds it locked without going through the bus (a `sqlite3` shell?)",
    "SQLITE_CANTOPEN": "it cannot be opened: it and its directory must exist and be writable for this user",
    "SQLITE_IOERR_SHMSIZE": "the disk is full: make room, and nothing else is needed",  # no room for the -shm file
    "SQLITE_IOERR": "the disk answers with errors: see the machine's own log",
    "SQLITE_CORRUPT": "it is damaged: stop every process on it, put it and its -wal aside, start anew or from a copy",
    "SQLITE_NOTADB": "it is no SQLite database: name the bus's own file",
}
_OPENS_FILES: Final = frozenset({"SQLITE_CANTOPEN", "SQLITE_IOERR"})
"""SQLite's errors if it may open no more files. They do not have the reason."""
_FILES: Final = 4
"""Files that SQLite may open for one statement: the database, its write-ahead log and index, the directory."""
_PERMANENT: Final = frozenset({"SQLITE_CORRUPT", "SQLITE_NOTADB"})
_in_use: Final[dict[sqlite3.Connection, Identities]] = {}
"""The connections that this process has open, and which file, log and index each of them uses."""
_CERTAIN: Final = frozenset({"SQLITE_FULL", "SQLITE_BUSY", "SQLITE_READONLY"})
"""With these errors COMMIT failed before it wrote its last page, so it has certainly rolled back."""


class Database:
    """One connection to the bus's file.

    `read` gives a snapshot, `commit` a transaction under the lock, `exclusively` only the lock. Every job must read its
    cursors to the end, because an open cursor prevents the write-ahead log from being cut.
    """

    def __init__(self, location: Location, *, create: Create = Create.DIRECTORY) -> None:
        self._location = location
        self._create = create
        self._pid = os.getpid()
        self._lock = Lock(location)
        self._thread = JobThread(f"outfitter bus {location.path.name}", at_end=self._end)
        self._connection: sqlite3.Connection | None = None
        self._identity: FileIdentity | None = None
        self._in_use: Identities = {}
        self._closed = False

    async def open(self, check: Job[object], setup: Job[None]) -> None:
        """Create a missing file (if `create` allows it), connect, and run `setup` under the lock.

        An existing file must pass `check` first. If it fails, nothing is created beside it.

        Raises:
            BusConfigurationError: the file or its directory is not suitable for a bus.
            BusUnavailableError: it is unavailable now.
        """
        self._thread.start()
        try:
            await self._run(lambda: self._location.prepare(create=self._create is Create.DIRECTORY))
            await self._run(lambda: self._check_existing(check))
            await self._run(lambda: self._connect(setup), turn=self._lock)
        except BaseException:
            self._closed = True
            self._thread.stop()
            raise

    async def read(self, job: Job[T]) -> T:
        """Run `job` on one snapshot of all commits."""
        try:
            return await self._run(lambda: self._snapshot(job))
        except CommitUnknownError as error:
            raise BusUnavailableError(str(error)) from error

    async def commit(self, job: Job[T], *, after: Callable[[T], None] = lambda _: None) -> T:
        """Run `job` in a transaction and commit it. Once the lock is free again, call `after` with the job's result.

        A cancellation before the job's turn prevents it. A later one waits until it has ended, so its outcome is known.

        Raises:
            CommitUnknownError: the disk failed during COMMIT, or did not answer within the time limit.
            BusError: the error of `job`, or BusUnavailableError; nothing was written.
        """
        return await self._run(lambda: self._transaction(job), turn=self._lock, after=after)

    async def exclusively(self, job: Job[T]) -> T:
        """Run `job` (a checkpoint) under the lock, outside any transaction."""
        return await self._run(lambda: job(self._checked()), turn=self._lock)

    async def close(self) -> None:
        """Close the connection and end the thread. Repeatable, bounded; a missing file raises nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            with anyio.CancelScope(shield=True):
                await self._thread.run(self._disconnect, turn=self._lock, after=lambda _: None)
        except (TurnTimeoutError, EndTimeoutError, BusError):
            pass  # the thread closes it when it gets the lock; commits are safe
        finally:
            self._thread.stop()

    # --- the caller's side -----------------------------------------------------------------------------

    async def _run(
        self,
        job: Callable[[], T],
        *,
        turn: AbstractContextManager[object] | None = None,
        after: Callable[[T], None] = lambda _: None,
    ) -> T:
        path = self._location.path
        if os.getpid() != self._pid:
            raise BusConfigurationError(
                f"this connection to {path} was made by process {self._pid} and SQLite forbids its use in the fork "
                f"{os.getpid()}: make a new bus in the child, or start children with the 'spawn' method"
            )
        if self._closed:
            raise BusUnavailableError(f"this connection to {path} is closed: make a new bus")
        try:
            return await self._thread.run(job, turn=turn or nullcontext(), after=after)
        except TurnTimeoutError:
            raise BusUnavailableError(
                f"{self._location.lock} has been held by another process for {TIME_LIMIT_S:.0f} s: is one stopped "
                f"or its disk stuck? `fuser {self._location.lock}` names them"
            ) from None
        except EndTimeoutError:
            raise CommitUnknownError(f"{path}: the disk has not answered for {2 * TIME_LIMIT_S:.0f} s") from None
        except sqlite3.Error as error:
            raise _bus_error(error, self._location) from error

    # --- the thread's side -----------------------------------------------------------------------------

    def _check_existing(self, check: Job[object]) -> None:
        """Check an existing file without the lock, which is itself a file. Keep the connection open if it is a bus,
        because closing it may checkpoint."""
        self._location.refuse_lone_log()
        self._identity = self._location.identity()
        if self._identity is None:
            if self._create is Create.NOTHING:
                raise self._location.missing()
            return
        connection: sqlite3.Connection | None = None
        try:
            connection = self._opened()
            connection.execute("BEGIN")  # one snapshot: another process may just be creating a bus in the file
            check(connection)
            connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            pass  # opening it under the lock gives a better error
        else:
            self._connection, connection = connection, None
        finally:
            if connection is not None:
                connection.close()

    def _opened(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._location.uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, cached_statements=256
        )

    def _connect(self, setup: Job[None]) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and self._location.identity() != self._identity:
            connection.close()
            connection = None
        if connection is None:
            self._location.check_files()
            if self._create is not Create.NOTHING:
                self._location.create_file()
            connection = self._opened()
        try:
            connection.execute(f"PRAGMA synchronous={self._location.synchronous}")
            setup(connection)  # first, because it refuses a file that is no bus
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise BusConfigurationError(
                    f"{self._location.path} cannot use a write-ahead log (SQLite answers {mode!r}), which several "
                    "processes need: put it on a local disk"
                )
            connection.execute(f"PRAGMA journal_size_limit={JOURNAL_SIZE_LIMIT}").fetchone()
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # makes SQLite open log and index
            self._in_use = self._location.identities()
            self._check_others()
        except BaseException:
            connection.close()
            raise
        _in_use[connection] = self._in_use
        self._connection = connection

    def _check_others(self) -> None:
        """Raise if a connection of this process uses another log or index of the same file. SQLite would share that
        index with the new connection."""
        path = self._location.path
        for other in list(_in_use.values()):
            if other.get(path) == self._in_use[path] and other != self._in_use:
                raise _deleted(other, self._in_use)

    def _disconnect(self) -> None:
        """Close the connection, unless its log or index is no longer at its path. Closing it could then write old pages
        over newer ones, so it stays open until the process ends."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        here = self._location.identities()
        if here == self._in_use or here[self._location.path] != self._in_use.get(self._location.path):
            _in_use.pop(connection, None)
            connection.close()  # SQLite itself writes nothing into a file that was moved
            return
        try:
            if here[self._location.log] is None:  # nobody has begun another log: save what is in the deleted one
                connection.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
        finally:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def _end(self) -> None:
        """Close the connection of an abandoned `open` under the lock, because closing may checkpoint. No caller
        waits."""
        with suppress(BusError):
            if self._connection is not None:
                with self._lock:
                    self._disconnect()
        self._lock.close()

    def _checked(self) -> sqlite3.Connection:
        """The connection. Raises if its file, log or index is no longer at its path, because then nobody would see the
        commits."""
        if self._connection is None:
            raise BusUnavailableError(f"{self._location.path} is not open")
        here, path = self._location.identities(), self._location.path
        if here[path] != self._in_use[path]:
            raise self._location.gone(self._in_use[path])
        if here != self._in_use:
            raise _deleted(self._in_use, here)
        return self._connection

    def _snapshot(self, job: Job[T]) -> T:
        connection = self._checked()
        connection.execute("BEGIN")
        try:
            return job(connection)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _transaction(self, job: Job[T]) -> T:
        connection = self._checked()
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = job(connection)
        except BaseException:
            _roll_back(connection)
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(connection)
            if _name(error) in _CERTAIN:
                raise
            raise CommitUnknownError(
                f"{self._location.path}: COMMIT failed ({error}), its outcome is unknown"
            ) from error
        return result


def _deleted(in_use: Identities, here: Identities) -> BusConfigurationError:
    path = next(path for path, identity in in_use.items() if identity != here.get(path))
    return BusConfigurationError(
        f"{path} was deleted or replaced while this process used it: stop every process on it and start them again; "
        "earlier commits are only in the old file"
    )


def _roll_back(connection: sqlite3.Connection) -> None:
    if connection.in_transaction:  # on a full disk SQLite has rolled back already
        connection.execute("ROLLBACK")


def _name(error: sqlite3.Error) -> str:
    """The primary result code: SQLITE_IOERR for SQLITE_IOERR_WRITE."""
    name = getattr(error, "sqlite_errorname", None) or ""
    return "_".join(name.split("_")[:2])


def _bus_error(error: sqlite3.Error, location: Location) -> BusError:
    name = _name(error)
    remedy = _REMEDIES.get(getattr(error, "sqlite_errorname", "")) or _REMEDIES.get(name, "SQLite failed")
    if name in _OPENS_FILES and (code := descriptors.lacking(_FILES)) is not None:
        remedy = descriptors.explain(code)
    message = f"{location.path}: {remedy} ({name or type(error).__name__}: {error})"
    if name in _PERMANENT:
        return BusConfigurationError(message)
    return BusUnavailableError(message)
