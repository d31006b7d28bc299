"""The brokers of the chaos tests, and the table at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from chaos.harm import Harmed, harmed_cluster
from chaos.report import PROPERTY, Row, document, seed, table
from chaos.scene import Note
from support.kafka.cluster import NEW, OLD, KafkaCluster, running

VERSIONS = {"3.9": OLD, "4.3": NEW}


@pytest.fixture(scope="session")
def kafka_version() -> str:
    """`KAFKA` of the environment, 3.9 or 4.3."""
    return VERSIONS[os.environ.get("KAFKA", "4.3")]


@pytest.fixture(scope="session")
def three_brokers(kafka_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three brokers for all tests of this process: leave them whole (`KafkaCluster.settle`)."""
    with running(KafkaCluster(tmp_path_factory.mktemp("kafka"), kafka=kafka_version)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def harmed(kafka_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harmed]:
    """One broker, and the proxy that leads to it."""
    with harmed_cluster(tmp_path_factory.mktemp("kafka"), nodes=1, kafka=kafka_version) as harmed:
        yield harmed


@pytest.fixture
def note(record_property: Any) -> Note:
    """Takes down what a fault came to."""

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
    terminalreporter.section(f"faults, seed {seed()}")
    terminalreporter.write_line(table(rows))
    if out := os.environ.get("CHAOS_OUT"):
        Path(out).write_text(json.dumps(document(rows, failed=failed), indent=2) + "\n")
