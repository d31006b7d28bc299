"""examples/asyncio: a consumer in plain asyncio has a device of its own as long as it runs."""

from __future__ import annotations

import pytest

from examples.frameworks import KafkaFrameworkContract

pytestmark = pytest.mark.examples


class TestPlainAsyncio(KafkaFrameworkContract):
    name = "asyncio"
    command = ("python", "worker.py")
