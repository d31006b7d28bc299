"""Opens the standard streams with which a command was started closed, before anything else gets their numbers.

Without it a bus, an event loop or a log file would get descriptor 0, 1 or 2: uvloop aborts, and what is printed would
go into them. What a command starts inherits /dev/null there.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

STDIN, STDOUT, STDERR = range(3)

_closed: set[int] = set()


def open_closed() -> None:
    """Open /dev/null for each standard stream that is closed, for this process and those that it starts."""
    for descriptor in (STDIN, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            _closed.add(descriptor)
            with suppress(OSError):  # without /dev/null, or without a free descriptor, it stays closed
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115 - as long as the process


def was_closed(descriptor: int) -> bool:
    """Whether the process began with this standard stream closed."""
    return descriptor in _closed
