"""Names of workers and incarnations: how they are made, and how a worker's programs inherit them.

Nothing is cached, so a forked child gets names of its own.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outfitter_proto.records import Register


def new_incarnation() -> str:
    """A name for one run of a worker: a UUID version 7 (RFC 9562), so that names sort by time.

    The order is for people only: the newest incarnation is the one whose registration has the highest offset.
    """
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big")
    number = number & ~(0xF << 76) | 0x7 << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    digits = f"{number:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def new_worker_name() -> str:
    """A name for a worker without one: the process id, and random digits because a process may have several workers."""
    return f"worker-{os.getpid()}-{os.urandom(3).hex()}"


def variables(bus: str, cluster: str, registration: Register) -> dict[str, str]:
    """The variables by which a program finds the allocation of the worker that starts it, and the manager that
    program."""
    return {
        "OUTFITTER_BUS": bus,
        "OUTFITTER_CLUSTER": cluster,
        "OUTFITTER_HOST": registration.host,
        "OUTFITTER_WORKER": registration.worker,
        "OUTFITTER_INCARNATION": registration.incarnation,
    }
