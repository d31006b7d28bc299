"""Fixtures that every test may use."""

import pytest

from support.broker import kafka_broker, own_broker

__all__ = ["anyio_backend", "kafka_broker", "own_broker"]


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio: aiokafka knows nothing else."""
    return "asyncio"
