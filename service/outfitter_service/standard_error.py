"""Standard error, for programs that must not stop because nobody takes what they print there.

A line that cannot be written (the reader is gone, the disk is full) is dropped. In the background, a thread writes, so
that a reader that hangs does not stop the event loop. The queue of `logging.handlers` does not do: it ends without a
deadline, and what is printed without logging does not go through it.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable

DESCRIPTOR = 2
LONGEST_QUEUE = 10_000
"""Most lines that wait for the reader. Later ones are dropped until it has taken these."""
FINISH_WITHIN_S = 1.0
"""Seconds in which a process that ends still tries to write what it has printed."""


class BackgroundWriter:
    """Writes lines to a descriptor from a thread of its own. Drops and counts those that find no place.

    `dropped`: how many, since the start.
    """

    def __init__(self, descriptor: int, loss: Callable[[int], str], *, longest: int = LONGEST_QUEUE) -> None:
        """`loss`: the text of the line that says how many lines were dropped. `longest`: most lines that wait.

        Raises:
            RuntimeError: the system starts no more threads.
        """
        self.dropped = 0
        self._descriptor = descriptor
        self._loss = loss
        self._longest = longest
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._writing = False
        self._overflowed = 0  # dropped after those that wait, and not yet told
        self._failed = 0  # dropped before those that wait, and not yet told
        self._torn = False  # the last line was written in part
        threading.Thread(target=self._run, name="outfitter-stderr", daemon=True).start()

    def put(self, line: bytes) -> None:
        """Write this line as soon as the reader has taken those before. Never blocks."""
        with self._changed:
            if len(self._waiting) < self._longest:
                self._waiting.append(line)
                self._changed.notify_all()
            else:
                self.dropped += 1
                self._overflowed += 1

    def finish(self, within: float) -> None:
        """Wait until everything is written or dropped, for at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._writing, within)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                lines, self._writing = [*self._waiting], True
                self._waiting.clear()
                overflowed, self._overflowed = self._overflowed, 0
            self._write(lines, overflowed)

    def _write(self, lines: list[bytes], overflowed: int) -> None:
        """Write lines that so many dropped ones follow."""
        failed, self._failed = self._failed, 0
        before = [b"\n"] * self._torn + [self._loss(failed).encode()] * (failed > 0)
        after = [self._loss(overflowed).encode()] * (overflowed > 0)
        texts = [*before, *lines, *after]
        done = write_all(self._descriptor, b"".join(texts))
        whole = 0
        for text in texts:
            if done < len(text):
                break
            done -= len(text)
            whole += 1
        if whole == len(texts):
            self._torn = False
            return
        self._torn = done > 0 or (self._torn and whole == 0)
        lost = len(lines) - max(whole - len(before), 0)
        self._failed = lost + overflowed + (failed if whole < len(before) else 0)
        with self._changed:
            self.dropped += lost


class _StandardError(io.RawIOBase):
    """What is behind `sys.stderr`: gets each line as a whole, and raises no error."""

    def __init__(self, *, closed: bool) -> None:
        """`closed`: the process began with its standard error closed, so every line is dropped."""
        self._closed_at_start = closed
        self._unwritten = 0
        self._background: BackgroundWriter | None = None

    @property
    def dropped(self) -> int:
        """How many lines were dropped."""
        return self._unwritten + (self._background.dropped if self._background is not None else 0)

    def go_background(self, loss: Callable[[int], str]) -> None:
        if self._background is None and not self._closed_at_start:
            try:
                self._background = BackgroundWriter(DESCRIPTOR, loss)
            except RuntimeError:  # no more threads: the lines are written at once, as before
                return

    def finish(self, within: float) -> None:
        if self._background is not None:
            self._background.finish(within)

    def write(self, data: object) -> int:
        line = bytes(data)  # type: ignore[call-overload]  # a buffer, whose type has no name before Python 3.12
        if not line:
            return 0
        if self._closed_at_start:
            self._unwritten += 1
        elif self._background is not None:
            self._background.put(line)
        elif write_all(DESCRIPTOR, line) < len(line):
            self._unwritten += 1
        return len(line)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return DESCRIPTOR

    def isatty(self) -> bool:
        return os.isatty(DESCRIPTOR)


_installed: _StandardError | None = None


def install(*, closed: bool) -> None:
    """Replace `sys.stderr` by a stream that drops what cannot be written, unless somebody else has replaced it.

    `closed`: the process began with its standard error closed. Descriptor 2 must be open now.
    """
    global _installed
    if _installed is not None or sys.stderr is not sys.__stderr__:
        return
    encoding = sys.stderr.encoding if sys.stderr is not None else "utf-8"
    _installed = _StandardError(closed=closed)
    # without a buffer between, each line is one write, however long
    sys.stderr = io.TextIOWrapper(
        _installed,
        encoding,
        "backslashreplace",
        line_buffering=True,
    )


def go_background(loss: Callable[[int], str] = lambda count: f"outfitter: {count} lines were dropped\n") -> None:
    """Let a thread write from now on. Programs that keep a lease or serve somebody call it before their event loop.

    `loss`: the line, with its end, that says how many lines were dropped.
    """
    if _installed is not None:
        _installed.go_background(loss)


def finish(within: float = FINISH_WITHIN_S) -> None:
    """Wait until everything printed is written or dropped, for at most `within` seconds. Call it before the end."""
    if _installed is not None:
        _installed.finish(within)


def write_if_taken(text: str) -> None:
    """Write lines at once, before a process ends or beside a hanging event loop. They may be dropped."""
    room = select.poll()
    room.register(DESCRIPTOR, select.POLLOUT)
    if room.poll(0):  # a full pipe would block
        write_all(DESCRIPTOR, text.encode("utf-8", "backslashreplace"))


def dropped() -> int:
    """How many lines this process could not write on its standard error."""
    return _installed.dropped if _installed is not None else 0


def write_all(descriptor: int, data: bytes) -> int:
    """Write all. Returns how many bytes were written: less than there are if an error ended it."""
    done = 0
    while done < len(data):
        try:
            done += write_some(descriptor, data[done:] if done else data)
        except OSError:
            break
    return done


def write_some(descriptor: int, data: bytes) -> int:
    """Write once, when there is room. Returns how many bytes were written.

    Raises:
        OSError: nothing can be written there.
    """
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:  # somebody who shares it has set O_NONBLOCK
            poller = select.poll()
            poller.register(descriptor, select.POLLOUT)
            poller.poll()
