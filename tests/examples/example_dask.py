"""examples/dask: each worker process has a device of its own."""

from __future__ import annotations

from examples.frameworks import PoolContract


class TestDask(PoolContract):
    name = "dask"
    command = ("python", "worker.py")
