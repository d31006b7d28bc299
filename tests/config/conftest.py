"""Writing a configuration into a file, and looking at it without the machine's own environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outfitter_service.config import Inspection, inspect

Look = Callable[..., Inspection]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Inspect `text` as a file called `name`, with nothing in the environment but what is given."""

    def look_at(
        text: str | bytes,
        name: str = "config.yaml",
        *,
        overrides: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Inspection:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return inspect(path, overrides or {}, environment or {})

    return look_at
