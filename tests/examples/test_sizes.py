"""The workers in other languages are short enough to be read at once."""

from __future__ import annotations

import re

import pytest

from support.documents import ROOT

FEWER_THAN = 85
"""Lines of code: blank lines, lines of comment and imports do not count."""

NO_CODE = re.compile(r"\s*(//.*|#.*|/\*\*.*|package \w+|import .*|\"[\w./-]+\")?\s*")


@pytest.mark.parametrize("program", ["java/Worker.java", "go/worker.go", "javascript/worker.mjs", "shell/worker.sh"])
def test_a_worker_has_fewer_than_85_lines_of_code_of_at_most_120_columns(program: str) -> None:
    lines = (ROOT / "examples" / program).read_text().splitlines()
    assert len([line for line in lines if not NO_CODE.fullmatch(line)]) < FEWER_THAN
    assert max(map(len, lines)) <= 120
