"""The documents that lead through the code: what they name exists."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from support.documents import ROOT, name_of, prose

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
GUIDES = (ARCHITECTURE, ROOT / "CONTRIBUTING.md")

guides = pytest.mark.parametrize("guide", GUIDES, ids=name_of)


def named_paths(text: str) -> list[str]:
    """The inline code that is a path in the repository: it has a folder of ours, a suffix or a test's name."""
    folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir())
    looks_like_a_path = re.compile(rf"(?:{folders})/\S*|[\w./-]+\.(?:py|md|toml|txt|json|yaml)(?:::\S+)?|\S+::\S+|\S+/")
    return [code for code in re.findall(r"`([^`\n]+)`", text) if looks_like_a_path.fullmatch(code)]


def is_there(path: str) -> bool:
    """Whether a path exists, and has the test that is named behind `::`."""
    file, _, test = path.partition("::")
    return (ROOT / file).exists() and (not test or (test.lower().startswith("test") and test in defined(ROOT / file)))


def defined(file: Path) -> set[str]:
    """What a module defines at its top level."""
    body = ast.parse(file.read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    return assigned | {
        node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


@guides
def test_every_path_and_test_that_is_named_exists(guide: Path) -> None:
    paths = named_paths(prose(guide))
    assert len(paths) > 30
    assert [path for path in paths if not is_there(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        "service/outfitter_service/core/nothing.py",
        "servce/README.md",
        "tests/nowhere/",
        "tests/docs/test_architecture.py::test_nothing",
        "tests/docs/test_architecture.py::named_paths",
        "test_nowhere.py::test_nothing",
    ],
)
def test_a_path_or_a_test_that_does_not_exist_would_be_found(path: str) -> None:
    assert [named for named in named_paths(f"see `{path}`, please") if not is_there(named)] == [path]


def test_what_is_no_path_is_left_alone() -> None:
    assert named_paths("`host/worker/incarnation` `/metrics` `make check` `topic/partition/offset` `kafka.…`") == []


def test_the_layers_are_those_that_are_enforced() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = configuration["tool"]["importlinter"]["contracts"]
    orders = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert orders
    text = " ".join(ARCHITECTURE.read_text().split())
    for order in orders:
        line = " → ".join(order)
        assert line in text or line.replace("outfitter_service.", "") in text, line


ROOMS = {
    "bus": "proto/outfitter_proto/bus",
    "drivers": "drivers/outfitter_drivers",
    "wire": "proto/outfitter_proto",
    **{
        room: f"service/outfitter_service/{room}"
        for room in ("api", "cli", "config", "core", "http", "query", "runtime", "webhook")
    },
}
"""Folders of tests/, and the folders of the product that they have the same rooms as."""


@pytest.mark.parametrize("room", ROOMS)
def test_the_tests_have_the_rooms_of_the_product(room: str) -> None:
    folders = {file.parent.relative_to(ROOT / "tests" / room) for file in (ROOT / "tests" / room).rglob("test_*.py")}
    assert folders
    assert [str(folder) for folder in folders if not (ROOT / ROOMS[room] / folder).is_dir()] == []


def test_each_room_of_the_runtime_has_tests() -> None:
    rooms = {file.parent.name for file in (ROOT / ROOMS["runtime"]).glob("*/*.py")}
    assert {room for room in rooms if not list((ROOT / "tests/runtime" / room).glob("test_*.py"))} == set()
