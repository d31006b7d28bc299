"""Calls of `outfitter-lease` for one owner take turns.

They share one registration. Without turns, a call that is ended just after its grant would give back what the other one
has printed.

The lock is flock(2) on `/proc/<pid>/fd` of the owner. The kernel opens that directory for nobody but the owner's user
and root, so no other user can hold it. It ends with the process that holds it, and leaves no file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

POLL_S = 0.02
"""Seconds until a call that waits for its turn tries again."""


@asynccontextmanager
async def turn(owner_pid: int, waits: Callable[[], object]) -> AsyncIterator[None]:
    """Wait until no other call for this owner is under way. One that is stopped (SIGSTOP) is under way. `waits` is
    called once if there is one.

    There are no turns where the kernel does not show the directory. So it is when the owner's main thread has ended
    and this is neither its process nor root's.
    """
    try:
        directory = os.open(f"/proc/{owner_pid}/fd", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield
        return
    try:
        if not _locked(directory):
            waits()
            while not _locked(directory):  # noqa: ASYNC110 - the kernel tells nobody, and another process unlocks
                await anyio.sleep(POLL_S)
        yield
    finally:
        os.close(directory)


def _locked(directory: int) -> bool:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
