"""How the process of a manager looks after its memory: a ledger is many objects that live long and have no cycles
among them, and each commit passes through buffers of a megabyte that live shortly."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

COLLECT_AFTER = (25_000, 2, 20_000)
"""When garbage is collected. With Python's own figures (700, 10, 10) a manager under load spends a sixth of its time
looking through its ledger. The second look is at what three first ones have left, at most 75,000 objects: some 20 ms in
which nobody is answered."""
KEPT_FREE = 64 * 1024 * 1024
"""Bytes of heap that may stay free instead of being given back to the system. By default that is two such buffers'
size, and a manager under load would spend a twelfth of its time on getting back, page by page, what it just gave."""
OF_ITS_OWN = 32 * 1024 * 1024
"""Bytes from which on a buffer is mapped by itself: the most that glibc accepts."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune() -> None:
    """Set all this for the rest of the process's life. What is in memory by now is taken to stay: no collection looks
    at it before the first ledger is restored (restore.py), and then only the rare whole ones do."""
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another libc than glibc has no mallopt(3)
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, OF_ITS_OWN)
            libc.mallopt(_M_TRIM_THRESHOLD, KEPT_FREE)
