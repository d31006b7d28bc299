"""The brokers of the chaos tests, and the table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from chaos.chosen import KAFKA, OPTIONS
from chaos.harm import Harmed, harmed_cluster
from chaos.report import Row, document, seed, table
from chaos.scene import Note
from support import rows
from support.kafka.cluster import KafkaCluster, running


@pytest.fixture(scope="session")
def three_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three brokers for all tests of this process: leave them whole (`KafkaCluster.settle`)."""
    folder = tmp_path_factory.mktemp("kafka")
    with running(KafkaCluster(folder, kafka=KAFKA, options=OPTIONS)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    """One broker, and the proxy that leads to it."""
    folder = tmp_path_factory.mktemp("kafka")
    with harmed_cluster(folder, nodes=1, kafka=KAFKA, options=OPTIONS) as harmed:
        yield harmed


@pytest.fixture
def note(record_property: Any) -> Note:
    """Takes down what a fault came to."""
    return rows.taken_down(record_property, table)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows.summarize(terminalreporter, Row, f"faults, seed {seed()}", table, document, "CHAOS_OUT")
