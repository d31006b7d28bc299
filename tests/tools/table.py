"""Which kind of tests needs which tools, where these lie, and how they come there."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from tools.ways import KUBE, ROOT, Way, buildah, by_hand, debian, definitions, go, installed, npm, release

CACHE = ROOT / ".cache"
EARLIER = "58d3f16c"
"""The commit of the last release."""


class MissingToolError(Exception):
    """A tool is not here. The message says how to get it."""


class Tool(NamedTuple):
    """`folder` of `.cache` is its own; `inside` is what tests use of it. Programs on the PATH serve as well."""

    way: Way
    folder: str = ""
    inside: str = ""
    programs: tuple[str, ...] = ()
    package: str = ""
    """Of Python, by its import; the way is then `make .venv/.tools`."""


def _pinned(*files: str) -> str:
    """Other pins, another folder."""
    return hashlib.sha256(b"".join((KUBE / file).read_bytes() for file in files)).hexdigest()[:8]


_GO = _pinned("go.mod", "go.sum")
_PROMETHEUS = debian("prometheus")


def _built(name: str) -> Tool:
    return Tool(go(name), f"{name}-{_GO}", name)


def _on_path(*names: str, where: str) -> Tool:
    return Tool(by_hand(f"there is no `{names[0]}` on the PATH: {where}"), programs=names)


TOOLS = {
    "asyncapi-parser": Tool(npm("@asyncapi/parser@3.6.3"), "asyncapi-parser-3.6.3", "node_modules"),
    "axe-core": Tool(npm("axe-core@4.14.1"), "axe-core-4.14.1", "node_modules/axe-core"),
    "buildah": Tool(buildah, "buildah", "usr/bin"),
    "chromium": Tool(installed("chromium"), programs=("chromium", "chromium-browser", "google-chrome")),
    "crds": Tool(definitions, f"crds-{_pinned('crds.txt')}"),
    "earlier": Tool(release(EARLIER), f"earlier-{EARLIER}"),
    "etcd": Tool(debian("etcd-server"), "etcd", "usr/bin/etcd"),
    "go": _on_path("go", where="install Go"),
    "java": _on_path("java", where="install Java 17"),
    "kube-apiserver": _built("kube-apiserver"),
    "kubectl": _built("kubectl"),
    "kustomize": _built("kustomize")._replace(programs=("kustomize",)),
    "maven": _on_path("mvn", where="install Maven"),
    "node": _on_path("node", where="install Node.js with npm"),
    "prometheus": Tool(_PROMETHEUS, "prometheus", "usr/bin/prometheus", ("prometheus",)),
    "promtool": Tool(_PROMETHEUS, "prometheus", "usr/bin/promtool", ("promtool",)),
    "python-tools": Tool(by_hand("run `make .venv/.tools`"), package="playwright"),
    "systemd": Tool(debian("systemd", "libsystemd-shared"), "systemd", "usr/bin/systemd-analyze", ("systemd-analyze",)),
}

_KAFKA = ("java", "maven")
KINDS = {
    "asyncapi": ("node", "asyncapi-parser"),
    "chaos": _KAFKA,
    "clusters": _KAFKA,
    "console": ("python-tools", "node", "axe-core", "chromium"),
    "deploy": ("python-tools", "go", "kustomize", "prometheus", "promtool", "systemd"),
    "examples": (*_KAFKA, "go", "node"),
    "image": (*_KAFKA, "python-tools", "buildah", "prometheus"),
    "kube": (*_KAFKA, "go", "kube-apiserver", "kubectl", "kustomize", "etcd", "crds", "prometheus", "promtool"),
    "recover": _KAFKA,
    "upgrade": (*_KAFKA, "earlier"),
    "wild": (*_KAFKA, "go", "node"),
}
"""The kinds of tests that run only if they are asked for, and what they need."""


def tool(name: str) -> Path:
    """Where a tool is: as an environment variable of its name says (AXE_CORE), on the PATH, or in `.cache`.

    Raises:
        MissingToolError: it is nowhere.
    """
    wanted, given = TOOLS[name], os.environ.get(name.upper().replace("-", "_"))
    if given:
        return Path(given).absolute()
    for program in wanted.programs:
        if found := shutil.which(program):
            return Path(found)
    if wanted.package and importlib.util.find_spec(wanted.package):
        return Path()
    if wanted.folder and (found_here := CACHE / wanted.folder / wanted.inside).exists():
        return found_here
    raise MissingToolError(f"there is no {name}: run `PYTHONPATH=tests .venv/bin/python -m tools {name}`")


def fetch(name: str) -> Path:
    """Where a tool is. It is fetched if it is nowhere, whole or not at all."""
    try:
        return tool(name)
    except MissingToolError:
        wanted = TOOLS[name]
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="unfinished-") as unfinished:
        folder = Path(unfinished) / "tool"
        folder.mkdir()
        wanted.way(folder)
        if wanted.folder:
            folder.rename(CACHE / wanted.folder)
    return tool(name)
