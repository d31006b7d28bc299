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

from outfitter_service.cli._lib import standard_output, standard_streams
from outfitter_service.cli._lib.standard_streams import STDIN, STDOUT
from outfitter_service.query.errors import OutfitterCliError
from outfitter_service.standard_error import write_some

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
    """Writes lines on standard output. Only the newest line waits: it replaces one whose writing has not begun.

    `taken`: whether a line was written. `error`: why no more can be written.
    """

    def __init__(self) -> None:
        self.taken = False
        self.error: OSError | None = None
        self._changed = threading.Condition()
        self._next: bytes | None = None
        self._busy = False
        self._broken: Callable[[], object] = lambda: None
        threading.Thread(target=self._run, name="outfitter-output", daemon=True).start()

    def put(self, line: str) -> None:
        """Write this line as soon as the reader has taken those before. Never blocks."""
        with self._changed:
            self._next = line.encode() + b"\n"
            self._changed.notify_all()

    def finish(self, within: float) -> None:
        """Wait until all is written, at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or (self._next is None and not self._busy), within)

    def call_when_broken(self, broken: Callable[[], object]) -> None:
        """Call `broken` once there is an error, from any thread."""
        with self._changed:
            self._broken = broken
            if self.error is not None:
                broken()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None)
                line, self._next, self._busy = self._next or b"", None, True
            try:
                while line:
                    line = line[write_some(STDOUT, line) :]
            except OSError as error:
                with self._changed:
                    self.error = standard_output.named(error)
                    self._changed.notify_all()
                    self._broken()
                return
            self.taken = True


def watch(input_ended: Callable[[], object], unread: Callable[[], object], *, stdin: bool) -> None:
    """Call one of them from a thread, once: at the end of standard input (if `stdin`), or when nobody reads standard
    output any more."""
    threading.Thread(target=_watch, args=(input_ended, unread, stdin), name="outfitter-input", daemon=True).start()


def _watch(input_ended: Callable[[], object], unread: Callable[[], object], stdin: bool) -> None:
    poller = select.poll()
    poller.register(STDOUT, 0)  # errors and hang-ups only
    if stdin:
        poller.register(STDIN, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poller.poll()]
        if STDIN in ready and not _discard():
            input_ended()
            return
        if STDOUT in ready:
            unread()
            return


def _discard() -> bool:
    """Read what there is on standard input. Returns False at its end."""
    try:
        return bool(os.read(STDIN, _CHUNK))
    except BlockingIOError:  # another process has read it
        return True
    except OSError:
        return False
