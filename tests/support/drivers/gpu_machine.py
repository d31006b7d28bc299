"""A machine with as many GPUs as a test wants: an nvidia-smi of our own, first on PATH."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PROGRAM = Path(sys.executable).with_name("outfitter-gpu-discovery")


def executable(path: Path, script: str) -> Path:
    """A shell script that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def nvidia_smi(folder: Path, output: str, *, exit_code: int = 0, then: str = "") -> Path:
    """An nvidia-smi that prints `output` whatever it is asked, in a folder to put first on PATH."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    answer = folder / "answer"
    answer.write_bytes(output.encode())
    executable(folder / "bin/nvidia-smi", f"cat {shlex.quote(str(answer))}\n{then}\nexit {exit_code}")
    return folder / "bin"


def discovery(
    arguments: list[str], bin_folder: Path | None, *, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the program, its nvidia-smi being the one in `bin_folder`."""
    path = f"{bin_folder}:{os.environ['PATH']}" if bin_folder else os.environ["PATH"]
    return subprocess.Popen(
        [str(PROGRAM), *arguments],
        env={**os.environ, "PATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> tuple[str, int, str]:
    """Standard output, exit code and standard error of a program, once it ended."""
    stdout, stderr = process.communicate(timeout=60)
    return stdout, process.returncode, stderr
