"""The location of an embedded bus: its URL, the files beside it, and the directories that it refuses.

Beside `bus.db` are SQLite's own `bus.db-wal` and `bus.db-shm`, `bus.lock` (the writers' lock), `bus.wake/` (a socket
for each waiting reader) and `bus.member-…` (the lock of a group's one member). The bus trusts every user that can write
the file, so this module restricts these users. It creates the files for their owner and group (mode 0660, 2770 for
directories). It refuses directories in which *others* could place a file:

- every directory that all users may write, also a sticky one as /tmp. SQLite uses any write-ahead log or journal beside
  its file. It creates and removes them at any time, so a check beforehand would not help.
- another user's directory that is not shared with its group

SQLite finds a bus's log by the name of its file. So a file with a second name (a hard link, or a bind mount of the file
alone) would be two buses: each name has a log of its own, and what one writes is lost to the other. Such files are
refused. A bind mount of the whole directory is fine. A file that was renamed has left its log behind: SQLite would use
the file without what is in there, and would delete that log where a new file gets the former name. So a log without its
file is refused as well.

This module never opens an existing file: closing a second descriptor of a database drops all SQLite locks of the
process on it (SQLite, "How To Corrupt An SQLite Database File", 2.2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, NoReturn
from urllib.parse import parse_qsl, quote, unquote

from outfitter_proto.bus.addresses import FILE_SYNTAX
from outfitter_proto.bus.port import BusConfigurationError, BusError, BusUnavailableError, MissingBusError
from outfitter_proto.support import descriptors

FILE_MODE: Final = 0o660
DIRECTORY_MODE: Final = 0o2770
"""Set-group-id, so that every file in it gets the directory's group."""

SYNCHRONOUS: Final = ("FULL", "NORMAL")
"""Values of `?synchronous=`. FULL: a returned commit survives a power cut. NORMAL: it only survives a kill."""

LOCAL_FILE_SYSTEMS: Final = {
    0xEF53: "ext",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x858458F6: "ramfs",
    0xCA451A4E: "bcachefs",
}
"""File systems by `f_type` of statfs(2) whose locks and shared memory work for all processes that mount them."""

KNOWN_FOREIGN: Final = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x6A656A63: "virtiofs",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
}
"""Names for the message only. Everything outside `LOCAL_FILE_SYSTEMS` is refused."""

_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _STATX_ATTR_MOUNT_ROOT = -100, 0x100, 0x2000
_ATTRIBUTES: Final = struct.Struct("@8xQ")
"""The field `stx_attributes` of `struct statx`."""

_LOG: Final = "-wal"
SQLITES_OWN: Final = (_LOG, "-shm", "-journal")
"""Suffixes of files beside the database that SQLite treats as a part of it."""

_ANOTHER: Final = f"another with --bus {FILE_SYNTAX} or OUTFITTER_BUS"
_ELSEWHERE: Final = f"choose {_ANOTHER}"


class FileIdentity(NamedTuple):
    """Distinguishes a file from another one at the same path."""

    device: int
    inode: int


