"""`make gpu-check`: the table of what was seen on a machine with NVIDIA's GPUs.

    python -m gpu [--pretend]

It needs no network, no CUDA toolkit and no root. `--pretend` checks the check, on GPUs that do not exist.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from gpu.check import rows
from gpu.machine import Machine, PretendedMachine

WHOLE_S = 300
"""Seconds after which it is ended, whatever hangs."""


def main() -> int:
    signal.alarm(WHOLE_S)
    began = time.monotonic()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        machine = (PretendedMachine if "--pretend" in sys.argv else Machine)(Path(folder))
        print("| stage | | seconds | seen |\n|---|---|---|---|", flush=True)
        for row in rows(machine):
            failed += not row.passed
            verdict = "ok" if row.passed else "FAILED"
            print(f"| {row.stage} | {verdict} | {row.seconds:.1f} | {row.saw} |", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s in all, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
