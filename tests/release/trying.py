"""The wheel where nothing else is: installed, up to the first grant, and each of its programs once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FIRST_GRANT = re.compile(r"has a GPU")
"""In the words of `outfitter demo`."""
CONFIGURATION = """
external-resources = ["gpu"]

[external-resource.gpu]
amount = 1
driver = "files"
param.path = "devices"
"""


class TrialFailedError(Exception):
    """A program of the wheel did not do what it is for."""


def install(wheel: Path, environment: Path, constraints: Path) -> None:
    """Make an environment with the wheel, its extra `service`, and nothing else: no pip either."""
    pinned = environment.with_suffix(".txt")
    lines = constraints.read_text().replace("\\\n", "").splitlines()
    pinned.write_text("".join(line.partition(" ")[0] + "\n" for line in lines if "==" in line))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--constraint", pinned, f"{wheel}[service]"], check=True)


def first_grant(programs: Path, begun: float) -> None:
    """Play the demonstration. Prints how long the first grant took since `begun` (of `time.monotonic`)."""
    demo = [programs / "outfitter", "demo"]
    with subprocess.Popen(demo, stdout=subprocess.PIPE, text=True, env=_environment()) as playing:
        assert playing.stdout is not None
        for line in playing.stdout:
            print(line, end="")
            if FIRST_GRANT.search(line) and begun:
                print(f"    the first grant: {time.monotonic() - begun:.1f} s after the empty environment")
                begun = 0.0
    if playing.returncode or begun:
        raise TrialFailedError(f"outfitter demo ended with {playing.returncode}, or granted nothing")


def each_program(programs: Path, folder: Path) -> None:
    """Each program of the wheel says something sensible, outside the checkout."""
    (folder / "devices").mkdir()
    (folder / "devices" / "a").write_text("model=X1\n")
    (folder / "outfitter.toml").write_text(CONFIGURATION)

    def said(*command: str) -> str:
        return subprocess.run(
            [programs / command[0], *command[1:]],
            cwd=folder, env=_environment(), check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip

    print(said("outfitter", "--version").strip())
    infos = json.loads(said("outfitter", "discover", "gpu", "--config", "outfitter.toml", "--json"))
    if "X1" not in json.dumps(infos):
        raise TrialFailedError(f"outfitter discover found {infos}")
    if not Path(said("outfitter-gpu-discovery", "--path").strip()).is_file():
        raise TrialFailedError("outfitter-gpu-discovery --path names no file")
    said("outfitter-lease", "--help")
    said("outfitter-lease-spark", "--help")


def _environment() -> dict[str, str]:
    """Without variables of another Outfitter or another Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("OUTFITTER_", "PYTHON"))} | {
        "PYTHONUNBUFFERED": "1"
    }
