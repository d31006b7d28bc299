"""The lock that allows one manager per host on a machine, whatever bus and cluster it serves.

There are two locks, because neither is enough alone. The first is an abstract Unix socket. The kernel drops it with its
process, and every process of the network namespace sees it. A machine's services share this namespace. But every user
may bind the socket, and so keep a manager from starting. The second lock is a file in the service's own directory
(`RUNTIME_DIRECTORY` of systemd.exec(5)), if it has one. Then a socket of a user other than root and the manager's own
does not count: the manager warns and starts.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import socket
import stat
import struct
import sys
import threading
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog
from msgspec import Struct

from outfitter_proto.support import manager_lock

log = structlog.get_logger("outfitter.service")

ANSWER_WITHIN_S = 2.0
"""Seconds within which the kernel must list its Unix sockets."""
MOST_HOLDERS = 16
"""How many locks are listed. Every user of the machine may bind such names."""
MOST_OTHERS = 1_000
"""How many other hosts are counted."""

# linux/netlink.h, linux/sock_diag.h, linux/unix_diag.h
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_SHOW_NAME, _SHOW_UID = 0x01, 0x40
_DIAG_NAME, _DIAG_UID = 0, 7
_HEADER, _MESSAGE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBIII"), struct.Struct("=HH")

PREFIX, socket_name = manager_lock.PREFIX, manager_lock.socket_name

ADVICE = (
    ". If that is no manager: give the service a directory of its own (RuntimeDirectory= of systemd.exec(5)), then "
    "nobody else can hold its lock"
)


class ManagerExistsError(RuntimeError):
    """Another manager serves this host on this machine."""


class LockHolder(Struct, frozen=True):
    """The user (`uid`) and the process (`pid`) that hold a lock; None: the kernel does not tell."""

    uid: int | None = None
    pid: int | None = None

    def __str__(self) -> str:
        process = f"process {self.pid}" if self.pid else "a process"
        if self.uid is None:
            return f"{process} that the kernel does not name"
        try:
            return f"{process} of user {pwd.getpwuid(self.uid).pw_name} (uid {self.uid})"
        except KeyError:
            return f"{process} of uid {self.uid}"


@contextmanager
def alone_on_machine(
    host: str, environment: Mapping[str, str] = os.environ, *, managers: Container[int] | None = None
) -> Iterator[None]:
    """A context that holds the machine's lock for `host`. `environment`: names the service's runtime directory.
    `managers`: users that may run managers (default: root and this user).

    Raises:
        ManagerExistsError: another process holds it; the message says which.
    """
    with ExitStack() as held:
        directory = own_directory(environment)
        if directory is not None:
            held.enter_context(_file(directory, host))
        try:
            held.enter_context(_socket(host))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            holder = holder_of(socket_name(host))
            stranger = holder.uid is not None and holder.uid not in (managers or (0, os.geteuid()))
            if directory is None or not stranger:
                advice = ADVICE if stranger else ""
                raise ManagerExistsError(_refusal(host, holder) + advice) from error
            log.warning("a stranger holds the machine's lock, using only the service's own", held_by=str(holder))
        yield


def own_directory(environment: Mapping[str, str]) -> Path | None:
    """The service's runtime directory, if it has one where nobody else can create or lock files."""
    for name in environment.get("RUNTIME_DIRECTORY", "").split(":"):
        if not name:
            continue
        with suppress(OSError):
            status = Path(name).lstat()
            ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if stat.S_ISDIR(status.st_mode) and ours and os.access(name, os.W_OK | os.X_OK):
                return Path(name)
    return None


def holder_of(name: str) -> LockHolder:
    """The holder of the abstract Unix socket `name`: its user by sock_diag(7), its process if /proc shows it."""
    with suppress(OSError, struct.error):
        for inode, uid in _unix_sockets(name.encode()):
            return _holder(name, inode, uid)
    return LockHolder()


def holders() -> dict[str, LockHolder]:
    """Who holds locks on this machine, by the socket's name, as far as the kernel tells; the first `MOST_HOLDERS`."""
    found: dict[str, LockHolder] = {}
    with suppress(OSError, struct.error):
        for name, inode, uid in _all_unix_sockets():
            text = name.decode("utf-8", "replace")
            if name.startswith(PREFIX.encode()) and text not in found and len(found) < MOST_HOLDERS:
                found[text] = _holder(text, inode, uid)
    return found


