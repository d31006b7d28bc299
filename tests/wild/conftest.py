"""The broker of the crash matrix, and the table at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from support.kafka.broker import QUICK_RETURN, Broker
from wild.report import PROPERTY, Row, document, table
from wild.scene import Note


@pytest.fixture(scope="session")
def wild_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all cells of this process. The cell that kills it starts it again."""
    broker = Broker(tmp_path_factory.mktemp("kafka"), QUICK_RETURN)
    try:
        broker.start()
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def note(record_property: Any) -> Note:
    """Takes down what a cell came to."""

    def take(row: Row) -> None:
        record_property(PROPERTY, to_builtins(row))
        print(table([row]))

    return take


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    rows = [
        convert(value, Row)
        for report in sorted(reports, key=lambda report: report.start)
        for name, value in report.user_properties
        if name == PROPERTY and report.when == "call"
    ]
    if not rows:
        return
    failed = len(terminalreporter.stats.get("failed", ())) + len(terminalreporter.stats.get("error", ()))
    terminalreporter.section("crashes")
    terminalreporter.write_line(table(rows))
    if out := os.environ.get("WILD_OUT"):
        Path(out).write_text(json.dumps(document(rows, failed=failed), indent=2) + "\n")
