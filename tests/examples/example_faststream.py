"""examples/faststream: a FastStream application has a device of its own as long as it runs."""

from __future__ import annotations

from examples.frameworks import KafkaFrameworkContract


class TestFastStream(KafkaFrameworkContract):
    name = "faststream"
    command = ("faststream", "run", "worker:app")
