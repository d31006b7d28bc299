"""Who this worker is: its process, as a manager on the same machine can watch it, and its names.

Nothing here is remembered: a forked child asks anew and gets its own answers.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from outfitter_proto.records import Owner

_PROC = Path("/proc")


def process_owner(pid: int | None = None) -> Owner | None:
    """The identity of process `pid` (default: this one), or None where the kernel does not tell (no Linux /proc).

    See `records.Owner` for the fields; they follow proc(5) and pid_namespaces(7).
    """
    process = _PROC / ("self" if pid is None else str(pid))
    try:
        stat = (process / "stat").read_text("utf-8", "replace")
        # The command, field 2, may hold blanks and brackets: count from the last bracket, after which is field 3.
        number, _, rest = stat.partition(" ")
        start_ticks = rest.rpartition(")")[2].split()[19]
        return Owner(
            pid=int(number),
            start_ticks=int(start_ticks),
            pid_ns=(process / "ns" / "pid").stat().st_ino,
            boot_id=(_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip(),
        )
    except (OSError, ValueError, IndexError):
        return None


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
