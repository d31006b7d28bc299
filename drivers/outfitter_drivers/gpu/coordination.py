"""The file in which processes of one machine write down who uses which GPU: `<index> <pid>` a line.

The file and its lock are those of Flink's own discovery script, so that both can share it: an exclusive flock(2)
on the file itself, whose readers look at the first two words of a line. Behind the pid we add a tab and what
tells a process from a later one of the same number (`start=…,pidns=…,boot=…`); a tab, because Flink's script
deletes lines by patterns that end in a blank. The file is only ever written in place: replacing it would leave
the others locking a file that nobody sees.

Not used by the manager, whose ledger is the coordination. Standard library only, and quick to import.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

MAX_FILE_BYTES = 1024 * 1024
"""A line for each device takes about a hundred bytes; anything of this size is some other file."""

LOCK_SECONDS = 8.0
"""How long to wait for the lock: less than the 10 s that Flink gives a discovery script."""

_LOCK_POLL_SECONDS = 0.01
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class CoordinationError(Exception):
    """Devices cannot be had, or the file cannot be used; nothing has been changed."""


class Owner(NamedTuple):
    """A process that holds devices. None is unknown; `pid` 0 is nobody.

    `start`: field 22 of proc(5) `/proc/<pid>/stat`; `pidns`: the inode of the PID namespace in which the number
    counts; `boot`: the machine's boot id; `worker`: `<worker>/<incarnation>` where one process holds for several.
    """

    pid: int
    start: str | None = None
    pidns: str | None = None
    boot: str | None = None
    worker: str | None = None

    def is_same(self, other: Owner) -> bool:
        """Whether both are one process and one worker, as far as is known of either."""
        known = zip(self[1:4], other[1:4], strict=True)
        return (
            self.pid == other.pid != 0
            and self.worker == other.worker
            and all(mine == theirs or mine is None or theirs is None for mine, theirs in known)
        )


def caller(environ: Mapping[str, str]) -> Owner:
    """On whose behalf this process asks: `OUTFITTER_OWNER_PID`, else its parent; and `OUTFITTER_WORKER`, if any.

    Raises:
        CoordinationError: nobody who could be written down, or a variable is malformed.
    """
    written = environ.get("OUTFITTER_OWNER_PID", "")
    if written and not (written.isascii() and written.isdigit() and 0 < int(written[:12]) < 2**31):
        raise CoordinationError(f"OUTFITTER_OWNER_PID is {written[:40]!r}; valid is a process id")
    pid = int(written) if written else os.getppid()
    if pid == 0:
        raise CoordinationError("the caller is in another PID namespace; name an owner here by OUTFITTER_OWNER_PID")
    worker = "/".join(filter(None, (environ.get("OUTFITTER_WORKER"), environ.get("OUTFITTER_INCARNATION"))))
    if not _NAME_CHARACTERS.issuperset(worker.replace("/", "")):
        raise CoordinationError(f"OUTFITTER_WORKER or OUTFITTER_INCARNATION is no name: {worker[:80]!r}")
    return Owner(pid, _start_of(pid), _own_pid_namespace(), _boot_id(), worker or None)


def lives(owner: Owner) -> bool:
    """Whether a process still runs, as seen from here; who cannot be seen from here counts as living."""
    boot, namespace = _boot_id(), _own_pid_namespace()
    if owner.boot and boot and owner.boot != boot:
        return False
    if owner.pidns and namespace and owner.pidns != namespace:
        return True
    if not 0 < owner.pid < 2**31 or not _exists(owner.pid):
        return False
    start = _start_of(owner.pid)
    return owner.start is None or start is None or owner.start == start


def occupy(path: str, indexes: Sequence[str], amount: int, owner: Owner) -> list[str]:
    """Write down `amount` of the devices as the owner's: first those it has, then free ones, then dead owners'.

    Raises:
        CoordinationError: too few can be had, or the file cannot be used. The file is as it was.
    """
    if amount > len(indexes):
        raise CoordinationError(f"{amount} devices wanted, but there are {len(indexes)}")
    with _locked(path, create=True) as file:
        before = _read(file, path)
        chosen, after = choose(before, indexes, amount, owner, lives)
        _write(file, path, before, after)
    return chosen


def give_back(path: str, owner: Owner, indexes: Sequence[str] | None = None) -> list[str]:
    """Strike out what the owner holds, or of it only `indexes`; returns what that was. Repeating it changes nothing.

    Raises:
        CoordinationError: the file cannot be used. The file is as it was.
    """
    try:
        with _locked(path, create=False) as file:
            before = _read(file, path)
            kept: list[bytes] = []
            released: list[str] = []
            for line in before.split(b"\n"):
                record = parse(line)
                if record and record[1].is_same(owner) and (indexes is None or record[0] in indexes):
                    released.append(record[0])
                else:
                    kept.append(line)
            _write(file, path, before, b"\n".join(kept))
    except FileNotFoundError:
        return []
    return released


def choose(
    content: bytes, indexes: Sequence[str], amount: int, owner: Owner, is_living: Callable[[Owner], bool]
) -> tuple[list[str], bytes]:
    """Decide which devices the owner gets, and what the file then says; pure.

    Raises:
        CoordinationError: too few can be had.
    """
    lines = [line for line in content.split(b"\n") if line.strip()]
    holders: dict[str, list[Owner]] = {}
    for line in lines:
        if record := parse(line):
            holders.setdefault(record[0], []).append(record[1])
    own: list[str] = []
    free: list[str] = []
    abandoned: list[str] = []
    held: list[str] = []
    for index in dict.fromkeys(indexes):
        known = holders.get(index, [])
        others = [other for other in known if not other.is_same(owner)]
        if living := [other for other in others if is_living(other)]:
            held.append(f"{index} by {living[0].pid}")
        elif len(others) < len(known):
            own.append(index)
        else:
            (abandoned if others else free).append(index)
    chosen = (own + free + abandoned)[:amount]
    if len(chosen) < amount:
        raise CoordinationError(
            f"{amount} devices wanted, but {len(chosen)} of {len(indexes)} can be had; held are {', '.join(held)}"
        )
    taken = [index for index in chosen if index not in own]
    if not taken:
        return chosen, content
    # Whatever else speaks of a device that is taken (a dead owner, a malformed line) would mislead the next reader.
    kept = [line for line in lines if line.split()[0].decode("latin-1") not in taken]
    return chosen, b"".join(line + b"\n" for line in (*kept, *(_line(index, owner) for index in taken)))


def parse(line: bytes) -> tuple[str, Owner] | None:
    """The device index and the owner that a line speaks of, or None if it is no record."""
    words = line.split()
    if len(words) < 2 or not words[1].isdigit():
        return None
    facts: dict[str, str] = {}
    for fact in words[2].split(b",") if len(words) > 2 else ():
        key, _, value = fact.partition(b"=")
        facts[key.decode("latin-1")] = value.decode("latin-1")
    pid = int(words[1]) if len(words[1]) <= 10 else 0
    return words[0].decode("latin-1"), Owner(
        pid, *(facts.get(key) or None for key in ("start", "pidns", "boot", "worker"))
    )


def _line(index: str, owner: Owner) -> bytes:
    facts = ",".join(f"{key}={value}" for key, value in zip(Owner._fields[1:], owner[1:], strict=True) if value)
    return f"{index} {owner.pid}\t{facts}".rstrip("\t").encode("latin-1")


# --- the file -------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: str, *, create: bool) -> Iterator[int]:
    """The file, open and exclusively locked, and still the one that its name leads to."""
    deadline = time.monotonic() + LOCK_SECONDS
    try:
        while True:
            file = _open(path, create=create)
            try:
                _lock(file, path, deadline)
                if _is_current(file, path):
                    yield file
                    return
            finally:
                os.close(file)
            # Somebody replaced the file while we waited: the lock that counts is the new one's.
    except FileNotFoundError:
        if create:
            raise CoordinationError(f"coordination file {path}: its folder does not exist") from None
        raise
    except OSError as error:
        raise CoordinationError(f"coordination file {path}: {error.strerror}") from error


def _open(path: str, *, create: bool) -> int:
    try:
        # Without O_CREAT first: in a sticky folder Linux refuses it for another user's file (fs.protected_regular).
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        if not create:
            raise
        # O_EXCL: what somebody put there in this moment is looked at as what was there before.
        with suppress(FileExistsError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        return _open(path, create=False)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CoordinationError(f"coordination file {path} is a symbolic link, which is not followed") from None
        raise
    try:
        _check(path, os.fstat(file), os.stat(os.path.dirname(path) or "."))  # noqa: PTH116, PTH120  see below
    except BaseException:
        os.close(file)
        raise
    return file


def _check(path: str, found: os.stat_result, folder: os.stat_result) -> None:
    """Refuse what is no file, and in a folder in which everybody may make files, one that a stranger has made: he could
    have us write into something else by another name of it."""
    if not stat.S_ISREG(found.st_mode):
        raise CoordinationError(f"coordination file {path} is not a regular file")
    shared = folder.st_mode & stat.S_IWOTH
    if shared and found.st_nlink != 1:
        raise CoordinationError(f"coordination file {path} has another name elsewhere (a hard link)")
    if shared and found.st_uid not in (0, os.geteuid(), folder.st_uid):
        raise CoordinationError(
            f"coordination file {path} belongs to user {found.st_uid}, in a folder that everybody may write; remove "
            "it, or name a file in a folder of your own by --coordination-file"
        )


def _lock(file: int, path: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                message = f"coordination file {path}: another process has kept its lock for {LOCK_SECONDS:g} s"
                raise CoordinationError(message) from None
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _is_current(file: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _read(file: int, path: str) -> bytes:
    content = b""
    while chunk := os.pread(file, MAX_FILE_BYTES + 1 - len(content), len(content)):
        content += chunk
    if len(content) > MAX_FILE_BYTES:
        raise CoordinationError(f"coordination file {path} has more than {MAX_FILE_BYTES} bytes")
    return content


def _write(file: int, path: str, before: bytes, after: bytes) -> None:
    """Put `after` in the place of `before`; who is killed midway leaves blank lines behind, not half a record."""
    if after == before:
        return
    padded = after.ljust(len(before), b"\n")
    try:
        if os.pwrite(file, padded, 0) != len(padded):
            raise CoordinationError(f"coordination file {path}: no space left")
        os.ftruncate(file, len(after))
    except (OSError, CoordinationError):
        os.pwrite(file, before, 0)
        os.ftruncate(file, len(before))
        raise


# --- processes ------------------------------------------------------------------------------------------


def _exists(pid: int) -> bool:
    """Whether the number is a process that has not ended yet (neither a zombie nor a mere thread)."""
    try:
        os.kill(pid, 0)  # unlike /proc, this tells the truth of other users' processes on a mount with hidepid
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    status = _text(f"/proc/{pid}/status")
    if status is None:
        return True
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    is_zombie = fields.get("State", "").startswith(("Z", "X")) and fields.get("Threads", "1").strip() in ("0", "1")
    return not is_zombie and fields.get("Tgid", str(pid)).strip() == str(pid)


def _start_of(pid: int) -> str | None:
    fields = (_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else None


def _own_pid_namespace() -> str | None:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)  # noqa: PTH116  pathlib costs start-up time here
    except OSError:
        return None


def _boot_id() -> str | None:
    return (_text("/proc/sys/kernel/random/boot_id") or "").strip() or None


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  see above
            return file.read()
    except OSError:
        return None
