"""Names that the product had before it took the field's words: none of them comes back as an identifier.

The list has only names that are no ordinary words of Python or of the field. ARCHITECTURE.md says what each is now.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT

PRODUCT = ("proto", "drivers", "service")
NAMES = """
    Adoption Agenda Announcements Attendance Belfry Bell Board Census CommitBuilder CommitOutput Cycle Draft
    Ear HostAnnouncer HostBook InputLoss Intake Notice Outbox Outlook OwnerWatch PendingCommit Portion
    QuotaUse Remit Retelling Roll Scout Settlement Shelf Standing Station Survey Sweep Sweeper SweeperMember
    Telling Told View Work errand hindrance indigestible journal noise offspring rebuilding requesting roster standing
    undecided unnumbered verdicts work_out
"""
FORMER = frozenset(NAMES.split())


def identifiers(tree: ast.AST) -> Iterator[str]:
    """All names that a module defines or uses, letter by letter; `_name` counts as `name`."""
    for node in ast.walk(tree):
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "asname", "arg")]
        if isinstance(node, ast.ImportFrom | ast.alias):
            names += (getattr(node, "module", None) or getattr(node, "name", "")).split(".")
        yield from (name.lstrip("_") for name in names if isinstance(name, str))


def former_names(path: Path) -> set[str]:
    return FORMER & {path.stem, path.parent.name, *identifiers(ast.parse(path.read_text()))}


def test_no_former_name_comes_back_as_an_identifier() -> None:
    paths = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 200
    assert {str(path.relative_to(ROOT)): names for path in paths if (names := former_names(path))} == {}


def test_the_guide_says_what_each_former_name_is_now() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("### Former names")[2].partition("\n## ")[0]
    pairs = [pair for row in section.splitlines() for pair in row.strip("| ").rpartition("|")[2].split(";")]
    explained = {name.strip() for pair in pairs if "→" in pair for name in pair.partition("→")[0].split(",")}
    assert explained >= FORMER


@pytest.mark.parametrize(
    "source",
    [
        "class Bell: ...", "def _errand(): ...", "x.offspring = 1", "from a.journal import b", "import a.verdicts",
        "import a as roster", "f(unnumbered=1)", "def f(standing): ...", "Shelf()", "async def work_out(): ...",
    ],
)  # fmt: skip
def test_a_former_name_would_be_found(source: str) -> None:
    assert FORMER & set(identifiers(ast.parse(source)))


def test_a_longer_name_and_a_text_are_none() -> None:
    assert not FORMER & set(identifiers(ast.parse("class Bells:\n '''Bell'''\n highlight = 'Bell'  # Bell")))
