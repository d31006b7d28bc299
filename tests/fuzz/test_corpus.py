"""What fuzzing has found, or begins with, ends as documented: the corpus, and the beginnings of each of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
CUTS = 40


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_corpus_is_read_or_refused_as_documented(path: Path) -> None:
    data, target = path.read_bytes(), TARGETS[path.parent.name]
    for end in range(0, len(data), max(1, len(data) // CUTS)):
        target(data[:end])
    target(data)


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
