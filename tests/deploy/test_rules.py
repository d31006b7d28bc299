"""What Prometheus's own tool says of its configuration, its rules and their unit tests."""

from __future__ import annotations

import pytest

from support.prometheus import RULES, promtool

pytestmark = pytest.mark.deploy


def test_prometheus_takes_the_configuration_with_its_rules() -> None:
    assert "1 rule files found" in promtool("check", "config", str(RULES.with_name("prometheus.yml")))


@pytest.mark.parametrize("file", ["rules.test.yml", "normal.test.yml"])
def test_the_rules_fire_when_they_should_and_only_then(file: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name(file)))
