"""Fixtures that every test may use."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.workermanage import NodeManager

from support.kafka.broker import kafka_broker, old_kafka_broker, own_broker, version_1_broker
from support.kinds import pytest_collection_modifyitems, pytest_ignore_collect, pytest_sessionstart
from support.managers.process import manager, shared_manager, start_manager

__all__ = [
    "anyio_backend",
    "kafka_broker",
    "manager",
    "old_kafka_broker",
    "own_broker",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_sessionstart",
    "shared_manager",
    "start_manager",
    "version_1_broker",
]  # fmt: skip

# a busy machine must not make a test red
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# seconds: a process that is killed sooner leaves its brokers behind
NodeManager.EXIT_TIMEOUT = 120


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio: aiokafka knows nothing else."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """A command that runs in the tests' process sets up the log; what comes after it logs as if it had not run."""
    root, ours = logging.getLogger(), logging.getLogger("outfitter")
    handlers, level, threshold = root.handlers[:], root.level, ours.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(threshold)
