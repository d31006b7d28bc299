"""service/where.md: the script that looks for a free device works as it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.documents import ROOT, blocks
from support.drivers.gpu_machine import executable
from support.managers.process import Manager

[SCRIPT] = [
    block.text for block in blocks(ROOT / "service" / "where.md") if block.language == "sh" and "ssh" in block.text
]


def test_the_script_starts_its_command_on_a_host_with_a_free_device_and_nowhere_else(
    start_manager: Callable[..., Manager], tmp_path: Path
) -> None:
    manager = start_manager(gpus=1)
    programs = tmp_path / "programs"
    programs.mkdir()
    executable(programs / "ssh", 'echo "on $1"; shift; exec "$@"')
    executable(tmp_path / "train.sh", "echo trained with $CUDA_VISIBLE_DEVICES")
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    play = ["bash", "-c", SCRIPT]
    done = subprocess.run(play, env={**manager.environment, "PATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"on {manager.host}\ntrained with GPU-0\n", done.stderr
    manager.outfitter("register", "--resource", "gpu=1", "--worker", "holder", "--lease", "none")
    manager.wait_for_state("holder", "allocated")
    done = subprocess.run(play, env={**manager.environment, "PATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
