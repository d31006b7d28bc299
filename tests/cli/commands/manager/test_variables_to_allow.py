"""`config check`, `discover` and `doctor` say which variables of devices a worker must allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transcripts import Scene, scenes

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("variables_to_allow.txt")), ids=str)
def test_variables_to_allow(scene: Scene, tmp_path: Path) -> None:
    scene.play(tmp_path)