class Location(NamedTuple):
    """A bus's path and options, from its URL. `synchronous`: one of `SYNCHRONOUS`."""

    path: Path
    synchronous: str

    @property
    def lock(self) -> Path:
        return self.path.with_suffix(".lock")

    def member_lock(self, group: str) -> Path:
        """The lock of the one member of a group, which has this short name."""
        return self.path.with_suffix(f".member-{group}")

    @property
    def log(self) -> Path:
        """SQLite's write-ahead log, with all commits since the last checkpoint."""
        return Path(f"{self.path}{_LOG}")

    @property
    def log_index(self) -> Path:
        """SQLite's index of the log, in memory that all processes share."""
        return Path(f"{self.path}-shm")

    @property
    def wake(self) -> Path:
        return self.path.with_suffix(".wake")

    @property
    def uri(self) -> str:
        """The file's URI for SQLite. `mode=rw`: SQLite must not create it, because it would use a wrong file mode."""
        return f"file:{quote(str(self.path))}?mode=rw"

    def prepare(self, *, create: bool = True) -> None:
        """Create the directory if its parent exists, and refuse it if it is not suitable for a bus.

        `create` False: do not create it.

        Raises:
            BusConfigurationError: not suitable for a bus or this user, or missing.
            BusUnavailableError: it is unavailable now (read-only, an I/O error).
        """
        directory = self.path.parent
        try:
            if not directory.exists():
                if not create:
                    raise self.missing()
                make_directory(directory)
            status = directory.stat()
        except FileExistsError:
            status = directory.stat()
        except OSError as error:
            raise_for(error, f"the directory {directory} of the embedded bus cannot be used", directory)
        check_directory(directory, status)
        _check_file_system(directory)
        self.check_files()

    def missing(self) -> MissingBusError:
        """The error that there is no bus."""
        return MissingBusError(
            f"there is no bus at {self.path}: a manager makes it when it starts (`outfitter serve`), as does "
            f"`outfitter topics create`; name {_ANOTHER}"
        )

    def refuse_lone_log(self) -> None:
        """Refuse to begin beside a log whose file has another name now: at this path, or perhaps this one.

        Raises:
            BusConfigurationError: there is such a log, and this file has none.
        """
        if _holds(self.log):
            if self.identity() is None:
                raise BusConfigurationError(
                    f"{self.path} is not there, but its log {self.log} is: the file was renamed, moved or deleted. "
                    "Stop every process on it and give the file its name back. If it is lost, remove the log, and a "
                    "new bus begins"
                )
            return
        for log in self._logs():
            former = log.with_name(log.name.removesuffix(_LOG))
            if _holds(log) and not former.exists():
                raise BusConfigurationError(
                    f"{log} is the log of a file that is not there. If {self.path} is that file, under another name, "
                    f"stop every process on it and rename it back (`mv {self.path} {former}`): its last commits are "
                    "in the log. If it is not, remove the log"
                )

    def _logs(self) -> list[Path]:
        """All logs in the directory; none if this user may not list it."""
        try:
            with os.scandir(self.path.parent) as entries:
                return sorted(Path(entry.path) for entry in entries if entry.name.endswith(_LOG))
        except PermissionError:
            return []
        except OSError as error:
            raise_for(error, f"the directory {self.path.parent} of the embedded bus cannot be listed", self.path)

    def gone(self, identity: FileIdentity | None) -> BusConfigurationError:
        """The error that the file of an open connection is no longer at the path. `identity`: the file's."""
        now = _opened_as(identity) if identity is not None else None
        if now is None or self.identity() is not None:
            also = "" if now is None else f" (the former file is {now} now)"
            return BusConfigurationError(
                f"{self.path} was deleted or replaced while this process used it{also}: stop every process on it and "
                "start them again; earlier commits are only in the old file and its log"
            )
        before, after = (self.path, now) if self.path.parent.exists() else (self.path.parent, now.parent)
        return BusConfigurationError(
            f"{self.path} was renamed to {now} while this process used it: stop every process on it, rename it back "
            f"(`mv {after} {before}`), and start them again; nothing is lost"
        )

    def create_file(self) -> None:
        """Create an empty database file if it is missing. Call under the lock."""
        self.refuse_lone_log()
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, FILE_MODE)
        except FileExistsError:
            return
        except OSError as error:
            raise_for(error, f"{self.path} cannot be created", self.path)
        os.fchmod(descriptor, FILE_MODE)  # independent of the umask; SQLite gives -wal and -shm this mode too
        os.close(descriptor)

    def check_files(self) -> None:
        """Refuse a database file, or a file that SQLite treats as a part of it, if another user could have placed it.
        Missing files are fine."""
        for suffix in ("", *SQLITES_OWN):
            path = Path(f"{self.path}{suffix}")
            try:
                self.check_file(path, path.lstat())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise_for(error, f"{path} cannot be examined", path)

    def check_file(self, path: Path, status: os.stat_result) -> None:
        """Refuse anything but a regular file without other names. `status`: the file's."""
        if status.st_nlink > 1:
            raise BusConfigurationError(
                f"{path} has more than one name ({status.st_nlink} hard links), and each would be a bus of its own: "
                f"remove the others (`find / -xdev -samefile {path}` names them), or {_ELSEWHERE}"
            )
        if _is_mount_point(path):
            raise BusConfigurationError(
                f"{path} is a mount point of its own, so its log would lie elsewhere than that of the same file under "
                f"its other name: mount its directory in place of the file, or {_ELSEWHERE}"
            )
        if not stat.S_ISREG(status.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
            raise BusConfigurationError(f"{path} is {what}: name the bus's own file, or {_ELSEWHERE}")
        self.check_rights(path, status)

    def check_rights(self, path: Path, status: os.stat_result) -> None:
        """Refuse a file or directory that others may write, or whose owner may not write the bus's directory."""
        if status.st_mode & stat.S_IWOTH:
            raise BusConfigurationError(
                f"{path} may be written by everybody, who could then forge grants: `chmod o-w {path}`"
            )
        directory = self.path.parent.stat()
        if status.st_uid not in (0, os.geteuid(), directory.st_uid) and not directory.st_mode & stat.S_IWGRP:
            raise BusConfigurationError(
                f"{path} belongs to user {status.st_uid}, who does not share {self.path.parent}: `chown` it, "
                f"or {_ELSEWHERE}"
            )

    def identity(self) -> FileIdentity | None:
        """The identity of the file at the path; None if there is none."""
        return _identity(self.path)

    def identities(self) -> dict[Path, FileIdentity | None]:
        """The identity of the file, of its write-ahead log and of the log's index, by their paths."""
        return {path: _identity(path) for path in (self.path, self.log, self.log_index)}


def _identity(path: Path) -> FileIdentity | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return FileIdentity(status.st_dev, status.st_ino)


def parse(url: str) -> Location:
    """Parse `sqlite:///path/to/bus.db[?synchronous=FULL|NORMAL]`.

    The path is absolute with three slashes and with four. A relative path is refused: it would be another file in every
    working directory, and two processes would wait for each other on two buses.

    Raises:
        BusConfigurationError: any other URL; the message has the valid form.
    """
    rest, _, query = url.removeprefix("sqlite:").partition("?")
    valid = f"write {FILE_SYNTAX} with an absolute path, optionally with ?synchronous=NORMAL"
    host = rest.startswith("//") and not rest.startswith("///")
    if host or not rest.startswith("/"):
        raise BusConfigurationError(f"{url!r} names no absolute path: {valid}")
    path = Path(os.path.normpath("/" + unquote(rest).lstrip("/")))
    if path.name == "" or path.suffix in (".lock", ".wake"):
        raise BusConfigurationError(f"{url!r} names no file for a bus: {valid}")
    synchronous = SYNCHRONOUS[0]
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "synchronous" or value.upper() not in SYNCHRONOUS:
            raise BusConfigurationError(f"{url!r} has an option {name}={value!r} that no embedded bus knows: {valid}")
        synchronous = value.upper()
    return Location(path, synchronous)


def make_directory(path: Path) -> None:
    """Create a directory for owner and group, independent of the umask. Other users can never write it, not even
    briefly.

    Raises:
        OSError: it cannot be created, or exists.
    """
    path.mkdir(mode=DIRECTORY_MODE)
    path.chmod(DIRECTORY_MODE)  # set the bits that the umask and mkdir(2) have dropped


def raise_for(error: OSError, what: str, path: Path) -> NoReturn:
    """Raise the bus error for an operating system's error about `path`. `what`: the failed action, for the message."""
    raise bus_error(error, what, path) from error


def bus_error(error: OSError, what: str, path: Path) -> BusError:
    """`error` as a bus error: permanent if a person must act, temporary if the machine may recover."""
    if error.errno in descriptors.LACKING:
        return BusUnavailableError(f"{what}: {descriptors.explain(error.errno)}")
    reason = error.strerror or str(error)
    if isinstance(error, PermissionError):
        return BusConfigurationError(
            f"{what}: {reason}. User {os.geteuid()} needs the group that may write {path.parent}, or {_ELSEWHERE}"
        )
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return BusConfigurationError(f"{what}: {reason}. Make {path.parent} first, or {_ELSEWHERE}")
    if isinstance(error, IsADirectoryError):
        return BusConfigurationError(f"{what}: {reason}. Remove it, or {_ELSEWHERE}")
    if error.errno == errno.ELOOP:
        return BusConfigurationError(f"{what}: it is a symbolic link. Remove it, or {_ELSEWHERE}")
    return BusUnavailableError(f"{what}: {reason}")


def check_directory(directory: Path, status: os.stat_result) -> None:
    """Refuse a directory in which a user outside its owner and group could place a bus."""
    if not stat.S_ISDIR(status.st_mode):
        raise BusConfigurationError(f"{directory} is no directory: {_ELSEWHERE}")
    if status.st_mode & stat.S_IWOTH:
        raise BusConfigurationError(
            f"everybody may write {directory} and so replace the bus or parts of it: give the bus a directory of its "
            f"own, such as `mkdir -m 2770 {directory / 'outfitter'}`, or `chmod o-w {directory}`, or {_ELSEWHERE}"
        )
    if status.st_uid not in (0, os.geteuid()) and not _is_shared(status):
        raise BusConfigurationError(
            f"{directory} belongs to user {status.st_uid}, who could replace the bus: run as that user, let the "
            f"directory be shared with its group (`chmod 2770 {directory}`), or {_ELSEWHERE}"
        )


def _is_shared(directory: os.stat_result) -> bool:
    """Whether its owner shares it with us: through a group of ours, or, if we are root, as a bus's directory."""
    if not directory.st_mode & stat.S_IWGRP:
        return False
    ours = {os.getegid(), *os.getgroups()}
    return directory.st_gid in ours or (os.geteuid() == 0 and bool(directory.st_mode & stat.S_ISGID))


def _check_file_system(directory: Path) -> None:
    kind = _file_system_type(directory)
    if kind not in LOCAL_FILE_SYSTEMS:
        name = KNOWN_FOREIGN.get(kind, f"type {kind:#x}")
        raise BusConfigurationError(
            f"{directory} is on a file system ({name}) not known to be local to this machine; the embedded bus needs "
            f"shared memory and locks that hold ({', '.join(LOCAL_FILE_SYSTEMS.values())}): {_ELSEWHERE}"
        )


def _holds(log: Path) -> bool:
    """Whether there is a log that has something."""
    try:
        return log.lstat().st_size > 0
    except OSError:
        return False


def _opened_as(identity: FileIdentity) -> Path | None:
    """Where a file that this process has open is now; None: it was deleted, or /proc does not show it."""
    try:
        for entry in Path("/proc/self/fd").iterdir():
            now = entry.readlink()
            with suppress(OSError):
                status = now.lstat()
                if FileIdentity(status.st_dev, status.st_ino) == identity:
                    return now
    except OSError:
        pass
    return None


def _is_mount_point(path: Path) -> bool:
    """Whether a file is mounted by itself, statx(2); False where the kernel (before Linux 5.8) does not say. Python's
    `os.path.ismount` sees no bind mount."""
    answer = ctypes.create_string_buffer(256)  # `struct statx`
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, 0, answer) != 0
    except AttributeError:  # a C library without it
        return False
    return not failed and bool(_ATTRIBUTES.unpack_from(answer)[0] & _STATX_ATTR_MOUNT_ROOT)


def _file_system_type(directory: Path) -> int:
    """`f_type` of statfs(2), the structure's first word, which Python's `os.statvfs` lacks."""
    answer = ctypes.create_string_buffer(512)  # 120 bytes on 64-bit Linux
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), answer) != 0:
        code = ctypes.get_errno()
        raise_for(OSError(code, os.strerror(code)), f"the file system of {directory} is unknown", directory)
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