def others(host: str) -> list[str]:
    """The hosts as which other managers serve this machine, as far as the kernel tells; the first `MOST_OTHERS`."""
    found: set[str] = set()
    with suppress(OSError, struct.error):
        for name, _, _ in _all_unix_sockets():
            text = name.decode("utf-8", "replace")
            if text.startswith(PREFIX) and text != socket_name(host) and len(found) < MOST_OTHERS:
                found.add(text.removeprefix(PREFIX))
    return sorted(found)


def _holder(name: str, inode: int, uid: int | None) -> LockHolder:
    peer = manager_lock.peer_of(name)
    return LockHolder(uid, peer[0] if peer is not None and peer[1] == uid else _process_with(inode))


def _refusal(host: str, holder: LockHolder) -> str:
    return (
        f"another manager on this machine already serves host {host!r} (perhaps on another bus): {holder} holds its "
        "lock; stop it first. Give this one another --host only if the two lend different devices"
    )


@contextmanager
def _socket(host: str) -> Iterator[None]:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as name_plate,
    ):
        lock.bind(socket_name(host))
        try:
            name_plate.bind(socket_name(host))
            name_plate.listen()
        except OSError:  # another process has it, and the refusal names no process
            yield
            return
        answering = threading.Thread(target=_answer, args=(name_plate,), name="outfitter name plate", daemon=True)
        answering.start()
        try:
            yield
        finally:
            name_plate.shutdown(socket.SHUT_RDWR)
            answering.join()


def _answer(name_plate: socket.socket) -> None:
    """Let go of each caller, whom the kernel has told the process: it tells nobody once the queue is full."""
    with suppress(OSError):  # the manager ends, or has no descriptor left
        while True:
            name_plate.accept()[0].close()


@contextmanager
def _file(directory: Path, host: str) -> Iterator[None]:
    path = directory / f"manager-{host if len(host) <= 200 else _digest(host)}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            holder = LockHolder(os.fstat(descriptor).st_uid, int(text) if text.isascii() and text.isdigit() else None)
            raise ManagerExistsError(_refusal(host, holder)) from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _digest(host: str) -> str:
    return hashlib.sha256(host.encode()).hexdigest()


def _unix_sockets(name: bytes) -> Iterator[tuple[int, int | None]]:
    """The Unix sockets of this network namespace that are bound to `name`: inode and owning user.

    Raises:
        OSError: the kernel does not tell.
    """
    return ((inode, uid) for bound, inode, uid in _all_unix_sockets() if bound == name)


def _all_unix_sockets() -> Iterator[tuple[bytes, int, int | None]]:
    """The bound Unix sockets of this network namespace: name, inode and owning user.

    Raises:
        OSError: the kernel does not tell.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(ANSWER_WITHIN_S)
        request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFF_FFFF, 0, _SHOW_NAME | _SHOW_UID, 0, 0)
        netlink.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            answer = netlink.recv(1 << 16)
            at = 0
            while at < len(answer):
                length, kind, _, _, _ = _HEADER.unpack_from(answer, at)
                if kind == _DONE:
                    return
                if kind == _ERROR or length < _HEADER.size:
                    raise OSError(errno.EPROTO, "the kernel does not list Unix sockets")
                attributes = _attributes(answer[at + _HEADER.size + _MESSAGE.size : at + length])
                if (name := attributes.get(_DIAG_NAME)) is not None:
                    uid = attributes.get(_DIAG_UID)
                    inode = _MESSAGE.unpack_from(answer, at + _HEADER.size)[4]
                    yield name, inode, int.from_bytes(uid, sys.byteorder) if uid is not None else None
                at += (length + 3) & ~3


def _attributes(packed: bytes) -> dict[int, bytes]:
    attributes: dict[int, bytes] = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(packed):
        length, kind = _ATTRIBUTE.unpack_from(packed, at)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = packed[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return attributes


def _process_with(inode: int) -> int | None:
    """A process that has this socket open, or None if /proc does not show it to this user."""
    target = f"socket:[{inode}]"
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError), os.scandir(process / "fd") as links:  # one by one: a process may have a million
            for link in links:
                with suppress(FileNotFoundError):  # it is closed by now
                    if os.readlink(link) == target:  # noqa: PTH115 - a path is slower
                        return int(process.name)
    return None
