"""Which devices a worker takes by default, in each syntax."""

from __future__ import annotations

import pytest

from config.conftest import Look
from outfitter_proto.clauses import Clauses
from outfitter_proto.records import Condition
from outfitter_service.core.model import SpecState

TOML = """
external-resources = ["gpu"]
[external-resource.gpu]
amount = 1
driver = "static"
"""
FLINK = """
external-resources: gpu
external-resource.gpu.amount: 1
external-resource.gpu.driver-factory.class: static
"""
YAML = """
external-resources: [gpu]
external-resource:
  gpu:
    amount: 1
    driver-factory.class: static
"""
WHERE = (
    ("memory.total_bytes", Condition(min="40Gi", max="80Gi")),
    ("mig.profile", Condition(exists=False)),
    ("model", Condition(is_=("*H100*", "*H200*"), not_="*PCIe*")),
    ("numa_node", Condition(is_="1")),
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "outfitter.toml",
            TOML
            + """
same = ["nvlink.group", "numa_node"]
[external-resource.gpu.where]
"memory.total_bytes" = {min = "40Gi", max = "80Gi"}
model = {is = ["*H100*", "*H200*"], not = "*PCIe*"}
"mig.profile" = {exists = false}
numa_node = 1
""",
        ),
        (
            "flink-conf.yaml",
            FLINK
            + """
external-resource.gpu.same: numa_node;nvlink.group
external-resource.gpu.where.memory.total_bytes.min: 40Gi
external-resource.gpu.where.memory.total_bytes.max: 80Gi
external-resource.gpu.where.model: *H100*;*H200*
external-resource.gpu.where.model.not: *PCIe*
external-resource.gpu.where.mig.profile.exists: false
external-resource.gpu.where.numa_node: 1
""",
        ),
        (
            "config.yaml",
            YAML
            + """
    same: [nvlink.group, numa_node]
    where:
      memory.total_bytes: {min: 40Gi, max: 80Gi}
      model: {is: ["*H100*", "*H200*"], not: "*PCIe*"}
      mig.profile.exists: false
      numa_node: 1
""",
        ),
    ],
)
def test_clauses_mean_the_same_in_each_syntax(look: Look, name: str, text: str) -> None:
    inspection = look(text, name)
    assert [problem for problem in inspection.problems if problem.severity == "error"] == []
    [gpu] = inspection.settings.resources
    assert gpu.clauses == Clauses(where=WHERE, same=("numa_node", "nvlink.group"))


def test_without_clauses_any_device_will_do(look: Look) -> None:
    [gpu] = look(FLINK).settings.resources
    assert not gpu.clauses


@pytest.mark.parametrize(
    ("lines", "key", "problem"),
    [
        (
            "external-resource.gpu.where.m.min: lots",
            "external-resource.gpu.where.m.min",
            "cannot be judged: where.m.min is 'lots', which is no number; write one such as 8, 8.10, 40Gi, 80GB",
        ),
        (
            "external-resource.gpu.where.m.exists: perhaps",
            "external-resource.gpu.where.m.exists",
            "must be true or false",
        ),
        (
            'external-resource.gpu.where.m: ""',
            "external-resource.gpu.where.m",
            "cannot be judged: where.m has a value of 0 characters; write 1 to 256",
        ),
        (
            "external-resource.gpu.same: ;",
            "external-resource.gpu.same",
            "is empty; write a property's name such as nvlink.group, or leave the key out",
        ),
        (
            "external-resource.gpu.same: a;b;c;d;e",
            "external-resource.gpu.same",
            "cannot be judged: same names 5 properties; at most 4 are compared",
        ),
        (
            "external-resource.gpu.same: a\nexternal-resource.gpu.sharing: shared",
            "external-resource.gpu.same",
            "has no meaning where sharing is shared: a worker gets all devices",
        ),
        ("external-resource.gpu.where.: a", "external-resource.gpu.where.", "is a key that nobody reads"),
    ],
)
def test_a_wrong_clause_costs_its_resource_only(look: Look, lines: str, key: str, problem: str) -> None:
    inspection = look(FLINK + lines)
    errors = [(found.key, found.problem) for found in inspection.problems if found.severity == "error"]
    assert errors == [(key, problem)]
    [gpu] = inspection.settings.resources
    assert gpu.state is SpecState.MISCONFIGURED


def test_a_version_without_quotes_is_compared_as_it_is_written(look: Look) -> None:
    [gpu] = look(TOML + "where.driver_version.min = 550.100", "outfitter.toml").settings.resources
    assert gpu.clauses.where == (("driver_version", Condition(min="550.100")),)
