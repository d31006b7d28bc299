"""Freezing a process of ours (SIGSTOP)."""

from __future__ import annotations

import os
import signal


def freeze(pid: int) -> None:
    """Stop a child process, and return once none of its threads runs. On a busy machine some go on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)
