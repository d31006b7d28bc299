"""Processes as the kernel sees them. Who kills one is not told when it is gone: a test waits for that."""

from __future__ import annotations

import os
import select

PATIENCE_S = 30.0


def has_ended(pid: int, *, within: float = 0.0) -> bool:
    """Whether there is no such process within so many seconds, or no more of it than an exit code (pidfd_open(2))."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], within)[0])
    finally:
        os.close(watched)


def wait_until_ended(*pids: int) -> None:
    """Block until none of these runs any more.

    Raises:
        AssertionError: one goes on.
    """
    for pid in pids:
        assert has_ended(pid, within=PATIENCE_S), f"process {pid} still runs"
