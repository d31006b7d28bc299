"""What is in the wheel and in the sdist, against what the commit has: nothing more, and nothing less."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

NOT_IN_SDIST = (".ci/", "tests/")
OF_THE_WHEEL = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
INDISPENSABLE = {
    "outfitter/py.typed",
    "outfitter_drivers/py.typed",
    "outfitter_proto/py.typed",
    "outfitter_service/py.typed",
    "outfitter_service/api/console/static/index.html",
    "outfitter_service/api/console/static/vendor/LICENSE",
}
"""What the wheel must have, whatever the commit has."""


class UnexpectedContentsError(Exception):
    """An archive lacks a file, or has one too many."""


def check(root: Path, commit: str, wheel: Path, sdist: Path) -> None:
    """Raises:
    UnexpectedContentsError: it names the archive and the files."""
    tracked = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit], cwd=root, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    name, version = wheel.name.split("-")[:2]

    packages = [PurePosixPath(package) for package in settings["wheel"]["packages"]]
    in_packages = {
        str(PurePosixPath(path).relative_to(package.parent))
        for path in tracked
        for package in packages
        if PurePosixPath(path).is_relative_to(package)
    }
    about = {f"{name}-{version}.dist-info/{file}" for file in OF_THE_WHEEL}
    with zipfile.ZipFile(wheel) as archive:
        _compare(wheel.name, archive.namelist(), in_packages | about | INDISPENSABLE)

    sources = {path for path in tracked if not path.startswith(NOT_IN_SDIST)}
    with tarfile.open(sdist) as archive:
        folder = f"{name}-{version}/"
        _compare(sdist.name, (path.removeprefix(folder) for path in archive.getnames()), sources | {"PKG-INFO"})


def _compare(archive: str, names: Iterable[str], expected: set[str]) -> None:
    found = set(names)
    if found != expected:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise UnexpectedContentsError(f"{archive}: missing {missing}, unexpected {unexpected}")
    print(f"{archive}: {len(found)} files, as expected")
