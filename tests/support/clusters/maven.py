"""Jars that Maven builds from the repository, without leaving anything in the checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.processes.tools import run_tool

MAVEN = ("mvn", "--quiet", "--batch-mode")


def package(project: Path, folder: Path) -> Path:
    """Build a copy of `project` below `folder`; return the one jar that comes out of it."""
    copy = folder / project.name
    shutil.copytree(project, copy, ignore=shutil.ignore_patterns("target"))
    run_tool([*MAVEN, "package", "-Dmaven.test.skip=true"], copy)
    (jar,) = (copy / "target").glob("*.jar")
    return jar
