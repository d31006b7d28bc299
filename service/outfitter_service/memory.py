"""Tunes Python's garbage collector and glibc's allocator for a manager's process.

A ledger is many objects that live long and have no reference cycles. Each commit uses buffers of a megabyte for a short
time.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

GC_THRESHOLDS = (25_000, 2, 20_000)
"""Thresholds of the garbage collector's three generations. With Python's defaults (700, 10, 10) a manager under load
spends a sixth of its time on traversing its ledger. A collection of the second generation traverses the survivors of
three collections of the first, at most 75,000 objects: some 20 ms in which the manager answers nobody."""
TRIM_THRESHOLD = 64 * 1024 * 1024
"""Bytes of free heap that glibc keeps for the process. By default it keeps twice the size of a commit's buffer. A
manager under load would then spend a twelfth of its time on page faults for memory that it has just returned."""
MMAP_THRESHOLD = 32 * 1024 * 1024
"""Size in bytes from which on a buffer gets a memory mapping of its own: the most that glibc accepts."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune() -> None:
    """Set the thresholds for the rest of the process's life. The objects in memory now are assumed to stay. No
    collection traverses them until the first ledger is restored (restore.py); after that only full collections do."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another libc than glibc has no mallopt(3)
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)
            libc.mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD)
