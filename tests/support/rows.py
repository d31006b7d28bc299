"""Rows that tests take down, and the table of all of them at the end of a run.

A row travels in the report of its test, since the test may run in another process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import Struct, convert, to_builtins

Row = TypeVar("Row", bound=Struct)


def taken_down(
    record_property: Callable[[str, object], None], table: Callable[[Sequence[Row]], str]
) -> Callable[[Row], None]:
    """What takes down a row of the test that has this `record_property`, and prints it."""

    def take(row: Row) -> None:
        record_property(_property(type(row)), to_builtins(row))
        print(table([row]))

    return take


def summarize(
    reporter: pytest.TerminalReporter,
    kind: type[Row],
    title: str,
    table: Callable[[Sequence[Row]], str],
    document: Callable[..., Mapping[str, Any]],
    out: str,
) -> None:
    """Print the table of a run's rows, in the order of its tests. If the environment variable `out` names a file, write
    the document there, too."""
    reports = [report for outcome in ("passed", "failed") for report in reporter.stats.get(outcome, ())]
    rows = [
        convert(value, kind)
        for report in sorted(reports, key=lambda report: report.start)
        for name, value in report.user_properties
        if name == _property(kind) and report.when == "call"
    ]
    if not rows:
        return
    failed = len(reporter.stats.get("failed", ())) + len(reporter.stats.get("error", ()))
    reporter.section(title)
    reporter.write_line(table(rows))
    if file := os.environ.get(out):
        Path(file).write_text(json.dumps(document(rows, failed=failed), indent=2) + "\n")


def _property(kind: type[Struct]) -> str:
    """The name under which a report carries rows of `kind`. A run has rows of several kinds, each with a table."""
    return f"row of {kind.__module__}"
