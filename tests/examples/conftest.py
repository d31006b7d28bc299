"""The manager of the examples in other languages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.contract import serving
from support.kafka.broker import KafkaBroker
from support.managers.process import Manager


@pytest.fixture(scope="module")
def one_gpu(kafka_broker: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager of a host with one GPU, for the tests of one module: each of them gives it back."""
    with serving(kafka_broker, tmp_path_factory.mktemp("manager")) as manager:
        yield manager
