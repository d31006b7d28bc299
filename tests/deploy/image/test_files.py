"""The files of the image and of compose, as their linters read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import ROOT

pytestmark = pytest.mark.image

BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        ["hadolint", "deploy/image/Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "deploy/compose/compose.yaml"],
    ],
    ids=lambda command: command[0],
)
def test_a_linter_finds_nothing(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
