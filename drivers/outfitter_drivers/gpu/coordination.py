"""The file in which the processes of one machine record their GPUs: `<index> <pid>` a line.

Flink's own discovery script can share the file. Both take an exclusive flock(2) on it and read the first two words of
a line. After the pid we write a tab and the facts that distinguish a process from a later one with the same number
(`start=…,pidns=…,boot=…`). It is a tab because Flink's script deletes lines by patterns that end in a blank. We write
the file in place. If we replaced it, a waiting process would lock the old file.

The manager does not use it, because its ledger coordinates. Standard library only, and quick to import.
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
"""A line per device has about a hundred bytes. A larger file is no coordination file."""

LOCK_SECONDS = 8.0
"""Time limit for the lock: below the 10 s that Flink gives a discovery script."""

_LOCK_POLL_SECONDS = 0.01
_MOST_OF_PROC = 1024 * 1024
"""Most characters of a file in /proc: a process may have 65,536 groups, all in its `status`."""
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


class CoordinationError(Exception):
    """There are not enough free devices, or the file cannot be used. Nothing has changed."""


class ScriptOwner(NamedTuple):
    """A process that holds devices. A field is None if it is unknown."""

    pid: int
    """0: no process."""
    start: str | None = None
    """Field 22 of proc(5) `/proc/<pid>/stat`."""
    pidns: str | None = None
    """The inode of the pid's namespace."""
    boot: str | None = None
    """The machine's boot id."""
    worker: str | None = None
    """`<worker>/<incarnation>` if one process holds devices for several workers."""

    def is_same(self, other: ScriptOwner) -> bool:
        """Whether both are the same process and worker, by the fields that both know."""
        pairs = zip(self[1:4], other[1:4], strict=True)
        return (
            self.pid == other.pid != 0
            and self.worker == other.worker
            and all(
                own_value == other_value or own_value is None or other_value is None for own_value, other_value in pairs
            )
        )


def caller(environ: Mapping[str, str]) -> ScriptOwner:
    """The owner for which this process runs: `OUTFITTER_OWNER_PID`, else its parent; with `OUTFITTER_WORKER`, if set.

    Raises:
        CoordinationError: the parent is in another PID namespace, or a variable is malformed.
    """
    written = environ.get("OUTFITTER_OWNER_PID", "")
    if written and not (written.isascii() and written.isdigit() and len(written) <= 10 and 0 < int(written) < 2**31):
        raise CoordinationError(f"OUTFITTER_OWNER_PID is {written[:40]!r}; valid is a process id")
    pid = int(written) if written else os.getppid()
    if pid == 0:
        raise CoordinationError("the caller is in another PID namespace; name an owner here by OUTFITTER_OWNER_PID")
    worker = "/".join(filter(None, (environ.get("OUTFITTER_WORKER"), environ.get("OUTFITTER_INCARNATION"))))
    if not _NAME_CHARACTERS.issuperset(worker.replace("/", "")):
        raise CoordinationError(f"OUTFITTER_WORKER or OUTFITTER_INCARNATION is no name: {worker[:80]!r}")
    return ScriptOwner(pid, _start_of(pid), _own_pid_namespace(), _boot_id(), worker or None)


def lives(owner: ScriptOwner) -> bool:
    """Whether a process still runs. A process that is not visible from here counts as living."""
    boot, namespace = _boot_id(), _own_pid_namespace()
    if owner.boot and boot and owner.boot != boot:
        return False
    if owner.pidns and namespace and owner.pidns != namespace:
        return True
    if not 0 < owner.pid < 2**31 or not _exists(owner.pid):
        return False
    start = _start_of(owner.pid)
    return owner.start is None or start is None or owner.start == start


def occupy(path: str, indexes: Sequence[str], amount: int, owner: ScriptOwner) -> list[str]:
    """Record `amount` of the devices `indexes` for the owner: first its own, then free ones, then those of dead owners.

    Raises:
        CoordinationError: too few devices, or the file cannot be used. The file is unchanged.
    """
    if amount > len(indexes):
        raise CoordinationError(f"{amount} devices wanted, but there are {len(indexes)}")
    with _locked(path, create=True) as file:
        before = _read(file, path)
        chosen, after = choose(before, indexes, amount, owner, lives)
        _write(file, path, before, after)
    return chosen


