"""The image, built anew for each run."""

from __future__ import annotations

import subprocess

import pytest

from support.containers import Image
from support.documents import ROOT
from tools import tool


@pytest.fixture(scope="session")
def image() -> Image:
    """What tests/deploy/image/build makes of the Dockerfile."""
    folder = ROOT / ".cache" / "image"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([ROOT / "tests/deploy/image/build", folder, tool("buildah").parent], check=True)
    return Image(folder)
