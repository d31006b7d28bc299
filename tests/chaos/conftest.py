"""The brokers of the chaos tests, and the table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from chaos.harm import Harmed, harmed_cluster
from chaos.report import Row, document, seed, table
from chaos.scene import Note
from support import rows
from support.kafka.broker import NEW, OLD
from support.kafka.cluster import KafkaCluster, running

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
    return rows.taken_down(record_property, table)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows.summarize(terminalreporter, Row, f"faults, seed {seed()}", table, document, "CHAOS_OUT")
