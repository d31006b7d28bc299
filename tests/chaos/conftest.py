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
from support.kafka.broker import NEW, OLD, VERSION_1
from support.kafka.cluster import KafkaCluster, running

VERSIONS = {"3.9": OLD, "4.3": NEW}


@pytest.fixture(scope="session")
def kafka_version() -> str:
    """`KAFKA` of the environment, 3.9 or 4.3."""
    return VERSIONS[os.environ.get("KAFKA", "4.3")]


@pytest.fixture(scope="session")
def kafka_options() -> tuple[str, ...]:
    """Those of brokers. With `TRANSACTIONS=1` of the environment, their transactions are of version 1."""
    return VERSION_1 if os.environ.get("TRANSACTIONS") == "1" else ()


@pytest.fixture(scope="session")
def three_brokers(
    kafka_version: str, kafka_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaCluster]:
    """Three brokers for all tests of this process: leave them whole (`KafkaCluster.settle`)."""
    folder = tmp_path_factory.mktemp("kafka")
    with running(KafkaCluster(folder, kafka=kafka_version, options=kafka_options)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def harmed(
    kafka_version: str, kafka_options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Harmed]:
    """One broker, and the proxy that leads to it."""
    folder = tmp_path_factory.mktemp("kafka")
    with harmed_cluster(folder, nodes=1, kafka=kafka_version, options=kafka_options) as harmed:
        yield harmed


@pytest.fixture
def note(record_property: Any) -> Note:
    """Takes down what a fault came to."""
    return rows.taken_down(record_property, table)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows.summarize(terminalreporter, Row, f"faults, seed {seed()}", table, document, "CHAOS_OUT")
