"""Whatever stands in a file, looking at it ends with problems in words, never with an exception."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outfitter_service.config import inspect

WORDS = ["external-resources", "external-resource.gpu.amount", "outfitter.lease", "[external-resource.gpu]", "gpu"]
YAMLS = ["none", "null", "2", "1e999", "!!int ", "!x ", "&a ", "*a", "<<: ", "? ", "- ", ": ", " = ", "%YAML 1.1\n"]
MARKS = list(": =;-[]{}'\"#%|,?\\\n\t\r\x85\u2028 ")
PIECES = st.sampled_from(WORDS) | st.sampled_from(YAMLS) | st.sampled_from(MARKS)


@pytest.mark.parametrize("name", ["a.yaml", "a.toml", "flink-conf.yaml", "a.conf"])
@given(pieces=st.lists(PIECES, max_size=25))
def test_any_text_is_inspected_to_an_end(name: str, pieces: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text("".join(pieces), encoding="utf-8")
        inspection = inspect(path, {}, {})
    assert inspection.settings is not None or inspection.errors
    assert all(str(problem) for problem in inspection.problems)
