"""The names that a worker gets where it was given none. Which process it is, processes.py of the wire says.

Nothing here is remembered: a forked child asks anew and gets its own answers.
"""

from __future__ import annotations

import os
import time


def new_incarnation() -> str:
    """A name for one run of a worker: a UUID version 7 (RFC 9562), so that names sort by time of birth.

    The order is for people alone: the newest incarnation is the one whose registration has the highest offset.
    """
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    number = number & ~(0xF << 76) | 0x7 << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def new_worker_name() -> str:
    """A name for a worker that was given none: the process, and something random for its second context."""
    return f"worker-{os.getpid()}-{os.urandom(3).hex()}"
