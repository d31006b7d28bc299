"""`make dist`: build the last commit, compare, check, try it where nothing is installed, list what it brings.

    PYTHONPATH=tests python -m release

Only if all of it is right, the files are in `dist`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from release import building, contents, inventory, trying

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
TOOLS = Path(sys.executable).parent
"""Here are twine and cyclonedx-py."""


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory(prefix="outfitter-release-") as folder:
        work = Path(folder)
        print("building wheel and sdist twice ...", flush=True)
        wheel, sdist = building.build(ROOT, work, commit)
        contents.check(ROOT, commit, wheel, sdist)
        subprocess.run([TOOLS / "twine", "check", "--strict", wheel, sdist], check=True)

        print("installing the wheel into an empty environment, and trying each program ...", flush=True)
        environment = work / "empty"
        begun = time.monotonic()
        trying.install(wheel, environment, ROOT / "constraints-service.txt")
        trying.first_grant(environment / "bin", begun)
        trying.each_program(environment / "bin", work)

        print("listing what it brings ...", flush=True)
        released = sdist.name.removesuffix(".tar.gz")
        bill = work / f"{released}.cdx.json"
        inventory.write(TOOLS, environment, ROOT / "pyproject.toml", released.partition("-")[2], bill)

        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in (wheel, sdist, bill):
            shutil.copy(path, DIST)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument("--commit", default="HEAD", help="what to build; the last commit by default")
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", f"{options.commit}^{{commit}}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    main(commit)
