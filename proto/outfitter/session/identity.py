"""Names of workers and incarnations: how they are made, and how a worker's programs inherit them.

Nothing is cached, so a forked child gets names of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from outfitter_proto.keys import allocation_key, allocation_names
from outfitter_proto.names import check_name

if TYPE_CHECKING:
    from outfitter_proto.records import Register

MOST_OUTER = 16
"""Most outer allocations that a program is told. So the variable has at most 12 KiB, however deeply workers are nested,
and leaves room for the other arguments of execve(2)."""


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
    program.

    This process may itself be a program of other allocations. The manager finds its programs for those as well.
    """
    own = {
        "OUTFITTER_BUS": bus,
        "OUTFITTER_CLUSTER": cluster,
        "OUTFITTER_HOST": registration.host,
        "OUTFITTER_WORKER": registration.worker,
        "OUTFITTER_INCARNATION": registration.incarnation,
    }
    key = allocation_key(registration.host, registration.worker, registration.incarnation)
    outer = [each for each in dict.fromkeys(_inherited()) if each != key][-MOST_OUTER:]
    return own | {"OUTFITTER_OUTER": " ".join(outer)} if outer else own


def _inherited() -> Iterator[str]:
    """The keys of the allocations in this process's environment, the newest last."""
    keys = os.environ.get("OUTFITTER_OUTER", "").split()
    newest = "/".join(os.environ.get(f"OUTFITTER_{name}", "") for name in ("HOST", "WORKER", "INCARNATION"))
    for key in (*keys, newest):
        with suppress(ValueError):
            for name in allocation_names(key):
                check_name(name, "name")
            yield key
