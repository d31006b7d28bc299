"""Ends this process when another one is gone: a process that works for it must not go on with the devices alone.

Nothing in Python can be trusted at that moment. The main thread may hang in a lock, of a logging handler for example.
So a thread of its own waits for the kernel's word (pidfd_open(2)), and then needs neither a lock nor logging.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outfitter.errors import UnwatchableProcessError
from outfitter_proto.records import Owner
from outfitter_proto.support.processes import process_owner, read_at_most, read_stat, start_ticks, unwatchable

if TYPE_CHECKING:
    from outfitter.session.backend import Backend

GRACE_S = 2.0
"""Seconds in which this process may end by itself after the other one is gone."""

EXIT_CODE = 75
"""This process's exit code then: EX_TEMPFAIL of sysexits(3)."""

_NAME_LENGTH = 15
"""Characters of a command's name that the kernel keeps, proc(5) `comm`."""

EndsWith = int | str | Owner
"""The other process: its pid, its command's name, or its identity."""


class OrphanGuard:
    """A `Backend` around another one: from start to stop, this process ends with the process `other`.

    If `other` is this process, there is nothing to do.
    """

    def __init__(self, backend: Backend, other: EndsWith) -> None:
        self.allocation_watch = backend.allocation_watch
        self._backend = backend
        self._other = other
        self._started = False
        self._stopped_fd: int | None = None

    def start(self) -> Future[None]:
        other = identify(self._other)
        if (other.pid, other.start_ticks) != (os.getpid(), start_ticks()):
            process_fd = open_process(other)
            self._stopped_fd = os.eventfd(0, os.EFD_CLOEXEC)
            _start_thread(process_fd, self._stopped_fd, _last_words(other))
        self._started = True
        return self._backend.start()

    def stop(self, reason: str) -> Future[None]:
        if not self._started:
            done: Future[None] = Future()
            done.set_result(None)
            return done
        done = self._backend.stop(reason)
        # Not before: if the session hangs, it is the guard that gets this process ended.
        done.add_done_callback(self._end_guard)
        return done

    def _end_guard(self, _: Future[None]) -> None:
        if self._stopped_fd is not None:
            os.eventfd_write(self._stopped_fd, 1)


def identify(process: EndsWith) -> Owner:
    """The identity of a process. A name means this process or its nearest ancestor with it.

    If this process has started the one of that name, this process is the answer: it is nobody's orphan. So it is with
    PyFlink's local execution, where the functions run in the program that starts the JVM.

    Raises:
        UnwatchableProcessError: there is none.
    """
    if isinstance(process, Owner):
        return process
    identity = _nearest(process) if isinstance(process, str) else process_owner(process)
    if identity is None and isinstance(process, str) and _is_below(process):
        identity = process_owner()
    if identity is None:
        which = f"process {process}" if isinstance(process, int) else f"{process!r} among the parents of this process"
        raise UnwatchableProcessError(f"ends_with={process!r}: there is no {which}, or /proc hides it")
    return identity


def open_process(process: Owner) -> int:
    """A file descriptor of this very process, readable once it has ended.

    Raises:
        UnwatchableProcessError: it is gone, of another machine or namespace, or the kernel cannot watch it.
    """
    own = process_owner()
    if own is None or any(getattr(own, field) != getattr(process, field) for field in ("boot_id", "pid_ns", "time_ns")):
        raise UnwatchableProcessError(
            f"ends_with: process {process.pid} is of another boot, machine or namespace than this one"
        )
    gone = f"ends_with: process {process.pid} is gone already, so this process must not begin"
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise UnwatchableProcessError(gone) from None
    except (AttributeError, OSError) as error:
        raise UnwatchableProcessError(f"ends_with: {unwatchable(process.pid, error)}") from error
    # In this order: from now on the pid is nobody else's, or the process is gone.
    if start_ticks(process.pid) != process.start_ticks:
        os.close(descriptor)
        raise UnwatchableProcessError(gone)
    return descriptor


def _nearest(name: str) -> Owner | None:
    for pid in _ancestry(os.getpid()):
        owner = process_owner(pid)
        if owner is not None and _has_name(pid, name) and start_ticks(pid) == owner.start_ticks:
            return owner
    return None


def _is_below(name: str) -> bool:
    """Whether this process, or one that it has started, has started a process of this name."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return any(_has_name(pid, name) and os.getpid() in _ancestry(pid) for pid in pids)


def _ancestry(pid: int | None) -> Iterator[int]:
    """A process, its parent, and so on to the first one of the namespace."""
    while pid:
        yield pid
        pid = _parent(pid)


def _has_name(pid: int, name: str) -> bool:
    try:
        shown = read_at_most(f"/proc/{pid}/comm", 4096).decode(errors="replace")
        return shown.removesuffix("\n") == name[:_NAME_LENGTH]
    except OSError:
        return False


def _parent(pid: int) -> int | None:
    """Field 4 of proc(5) `/proc/<pid>/stat`; 0 for the first process of a namespace."""
    try:
        return read_stat(pid, 4)
    except (OSError, ValueError):
        return None


def _last_words(other: Owner) -> bytes:
    return (
        f"outfitter: process {other.pid}, with which process {os.getpid()} was to end, is gone: ended after "
        f"{GRACE_S:g} s with code {EXIT_CODE}\n"
    ).encode()


def _start_thread(*args: Any) -> None:
    """Start the thread. gevent's in its place would run only while the main thread yields."""
    if (monkey := sys.modules.get("gevent.monkey")) is None:
        threading.Thread(target=_guard, args=(*args, select.poll), name="orphan guard", daemon=True).start()
    else:
        monkey.get_original("_thread", "start_new_thread")(_guard, (*args, monkey.get_original("select", "poll")))


def _guard(process_fd: int, stopped_fd: int, last_words: bytes, make_poll: Callable[[], select.poll]) -> None:
    """The thread. It makes few objects, because each may start the garbage collector, and with it user code."""
    either, stopped, heard = make_poll(), make_poll(), make_poll()
    either.register(process_fd, select.POLLIN)
    for poll in (either, stopped):
        poll.register(stopped_fd, select.POLLIN)
    heard.register(2, select.POLLOUT)
    either.poll()
    # Either this context was left, or the other process is gone and this one has a little time.
    if stopped.poll(GRACE_S * 1000):
        os.close(process_fd)
        os.close(stopped_fd)
        return
    try:
        if heard.poll(0):  # a full pipe would block
            os.write(2, last_words)
    finally:
        os._exit(EXIT_CODE)
