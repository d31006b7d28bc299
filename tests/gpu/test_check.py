"""The check of a machine with GPUs works, as far as that can be told without one."""

from __future__ import annotations

import os
import subprocess
import sys

from support.documents import ROOT


def test_on_pretended_gpus_every_stage_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gpu", "--pretend"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.stdout.count("| ok |") == 7, done.stdout + done.stderr
    assert done.returncode == 0
