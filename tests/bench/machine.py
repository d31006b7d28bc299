"""What the machine says while it is measured: CPU that a process has used, load, and what ran it all."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (fields 14 and 15 of proc(5) `stat`)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int | None = None) -> int:
    """The memory that a process (this one by default) has in use now (field 2 of proc(5) `statm`)."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of `values` lie, as measured: none between two is made up."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def has_uvloop() -> bool:
    return find_spec("uvloop") is not None


def build() -> str:
    """How this Python was built. An optimized one is faster, for Outfitter more than for a loop that mostly waits."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    found = [name for name, option in (("PGO", "--enable-optimizations"), ("LTO", "--with-lto")) if option in options]
    return f"built with {' and '.join(found)}" if found else "built without PGO and LTO"


def description() -> dict[str, object]:
    """Enough to compare two results by, or to see that they cannot be compared."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "build": build(),
        "uvloop": has_uvloop(),
        **{name: importlib.metadata.version(name) for name in ("outfitter", "aiokafka", "msgspec")},
    }
