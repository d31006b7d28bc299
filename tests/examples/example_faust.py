"""examples/faust: a Faust application has a device of its own as long as it runs."""

from __future__ import annotations

from examples.frameworks import KafkaFrameworkContract


class TestFaust(KafkaFrameworkContract):
    name = "faust"
    command = ("faust", "-A", "worker", "worker", "--without-web")
