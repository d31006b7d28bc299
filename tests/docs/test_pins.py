"""The files of constraints have what pyproject.toml asks for: nobody changed the one and forgot `make constraints`."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from support.documents import FOLDERS, ROOT

FILES = {
    "constraints-service.txt": (["service", "nvidia", "uvloop"], ["build"]),
    "constraints.txt": (["service", "uvloop"], ["dev"]),
    "constraints-tools.txt": ([], ["tools"]),
}
"""File → the extras and the groups that it pins."""
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)[^\n]*\\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def pins(file: str) -> dict[str, set[str]]:
    """The versions of each package; more than one where Python's versions need different ones."""
    found: dict[str, set[str]] = {}
    text = (ROOT / file).read_text()
    for name, version, _ in PIN.findall(text):
        found.setdefault(name, set()).add(version)
    assert PIN.sub("", text) == "", f"{file} has nothing but pins with hashes, and no address"
    return found


def asked_for(file: str) -> list[Requirement]:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = FILES[file]
    lines = [line for extra in extras for line in tables["project"]["optional-dependencies"][extra]]
    lines += tables["project"]["dependencies"] if extras else []
    for group in groups:
        for line in tables["dependency-groups"][group]:
            lines += tables["dependency-groups"][line["include-group"]] if isinstance(line, dict) else [line]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("file", FILES)
def test_each_package_is_pinned_within_its_range(file: str) -> None:
    pinned = pins(file)
    for requirement in asked_for(file):
        versions = pinned.get(requirement.name.lower().replace(".", "-"), set())
        assert versions, f"{requirement.name}: run `make constraints`"
        assert all(version in requirement.specifier for version in versions), f"{requirement}: run `make constraints`"


def test_a_package_has_one_version_in_all_files() -> None:
    """All of them go into one environment."""
    of_tests = pins("constraints.txt")
    for file in FILES:
        for name, versions in pins(file).items():
            assert of_tests.get(name, versions) == versions, f"{name} in {file}: run `make constraints`"


def test_these_are_all_files_of_pins() -> None:
    found = [*ROOT.glob("*constraints*.txt")]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*constraints*.txt")]
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(FILES)
