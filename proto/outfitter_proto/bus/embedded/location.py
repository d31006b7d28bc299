"""Where an embedded bus lives: its URL, the files beside it, and the places it refuses.

Beside `bus.db` stand SQLite's own `bus.db-wal` and `bus.db-shm`, `bus.lock` (the queue of writers) and
`bus.wake/` (a socket for each waiting reader). Whoever can write the file is trusted, so the question here
is only who that is: the file and all beside it are made for their owner and group (mode 0660, 2770 for
directories), and a place where *others* could put a file of theirs in the way is refused. That is every directory that
everybody may write, sticky ones as /tmp included: SQLite takes whatever write-ahead log or journal lies beside its file
for a part of it, and removes and makes them as it goes, so that looking first would not do. It is also a directory of
somebody else's who does not share it with its group.

The file is never opened here while it exists: closing a second descriptor of a database drops SQLite's locks on
it for the whole process (SQLite, "How To Corrupt An SQLite Database File", 2.2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple, NoReturn
from urllib.parse import parse_qsl, quote, unquote

from outfitter_proto.bus.port import BusConfigurationError, BusError, BusUnavailableError, MissingBusError

FILE_MODE: Final = 0o660
DIRECTORY_MODE: Final = 0o2770
"""Set-group-id, so that every file in it gets the directory's group, whoever makes it."""

SYNCHRONOUS: Final = ("FULL", "NORMAL")
"""What `?synchronous=` takes. FULL: a returned commit survives a power cut. NORMAL: it survives a kill only."""

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
"""File systems by `f_type` of statfs(2) whose locks and shared memory hold for every process that mounts them."""

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
"""Names for the message only; whatever is not in `LOCAL_FILE_SYSTEMS` is refused."""

