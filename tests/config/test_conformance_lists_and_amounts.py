"""Every row of the conformance tables of amounts and resource lists, in every way of writing it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outfitter_service.config import inspect
from outfitter_service.core.model import SpecState

TABLES = Path(__file__).parents[1] / "conformance"
AMOUNTS = json.loads((TABLES / "amount.json").read_text())["cases"]
LISTS = json.loads((TABLES / "resource-list.json").read_text())["cases"]
# Neighbours of the rows: (value, what we answer)
MORE_AMOUNTS = [
    ("+2", 2), ("1", 1), ("00", "off"), ("\t2\t", 2), ("-0", "error"), ("9223372036854775808", "error"),
    ("9" * 60, "error"), ("1e3", "error"), ("0x10", "error"), ("1_000", "error"), ("2 3", "error"), ("٢", "error"),
    ("true", "error"), ("1.0", "error"), ("none", "error"), ("2;3", "error"),
]  # fmt: skip
MORE_LISTS = [
    (";gpu", "error"), ("gpu;;", "error"), ("gpu; ;fpga", "error"), ("gpu ;", ["gpu"]), ("none;", "error"),
    ("gpu;none", "error"), (" none ", []), ("NONE", ["NONE"]), ("[]", []), ("[gpu]", ["gpu"]), ("[gpu", "error"),
    ("'gpu';fpga", ["gpu", "fpga"]), ("'gpu;fpga'", "error"), ("\"gpu\"x", "error"), ("gpu fpga", "error"),
    ("-gpu", "error"), ("gpu/0", "error"), ("a" * 253, ["a" * 253]), ("a" * 254, "error"), ("a.b_c-d", ["a.b_c-d"]),
    ("[gpu, none]", "error"), ("gpü", "error"), ("gpu\\nfpga", "error"),
]  # fmt: skip


def yaml_file(values: dict[str, str | None]) -> tuple[str, str]:
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "config.yaml", "\n".join(lines)


def toml_file(values: dict[str, str | None]) -> tuple[str, str]:
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "outfitter.toml", "\n".join(lines)


@pytest.fixture(params=[yaml_file, toml_file], ids=["yaml", "toml"])
def looked(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    def look(values: dict[str, str | None]) -> Any:
        name, text = request.param(values)
        (tmp_path / name).write_text(text)
        return inspect(tmp_path / name, {}, {})

    return look


@pytest.mark.parametrize(
    ("value", "ours"),
    [(case["value"], case["ours"]) for case in AMOUNTS] + MORE_AMOUNTS,
    ids=[case["id"] for case in AMOUNTS] + [repr(row[0][:20]) for row in MORE_AMOUNTS],
)
def test_an_amount_is_answered_as_the_table_says(looked: Any, value: str | None, ours: object) -> None:
    inspection = looked(
        {
            "external-resources": "gpu;other",
            "external-resource.gpu.amount": value,
            "external-resource.other.amount": "1",
        }
    )
    gpu, other = inspection.settings.resources
    assert other.in_effect
    if ours == "error":
        assert gpu.state is SpecState.MISCONFIGURED
        (error,) = inspection.errors
        assert error.key == "external-resource.gpu.amount"
        assert error.found == value
        assert error.key in gpu.reason
    elif ours == "off":
        assert (gpu.state, gpu.amount, inspection.errors) == (SpecState.DISABLED, 0, ())
    else:
        assert (gpu.in_effect, gpu.amount, inspection.errors) == (True, ours, ())


@pytest.mark.parametrize(
    ("value", "ours", "hint"),
    [(case["value"], case["ours"], case.get("hint")) for case in LISTS] + [(*row, None) for row in MORE_LISTS],
    ids=[case["id"] for case in LISTS] + [repr(row[0][:20]) for row in MORE_LISTS],
)
def test_a_list_is_answered_as_the_table_says(looked: Any, value: str | None, ours: object, hint: str | None) -> None:
    amounts = {f"external-resource.{name}.amount": "1" for name in ours} if isinstance(ours, list) else {}
    inspection = looked({"external-resources": value, **amounts})
    errors = [problem for problem in inspection.errors if problem.key == "external-resources"]
    if ours == "error":
        assert errors
        assert all(error.found is not None and error.found in value for error in errors)
        assert hint is None or hint in (errors[0].suggestion or "")
    else:
        assert inspection.errors == ()
        assert {item.name for item in inspection.settings.resources} == set(ours)
