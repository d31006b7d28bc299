"""Fixtures that every test may use."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio: aiokafka knows nothing else."""
    return "asyncio"