def give_back(path: str, owner: ScriptOwner, indexes: Sequence[str] | None = None) -> list[str]:
    """Delete the owner's lines, or only those of `indexes`; returns the freed devices. Idempotent.

    Raises:
        CoordinationError: the file cannot be used. It is unchanged.
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
    content: bytes, indexes: Sequence[str], amount: int, owner: ScriptOwner, is_living: Callable[[ScriptOwner], bool]
) -> tuple[list[str], bytes]:
    """Decide which devices the owner gets, and the file's new text. Pure.

    Raises:
        CoordinationError: too few devices.
    """
    lines = [line for line in content.split(b"\n") if line.strip()]
    holders: dict[str, list[ScriptOwner]] = {}
    for line in lines:
        if record := parse(line):
            holders.setdefault(record[0], []).append(record[1])
    own: list[str] = []
    free: list[str] = []
    abandoned: list[str] = []
    held: list[str] = []
    for index in dict.fromkeys(indexes):
        recorded = holders.get(index, [])
        others = [other for other in recorded if not other.is_same(owner)]
        if living := [other for other in others if is_living(other)]:
            held.append(f"{index} by {living[0].pid}")
        elif len(others) < len(recorded):
            own.append(index)
        else:
            (abandoned if others else free).append(index)
    chosen = (own + free + abandoned)[:amount]
    if len(chosen) < amount:
        raise CoordinationError(
            f"{amount} devices wanted, but {len(chosen)} of {len(indexes)} are free; held are {', '.join(held)}"
        )
    newly_taken = [index for index in chosen if index not in own]
    if not newly_taken:
        return chosen, content
    # Drop all other lines about these devices (of dead owners, malformed ones): they would mislead the next reader.
    kept = [line for line in lines if line.split()[0].decode("latin-1") not in newly_taken]
    return chosen, b"".join(line + b"\n" for line in (*kept, *(_line(index, owner) for index in newly_taken)))


def parse(line: bytes) -> tuple[str, ScriptOwner] | None:
    """The device index and the owner in a line; None if the line is no record."""
    words = line.split()
    if len(words) < 2 or not words[1].isdigit():
        return None
    facts: dict[str, str] = {}
    for fact in words[2].split(b",") if len(words) > 2 else ():
        key, _, value = fact.partition(b"=")
        facts[key.decode("latin-1")] = value.decode("latin-1")
    pid = int(words[1]) if len(words[1]) <= 10 else 0
    return words[0].decode("latin-1"), ScriptOwner(
        pid, *(facts.get(key) or None for key in ("start", "pidns", "boot", "worker"))
    )


def _line(index: str, owner: ScriptOwner) -> bytes:
    facts = ",".join(f"{key}={value}" for key, value in zip(ScriptOwner._fields[1:], owner[1:], strict=True) if value)
    return f"{index} {owner.pid}\t{facts}".rstrip("\t").encode("latin-1")


# --- the file -------------------------------------------------------------------------------------------


@contextmanager
def _locked(path: str, *, create: bool) -> Iterator[int]:
    """Open the file at the path and lock it exclusively. Yields its descriptor."""
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
            # Another process has replaced the file meanwhile, so lock the new one.
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
        # O_EXCL: if another process creates the file at this moment, check it like an older one.
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


def _check(path: str, status: os.stat_result, folder: os.stat_result) -> None:
    """Refuse anything but a regular file. In a folder that all users may write, also refuse another user's file: by a
    hard link, that user could make us write into something else."""
    if not stat.S_ISREG(status.st_mode):
        raise CoordinationError(f"coordination file {path} is not a regular file")
    shared = folder.st_mode & stat.S_IWOTH
    if shared and status.st_nlink != 1:
        raise CoordinationError(f"coordination file {path} has another name elsewhere (a hard link)")
    if shared and status.st_uid not in (0, os.geteuid(), folder.st_uid):
        raise CoordinationError(
            f"coordination file {path} belongs to user {status.st_uid}, in a folder that everybody may write; remove "
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
    """Replace `before` by `after`. A process killed meanwhile leaves blank lines, not half a record."""
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
    """Whether the number is a running process (neither a zombie nor a thread)."""
    try:
        os.kill(pid, 0)  # unlike /proc, this also sees other users' processes on a mount with hidepid
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
            return file.read(_MOST_OF_PROC)
    except OSError:
        return None
