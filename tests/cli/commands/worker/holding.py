"""What tests of `outfitter hold` share: its lines, and a parent of its own that a test can kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.managers.process import OUTFITTER, Manager

PARENT = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).pid, flush=True)
sys.stdin.read()
"""
"""Starts the command that is its arguments, prints the command's pid, and lives until its own input ends."""

DYING_PARENT = """
import ctypes, subprocess, sys, threading
hold = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
def obey():
    print(hold.pid, flush=True)
    sys.stdin.readline()
    hold.stdin.close()
    print("closed", flush=True)
    threading.Event().wait()
threading.Thread(target=obey).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""The same, but its main thread has ended. Told anything, it closes the command's input."""


def read_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that it prints. An empty one means that it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else "it has ended"
    found: dict[str, Any] = json.loads(line)
    return found


@contextmanager
def parent_of_hold(
    manager: Manager, *arguments: str, program: str = PARENT
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of `program` that has started `outfitter hold`, and the pid of the latter. Both have one output."""
    command = [sys.executable, "-c", program, *OUTFITTER, "hold", *arguments]
    with subprocess.Popen(
        command, env=manager.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        try:
            yield parent, int(parent.stdout.readline())
        finally:
            parent.kill()
