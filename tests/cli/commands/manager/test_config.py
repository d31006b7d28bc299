"""`outfitter config check` and `show`, as programs and people see them: config.txt has what they print."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.transcripts import Scene, scenes

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("scene", scenes(Path(__file__).with_name("config.txt")), ids=str)
def test_config(scene: Scene, tmp_path: Path) -> None:
    scene.play(tmp_path)
