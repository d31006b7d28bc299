"""Names that the product had before it took the field's words: none of them comes back as an identifier.

The list has only names that are no ordinary words of Python or of the field. Whoever reads older
commits finds here what each is now.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import ROOT

PRODUCT = ("proto", "drivers", "service")
NOW: dict[str, str] = dict(
    line.strip().split(" → ", 1)
    for line in """
    Adoption → Tenure
    Agenda → EventQueue
    Announcements → CommitLoop
    Attendance → LivenessTracker
    Belfry → notify
    Bell → Wakeup
    Board → AllocationWatch
    Census → StateGauges
    CommitBuilder → CommitLoop
    CommitOutput → Transaction
    Cycle → CommitLoop
    Draft → DecisionBuilder
    Ear → notify
    errand → run_session
    hindrance → Infeasibility
    HostAnnouncer → CommitLoop
    HostBook → HostState
    indigestible → rejected_offset
    InputLoss → Equipment
    Intake → InputReader
    journal → history_reader
    noise → log_throttle
    Notice → Snapshot
    offspring → follow_ups
    Outbox → BatchingPublisher
    Outlook → LookAheadBuffer
    OwnerWatch → ProcessWatch
    PendingCommit → Commit
    Portion → dissolved
    QuotaUse → Commit
    rebuilding → rebuild
    RecycledError → ReopenError
    Remit → HostScope, PartitionScope
    requesting → registration_options
    Retelling → RebuiltRecords
    Roll → HostRegistry
    roster → membership
    Scout → LookAhead
    seal → begin_commit
    settle → end_commit
    settled → committed
    Settlement → CommitLoop
    Shelf → FreeList
    standing → AllocationStatus
    Standing → HostStatus
    Station → dissolved into its parts
    Survey → ManagerLookup
    Sweep → PartitionSweeper
    Sweeper → SweepingManager
    SweeperMember → SweepingManager
    tainted → must_reopen
    Telling → CommitReporter
    Told → RecordedCommits
    TopicShape → TopicLayout
    undecided → open_transactions
    unnumbered → stale_positions
    verdicts → translation
    View → HostOverlay
    Work → Commit
    work_out → decide_in_full
""".strip().splitlines()
)
"""What each former name is now."""
FORMER = frozenset(NOW)


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
