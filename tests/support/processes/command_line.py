"""Running `outfitter` as its users do: as a process, in a folder and an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def outfitter(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None, stdin: str | bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line with none of this process's `OUTFITTER_…` variables; at most 60 s."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("OUTFITTER_")}
    done = subprocess.run(
        [sys.executable, "-c", "from outfitter_service.cli import main; main()", *arguments],
        cwd=cwd,
        env=variables | (environment or {}),
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=60,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
