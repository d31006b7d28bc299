"""The broker of the crash matrix, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import rows
from support.kafka.broker import QUICK_RETURN, Broker
from wild.report import Row, document, table
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
    return rows.taken_down(record_property, table)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows.summarize(terminalreporter, Row, "crashes", table, document, "WILD_OUT")
