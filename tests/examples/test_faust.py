"""examples/faust: a Faust application has a device of its own as long as it runs."""

from __future__ import annotations

import pytest

from examples.frameworks import KafkaFrameworkContract

pytestmark = pytest.mark.examples


class TestFaust(KafkaFrameworkContract):
    name = "faust"
    command = ("faust", "-A", "worker", "worker", "--without-web")
