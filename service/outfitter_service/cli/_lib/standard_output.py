"""Standard output: what cannot be written there is an error, of every command and in one place.

The first write that fails raises an error that names standard output, also where the process began with it closed. What
comes after it is dropped: Python flushes its streams once more at its end.
"""

from __future__ import annotations

import io
import os
import sys

from outfitter_service.cli._lib.standard_streams import STDOUT
from outfitter_service.query.errors import OutfitterCliError
from outfitter_service.standard_error import write_some

CLOSED_PIPE = 128 + 13
"""The exit code that shells give a program that SIGPIPE has ended: the reader (`head`, a pager) has closed the pipe."""


def named(error: OSError) -> OSError:
    """The same error, with the name of what could not be written."""
    return OSError(error.errno, error.strerror, "standard output")


class _StandardOutput(io.RawIOBase):
    """What is behind `sys.stdout`. `error`: the first one; nothing more is written after it."""

    def __init__(self, *, closed: bool) -> None:
        self.error: OSError | OutfitterCliError | None = None
        self._closed_at_start = closed

    def check(self) -> None:
        """Raise the error of a standard output that was closed at the start."""
        if self._closed_at_start and self.error is None:
            self.error = OutfitterCliError("standard output is closed: there is nowhere to print")
            raise self.error

    def write(self, data: object) -> int:
        block = bytes(data)  # type: ignore[call-overload]  # a buffer, whose type has no name before Python 3.12
        if not block:
            return 0
        self.check()
        if self.error is not None:
            return len(block)
        try:
            return write_some(STDOUT, block)
        except OSError as error:
            self.error = named(error)
            raise self.error from error

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDOUT

    def isatty(self) -> bool:
        return not self._closed_at_start and os.isatty(STDOUT)


_installed: _StandardOutput | None = None


def install(*, closed: bool) -> None:
    """Replace `sys.stdout`, unless somebody else has replaced it. `closed`: the process began with it closed.
    Descriptor 1 must be open now."""
    global _installed
    if _installed is not None or sys.stdout is not sys.__stdout__:
        return
    encoding = sys.stdout.encoding if sys.stdout is not None else "utf-8"
    _installed = _StandardOutput(closed=closed)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_installed), encoding, "backslashreplace", line_buffering=_installed.isatty()
    )


def check() -> None:
    """For what waits before it prints: raise the error at once if standard output was closed at the start."""
    if _installed is not None:
        _installed.check()


def error() -> OSError | OutfitterCliError | None:
    """The first error of writing, if there was one."""
    return _installed.error if _installed is not None else None
