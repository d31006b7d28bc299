"""The wheel and the sdist of a commit, built twice in different surroundings: the same bytes, or no release."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SURROUNDINGS: tuple[dict[str, Any], ...] = (
    {"umask": 0o022, "env": {"TZ": "UTC", "LC_ALL": "C.UTF-8"}},
    {"umask": 0o077, "env": {"TZ": "Pacific/Auckland", "LC_ALL": "C", "PYTHONHASHSEED": "1"}},
)
"""What must make no difference. The folder differs, too."""


class DifferentBytesError(Exception):
    """Two builds of one commit have different bytes."""


def build(root: Path, work: Path, commit: str) -> tuple[Path, Path]:
    """Build `commit` of the repository at `root` twice below `work`.

    Returns:
        The wheel and the sdist that it was built from, of the first build.

    Raises:
        DifferentBytesError: the second build differs.
        subprocess.CalledProcessError: a build failed; its output has been printed.
    """
    first, second = (
        _build(root, work / f"build-{number}", commit, **surroundings)
        for number, surroundings in enumerate(SURROUNDINGS)
    )
    sums = [{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} for files in (first, second)]
    if sums[0] != sums[1]:
        raise DifferentBytesError(f"two builds of {commit} differ: {sums[0]} and {sums[1]}")
    print(f"two builds of {commit} have the same bytes")
    for name, digest in sums[0].items():
        print(f"    {digest}  {name}")
    (wheel,), (sdist,) = ([path for path in first if path.name.endswith(end)] for end in (".whl", ".tar.gz"))
    return wheel, sdist


def _build(root: Path, folder: Path, commit: str, *, umask: int, env: dict[str, str]) -> list[Path]:
    source, out = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=root, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x"], cwd=source, input=archive, check=True, umask=umask)
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct", commit], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()
    built = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        env={**os.environ, **env, "SOURCE_DATE_EPOCH": epoch},
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        print(built.stdout, built.stderr, sep="\n")
        built.check_returncode()
    return sorted(out.iterdir())
