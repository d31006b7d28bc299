"""The lines and sentences of the documentation.

Lines are as wide as code, so that they can be read beside it and compared line by line. Sentences are short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, name_of, prose

WIDEST = 120
"""Columns. A row of a table cannot be broken: each of its cells may have so many."""
UNBREAKABLE = 100
"""Columns of a single word (a record, an address) from which on its line may be wider."""

MOST_WORDS = 18
"""Words a sentence, on average over a page."""

pages = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def too_wide(text: str) -> Iterator[str]:
    """What is wider than it may be: lines, and cells of tables."""
    for line in text.splitlines():
        parts = re.split(r"(?<!\\)\|", line) if line.startswith("|") else [line]
        for part in (part if len(parts) == 1 else part.strip() for part in parts):
            if len(part) > WIDEST and max(map(len, part.split())) < UNBREAKABLE:
                yield part


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs and list items, without headings and tables. A span of code counts as one word."""
    text = re.sub(r"`[^`\n]+`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    text = re.sub(r"(?m)^(?:[|#].*| {4}.*)$", "", text)
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+", text, flags=re.MULTILINE):
        yield from filter(None, re.split(r"(?<=[.!?])[\")*]*\s+", " ".join(block.split())))


@pages
def test_a_sentence_of_a_page_has_at_most_18_words_on_average(document: Path) -> None:
    words = [len(sentence.split()) for sentence in sentences(prose(document))]
    assert sum(words) / max(1, len(words)) <= MOST_WORDS


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One two.\nThree `four five` six? Seven", ["One two.", "Three code six?", "Seven"]),
        (
            "# Heading\n\nOne [two](three).\n- four\n  five\n- six\n1. seven",
            ["One [two].", "four five", "six", "seven"],
        ),
        ("| a cell |\n\n    a command\n\n", []),
    ],
)
def test_sentences_are_told_apart(text: str, found: list[str]) -> None:
    assert list(sentences(text)) == found


@pages
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
