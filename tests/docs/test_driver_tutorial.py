"""drivers/README.md's driver, followed to the letter: each file as it is named there, then the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.documents import ROOT, blocks
from support.managers.process import environment

PAGE = ROOT / "drivers" / "README.md"
FILES = dict(
    re.findall(r"as `~/dongles/([\w.]+)`[^\n]*\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
(COMMANDS,) = [block.text for block in blocks(PAGE) if block.language == "sh" and "pytest" in block.text]


def test_the_driver_is_tested_configured_and_finds_its_devices(tmp_path: Path) -> None:
    assert FILES.keys() == {"dongles.py", "outfitter.toml", "test_dongles.py"}
    folder = tmp_path / "dongles"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", COMMANDS],
        env=environment(HOME=str(tmp_path), PATH=path, NO_COLOR="1"),
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b1[0-9] passed", done.stdout)
    assert "\nok\n" in done.stdout
    assert "ttyUSB1" in done.stdout
