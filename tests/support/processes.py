"""Processes as the kernel sees them. Who kills one is not told when it is gone: a test waits for that."""

from __future__ import annotations

import time
from pathlib import Path

PATIENCE_S = 30.0


def is_running(pid: int) -> bool:
    """Whether there is such a process that is more than an exit code that nobody has fetched."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_ended(*pids: int) -> None:
    """Block until none of these runs any more.

    Raises:
        AssertionError: some go on.
    """
    deadline = time.monotonic() + PATIENCE_S
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.01)
