"""The index of error messages in service/troubleshooting.md, against the messages that the product has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from support.documents import ROOT

INDEX = (ROOT / "service" / "troubleshooting.md").read_text().partition("## Index of error messages")[2]
SECTIONS = [section.partition("\n")[0] for section in INDEX.split("\n### ")[1:]]
PRODUCT = ("proto", "drivers", "service")


def messages(section: str) -> list[str]:
    """The messages in the first column of a section's table."""
    rows = section.partition("|---|")[2].partition("\n\n")[0].splitlines()[1:]
    return [row.split("|")[1].strip().strip("`").strip() for row in rows]


MESSAGES = [message for section in INDEX.split("\n### ")[1:] for message in messages(section)]


@cache
def texts() -> frozenset[str]:
    """All texts in the product's code but docstrings, with `…` in place of a value."""
    return frozenset(text for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") for text in texts_in(path))


def texts_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    passed_over = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            passed_over |= {id(part) for part in node.values}
            parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
            yield re.sub("…+", "…", "".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed_over:
            yield node.value


def occurs(message: str) -> bool:
    return any(message in text for text in texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_the_product_has_each_message_of_the_index(message: str) -> None:
    assert len(message) > 8, "too short to be searched for"
    assert occurs(message)


def test_each_section_of_the_index_has_messages() -> None:
    assert SECTIONS
    assert all(messages(section) for section in INDEX.split("\n### ")[1:])


def test_no_message_is_there_twice() -> None:
    assert sorted(set(MESSAGES)) == sorted(MESSAGES)


@pytest.mark.parametrize(
    "message",
    [
        "another manager on this planet already serves host",
        "was written by machine gpu-3",  # a value stands there
        "What is there, and what a manager does to it",
        "That a right is missing, and the command that grants it",  # a docstring
    ],
)
def test_a_message_that_nobody_says_would_be_found(message: str) -> None:
    assert not occurs(message)
