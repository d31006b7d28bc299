"""`outfitter` as it is, on a machine whose wall clock is wrong, and whose managers look at their topics often.

A process cannot be given a wall clock of its own by the kernel: time namespaces have offsets for CLOCK_MONOTONIC and
CLOCK_BOOTTIME only, which Linux fixes before the first process enters. So this program replaces what a manager asks
for the time of day: the runtime's clock, and `time.time`, with which its Kafka client dates what it writes. All else,
the monotonic clock first of all, stays the machine's.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

LOOK_S = 3.0
"""Instead of half a minute, which nobody wants to wait for so often. It is long enough to do harm in."""
_AHEAD = "CHAOS_CLOCK"
ADJUSTED = (sys.executable, "-m", "chaos.adjusted")
"""The command line, with `WallClock.variables`."""


class WallClock:
    """How far one manager's wall clock is ahead, in seconds; it may be set while the manager runs."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("d", 0.0))
        self._path = path
        self.variables: Mapping[str, str] = {"PYTHONPATH": str(Path(__file__).parents[1]), _AHEAD: str(path)}

    def set_ahead(self, seconds: float) -> None:
        with self._path.open("r+b") as file:
            file.write(struct.pack("d", seconds))


def main() -> None:
    from outfitter_service.runtime.changelog import topic_layout

    topic_layout.CHECK_S = LOOK_S
    from outfitter_service.cli import main as outfitter
    from outfitter_service.runtime import clock

    with Path(os.environ[_AHEAD]).open("rb") as file:
        shown = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    real_time, real_utc = time.time, clock.SYSTEM.utc

    def ahead() -> float:
        return float(struct.unpack_from("d", shown)[0])

    time.time = lambda: real_time() + ahead()
    clock.SYSTEM.utc = lambda: real_utc() + timedelta(seconds=ahead())  # type: ignore[method-assign]
    outfitter()


if __name__ == "__main__":
    main()
