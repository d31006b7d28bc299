"""examples/dask: each worker process has a device of its own."""

from __future__ import annotations

from examples.frameworks import FrameworkContract


class TestDask(FrameworkContract):
    name = "dask"
    command = ("python", "worker.py")
    each_is_a_program = False
