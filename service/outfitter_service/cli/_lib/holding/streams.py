"""The standard streams of `outfitter hold`: lines for its parent, and how the parent ends it.

Threads read and write them, so that a parent that does not read stops no heartbeat. The streams may be shared with
other processes, so nothing changes their blocking mode.
"""

from __future__ import annotations

import os
import select
import stat
import threading
from collections.abc import Callable

from outfitter_service.cli._lib import standard_streams
from outfitter_service.cli._lib.standard_streams import STDIN, STDOUT
from outfitter_service.query.errors import OutfitterCliError
from outfitter_service.standard_error import write_all

_CHUNK = 65_536


def check(*, reads_stdin: bool) -> bool:
    """Check the standard streams before anything else is opened. Returns whether standard input can tell the end.

    A terminal's input cannot: a background process must not read it. A signal ends the command there.

    Raises:
        OutfitterCliError: there is no standard output, or standard input has ended already.
    """
    if _mode(STDOUT) is None:
        raise OutfitterCliError("standard output is closed: there is nowhere to print the allocation")
    mode = _mode(STDIN)
    has_end = mode is not None and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))
    if reads_stdin and not has_end and not (mode is not None and os.isatty(STDIN)):
        what = "closed" if mode is None else "no pipe, socket or terminal"
        raise OutfitterCliError(
            f"standard input is {what}, so its end cannot say that the devices are given back: "
            "pass the read end of a pipe, or --no-stdin"
        )
    return reads_stdin and has_end


def _mode(descriptor: int) -> int | None:
    """The mode of what it is; None if it was closed at the start, although /dev/null is there now."""
    if standard_streams.was_closed(descriptor):
        return None
    try:
        return os.fstat(descriptor).st_mode
    except OSError:
        return None


class LineWriter:
    """Writes lines on standard output. Only the newest line waits: it replaces one whose writing has not begun."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: bytes | None = None
        self._busy = False
        self._broken = False
        threading.Thread(target=self._run, name="outfitter-output", daemon=True).start()

    def put(self, line: str) -> None:
        """Write this line as soon as the reader has taken those before. Never blocks."""
        with self._changed:
            self._next = line.encode() + b"\n"
            self._changed.notify_all()

    def finish(self, within: float) -> None:
        """Wait until all is written, at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._broken or (self._next is None and not self._busy), within)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None)
                line, self._next, self._busy = self._next or b"", None, True
            if write_all(STDOUT, line) < len(line):  # nobody reads; `watch` reports it
                with self._changed:
                    self._broken = True
                    self._changed.notify_all()
                return


def watch(ended: Callable[[], object], *, stdin: bool) -> None:
    """Call `ended` from a thread, once: at the end of standard input (if `stdin`), or when nobody reads standard output
    any more."""
    threading.Thread(target=_watch, args=(ended, stdin), name="outfitter-input", daemon=True).start()


def _watch(ended: Callable[[], object], stdin: bool) -> None:
    poller = select.poll()
    poller.register(STDOUT, 0)  # errors and hang-ups only
    if stdin:
        poller.register(STDIN, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if STDOUT in ready or (STDIN in ready and not _discard()):
            ended()
            return


def _discard() -> bool:
    """Read what there is on standard input. Returns False at its end."""
    try:
        return bool(os.read(STDIN, _CHUNK))
    except BlockingIOError:  # another process has read it
        return True
    except OSError:
        return False
