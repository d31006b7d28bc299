"""The locks of a bus: a `flock` on `bus.lock` for its writers, and one on a file of its own for a group's one member.

The kernel queues waiting processes, whereas SQLite polls with sleeps and starves some. The lock ends with its process.
Commits, checkpoints and closing run under it. So no commit runs beside a checkpoint, which SQLite 3.7.0 to 3.51.2 does
not survive (the WAL-reset fault, see the change log for 3.51.3). The lock does not stop programs that do not take it.
Against these, SQLite's own locks still hold.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from outfitter_proto.bus.embedded.connecting.location import FILE_MODE, Location, raise_for


class Lock:
    """An exclusive lock among all processes and threads; a context manager for one thread at a time."""

    def __init__(self, location: Location, path: Path | None = None) -> None:
        """`path`: the file to lock, the writers' by default."""
        self._location = location
        self._path = path or location.lock
        self._descriptor = -1
        _locks.add(self)

    def __enter__(self) -> None:
        """Wait for the lock. The caller has a time limit.

        Raises:
            BusError: the lock file cannot be used; the message says why.
        """
        self._take(fcntl.LOCK_EX)

    def hold(self) -> bool:
        """Take the lock until `close`, without waiting. False: another process has it. Raises as above."""
        try:
            self._take(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
        return self._descriptor >= 0

    @property
    def held(self) -> bool:
        """Whether the lock that `hold` took is there still: nobody has removed its file."""
        return self._descriptor >= 0 and self._is_in_place()

    def _take(self, operation: int) -> None:
        try:
            while True:
                if self._descriptor < 0:
                    self._open()
                fcntl.flock(self._descriptor, operation)
                if self._is_in_place():
                    return
                self.close()  # the file was removed: use the new one, as new processes do
        except BlockingIOError:
            raise
        except OSError as error:
            raise_for(error, f"{self._path} cannot be locked", self._path)

    def __exit__(self, *exc: object) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open(self) -> None:
        flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, FILE_MODE)
        status = os.fstat(self._descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & 0o777 != FILE_MODE:
            os.fchmod(self._descriptor, FILE_MODE)  # independent of the umask
        self._location.check_file(self._path, os.fstat(self._descriptor))

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget() -> None:
    """Close all locks in a forked child: a `flock` lasts until its last descriptor is closed."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_forget)