SQLITES_OWN: Final = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside its file, and takes for a part of it where it finds it."""

_ELSEWHERE: Final = "choose another with --bus sqlite:///path/to/bus.db or OUTFITTER_BUS"


class FileIdentity(NamedTuple):
    """What tells a file from another one at the same path."""

    device: int
    inode: int


class Location(NamedTuple):
    """A bus's path and options, as its URL gives them."""

    path: Path
    synchronous: str

    @property
    def lock(self) -> Path:
        return self.path.with_suffix(".lock")

    @property
    def wake(self) -> Path:
        return self.path.with_suffix(".wake")

    @property
    def uri(self) -> str:
        """SQLite's own name for the file; `mode=rw`: never made by SQLite, which would not know the mode."""
        return f"file:{quote(str(self.path))}?mode=rw"

    def prepare(self, *, create: bool = True) -> None:
        """Make the directory if only it is missing, and refuse it if a bus must not live there.

        `create` False: make nothing.

        Raises:
            BusConfigurationError: not a place for a bus, or not for this user; or there is none.
            BusUnavailableError: it cannot be reached now (read-only, an I/O error).
        """
        directory = self.path.parent
        try:
            if not directory.exists():
                if not create:
                    raise self.missing()
                make_directory(directory)
            found = directory.stat()
        except FileExistsError:
            found = directory.stat()
        except OSError as error:
            raise_for(error, f"the directory {directory} of the embedded bus cannot be used", directory)
        check_directory(directory, found)
        _check_file_system(directory)
        self.check_files()

    def missing(self) -> MissingBusError:
        """That there is no bus."""
        return MissingBusError(
            f"there is no bus at {self.path}: a manager makes it when it starts (`outfitter serve`), as does "
            f"`outfitter topics create`; name another with --bus sqlite:///path/to/bus.db or OUTFITTER_BUS"
        )

    def create_file(self) -> None:
        """Make the database file, empty, if it is not there. Call under the lock."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, FILE_MODE)
        except FileExistsError:
            return
        except OSError as error:
            raise_for(error, f"{self.path} cannot be made", self.path)
        os.fchmod(descriptor, FILE_MODE)  # whatever the umask: SQLite gives -wal and -shm this mode too
        os.close(descriptor)

    def check_files(self) -> None:
        """Refuse a database file that somebody else could have put there, and the like of what SQLite takes for a
        part of it. One that is missing is fine."""
        for suffix in ("", *SQLITES_OWN):
            path = Path(f"{self.path}{suffix}")
            try:
                self.check_file(path, path.lstat())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise_for(error, f"{path} cannot be looked at", path)

    def check_file(self, path: Path, found: os.stat_result) -> None:
        """Refuse what is no file, or not a file of the bus's own."""
        if not stat.S_ISREG(found.st_mode):
            what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
            raise BusConfigurationError(f"{path} is {what}: name the bus's own file, or {_ELSEWHERE}")
        self.check_rights(path, found)

    def check_rights(self, path: Path, found: os.stat_result) -> None:
        """Refuse a file or directory of the bus that others may write, or that belongs to somebody who may not write
        the bus's directory."""
        if found.st_mode & stat.S_IWOTH:
            raise BusConfigurationError(
                f"{path} may be written by everybody, who could then forge grants: `chmod o-w {path}`"
            )
        directory = self.path.parent.stat()
        if found.st_uid not in (0, os.geteuid(), directory.st_uid) and not directory.st_mode & stat.S_IWGRP:
            raise BusConfigurationError(
                f"{path} belongs to user {found.st_uid}, with whom {self.path.parent} is not shared: `chown` it, "
                f"or {_ELSEWHERE}"
            )

    def identity(self) -> FileIdentity | None:
        """Which file is at the path now; None: none is."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return None
        return FileIdentity(found.st_dev, found.st_ino)


def parse(url: str) -> Location:
    """The place that `url` names: `sqlite:///path/to/bus.db[?synchronous=FULL|NORMAL]`.

    The path is absolute with three slashes and with four. A relative one is refused: it would be another
    file in every working directory, and two processes would wait for each other on two buses.

    Raises:
        BusConfigurationError: the URL says something else; the message says what would be valid.
    """
    rest, _, query = url.removeprefix("sqlite:").partition("?")
    wanted = "write sqlite:///absolute/path/bus.db, optionally with ?synchronous=NORMAL"
    host = rest.startswith("//") and not rest.startswith("///")
    if host or not rest.startswith("/"):
        raise BusConfigurationError(f"{url!r} names no absolute path: {wanted}")
    path = Path(os.path.normpath("/" + unquote(rest).lstrip("/")))
    if path.name == "" or path.suffix in (".lock", ".wake"):
        raise BusConfigurationError(f"{url!r} names no file that a bus could be: {wanted}")
    synchronous = SYNCHRONOUS[0]
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != "synchronous" or value.upper() not in SYNCHRONOUS:
            raise BusConfigurationError(f"{url!r} has an option {name}={value!r} that no embedded bus knows: {wanted}")
        synchronous = value.upper()
    return Location(path, synchronous)


def make_directory(path: Path) -> None:
    """Make a directory for the owner and group, whatever the umask: not even at first may everybody write it.

    Raises:
        OSError: it cannot be made, or is there.
    """
    path.mkdir(mode=DIRECTORY_MODE)
    path.chmod(DIRECTORY_MODE)  # what the umask, and mkdir(2), have left out


def raise_for(error: OSError, what: str, path: Path) -> NoReturn:
    """Translate an error of the operating system about `path`: what a person must change, or what may pass."""
    raise verdict(error, what, path) from error


def verdict(error: OSError, what: str, path: Path) -> BusError:
    """`error` as one of ours: permanent where a person must act first, temporary where the machine may recover."""
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


def check_directory(directory: Path, found: os.stat_result) -> None:
    """Refuse a directory in which somebody could put a bus of theirs, who was not let in by its owner or group."""
    if not stat.S_ISDIR(found.st_mode):
        raise BusConfigurationError(f"{directory} is no directory: {_ELSEWHERE}")
    if found.st_mode & stat.S_IWOTH:
        raise BusConfigurationError(
            f"everybody may write {directory} and so replace the bus or parts of it: give the bus a directory of its "
            f"own, as `mkdir -m 2770 {directory / 'outfitter'}` makes one, or `chmod o-w {directory}`, or {_ELSEWHERE}"
        )
    if found.st_uid not in (0, os.geteuid()) and not _is_shared(found):
        raise BusConfigurationError(
            f"{directory} belongs to user {found.st_uid}, who could replace the bus: run as that user, let the "
            f"directory be shared with its group (`chmod 2770 {directory}`), or {_ELSEWHERE}"
        )


def _is_shared(directory: os.stat_result) -> bool:
    """Whether its owner shares it with us: through a group of ours, or, where we are root, as a bus's directory."""
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


def _file_system_type(directory: Path) -> int:
    """`f_type` of statfs(2), which Python's `os.statvfs` leaves out: the structure's first word."""
    answer = ctypes.create_string_buffer(512)  # 120 bytes on 64-bit Linux
    library = ctypes.CDLL(None, use_errno=True)
    if library.statfs(os.fsencode(directory), answer) != 0:
        code = ctypes.get_errno()
        raise_for(OSError(code, os.strerror(code)), f"the file system of {directory} is unknown", directory)
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
