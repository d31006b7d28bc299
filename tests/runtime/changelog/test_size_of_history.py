"""How large history becomes, as the documentation has it."""

from __future__ import annotations

import re

import pytest

from bench.history import measure
from support.documents import ROOT

FIGURES = re.findall(
    r"^\| ([0-9,]+)[^|]*\| ([0-9,]+) \| ([0-9,]+) \| ([0-9,]+) \|$",
    (ROOT / "tests" / "results.md").read_text().partition("## Size of history")[2],
    re.MULTILINE,
)


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: str(row[0]))
def test_the_page_says_how_many_bytes_a_worker_takes(row: tuple[str, ...]) -> None:
    together, history, steps, commits = (int(cell.replace(",", "")) for cell in row)
    found = measure(64, together)
    taken = sum(size for kind, size in found.items() if not kind.startswith("outfitter."))
    assert taken == pytest.approx(history, rel=0.05)
    assert found["transition"] == pytest.approx(steps, rel=0.05)
    assert found["commit"] == pytest.approx(commits, rel=0.05, abs=5)


def test_the_page_has_a_row_for_each_load() -> None:
    assert [row[0] for row in FIGURES] == ["1", "10", "1,000"]
