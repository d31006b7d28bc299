"""examples/dask: each worker process has a device of its own."""

from __future__ import annotations

import pytest

from examples.frameworks import PoolContract

pytestmark = pytest.mark.examples


class TestDask(PoolContract):
    name = "dask"
    command = ("python", "worker.py")
