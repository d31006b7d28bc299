"""The lines of the documentation: as wide as code, so that they can be read beside it and compared line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, ROOT, name_of

WIDEST = 120
"""Columns. A row of a table cannot be broken: each of its cells may have so many."""
UNBREAKABLE = 100
"""Columns of a single word (a record, an address) from which on its line may be wider."""

GUIDED = [document for document in DOCUMENTS if document != ROOT / "CHANGELOG.md"]


def too_wide(text: str) -> Iterator[str]:
    """What is wider than it may be: lines, and cells of tables."""
    for line in text.splitlines():
        parts = re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line]
        for part in (part if len(parts) == 1 else part.strip() for part in parts):
            if len(part) > WIDEST and max(map(len, part.split())) < UNBREAKABLE:
                yield part


@pytest.mark.parametrize("document", GUIDED, ids=name_of)
def test_no_line_is_wider_than_120_columns(document: Path) -> None:
    assert list(too_wide(document.read_text())) == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("word " * 24 + "w", ["word " * 24 + "w"]),
        ("word " * 23 + "word", []),
        ("| a | " + "word " * 25 + "|", [("word " * 25).strip()]),
        ("| a | " + "word " * 20 + "| " + "word " * 20 + "|", []),
        ("echo '" + "x" * 120 + "'", []),
    ],
)
def test_a_line_or_a_cell_that_is_too_wide_would_be_found(text: str, parts: list[str]) -> None:
    assert list(too_wide(text)) == parts
