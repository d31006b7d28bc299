"""What systemd says of its units: that they are right, and how exposed they are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT
from tools import tool

pytestmark = pytest.mark.deploy

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PROGRAM = "ExecStart=/opt/outfitter/bin/outfitter"


def libraries(program: Path) -> Iterator[str]:
    """Where an unpacked systemd-analyze finds its own library."""
    for found in program.parents[1].glob("lib/*/systemd/libsystemd-shared-*"):
        yield str(found.parent)


def analyze(*arguments: str | Path) -> None:
    program = tool("systemd")
    unpacked = {} if program.is_relative_to("/usr") else {"LD_LIBRARY_PATH": os.pathsep.join(libraries(program))}
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=os.environ | unpacked)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_units_are_right(tmp_path: Path) -> None:
    """In copies whose program exists on every machine."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, "ExecStart=/bin/true"))
    analyze("verify", *sorted(tmp_path.iterdir()))


@pytest.mark.parametrize("name", ["outfitter", "outfitter-api"])
def test_a_unit_is_little_exposed(name: str) -> None:
    unit = ROOT / "deploy" / "systemd" / f"{name}.service"
    analyze("security", "--no-pager", "--offline=yes", "--threshold=30", unit)
