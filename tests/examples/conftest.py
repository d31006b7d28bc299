"""The manager of the examples in other languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.kafka.broker import KafkaBroker
from support.managers.process import Manager, serving_on


@pytest.fixture(scope="module")
def one_gpu(kafka_broker: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager of a host with one GPU, for the tests of one module: each of them gives it back."""
    folder = tmp_path_factory.mktemp("manager")
    with serving_on(kafka_broker, folder, cluster=kafka_broker.new_cluster()) as manager:
        yield manager
