"""examples/faststream: a FastStream application has a device of its own as long as it runs."""

from __future__ import annotations

import pytest

from examples.frameworks import KafkaFrameworkContract, PoolContract

pytestmark = pytest.mark.examples


class TestFastStream(KafkaFrameworkContract):
    name = "faststream"
    command = ("faststream", "run", "worker:app")


class TestFastStreamWithWorkers(KafkaFrameworkContract, PoolContract):
    name = "faststream"
    command = ("faststream", "run", "worker:app", "--workers", "2")
