"""Labels of workers: how people see them, and how they choose by them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Wanted = tuple[tuple[str, str], ...]
"""Names and values of labels that a worker must have, all of them."""


def wanted(texts: Iterable[str]) -> Wanted:
    """The labels in texts such as `team=vision`.

    Raises:
        ValueError: a text has no name, or no `=`.
    """
    found = []
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise ValueError(f"{text!r} is no label: write NAME=VALUE, such as team=vision")
        found.append((name, value))
    return tuple(found)


def has_all(labels: Mapping[str, str], wanted: Wanted) -> bool:
    return all(labels.get(name) == value for name, value in wanted)


def in_words(labels: Mapping[str, str]) -> str:
    """`job=train, team=vision`."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))
