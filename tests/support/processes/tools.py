"""Other languages' tools, and what they print."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

BUILT_WITHIN_S = 500.0
"""Seconds for one command, downloads included."""


def run_tool(command: Sequence[str], folder: Path) -> str:
    """Run a tool of a language in `folder`; return what it printed."""
    needs(command[0])
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=BUILT_WITHIN_S,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}", pytrace=False)
    return done.stdout


def needs(*tools: str) -> None:
    """Fail if one of the programs `tools` is missing."""
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.fail(f"this example needs `{tool}`, and it is not on PATH", pytrace=False)
