"""The image that `make image-check` has built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.containers import Image


@pytest.fixture(scope="session")
def image() -> Image:
    """The folder that IMAGE names, as `tests/deploy/image/build` leaves it."""
    folder = os.environ.get("IMAGE")
    if folder is None:
        pytest.fail("IMAGE names no image: run `make image-check`", pytrace=False)
    return Image(Path(folder))
