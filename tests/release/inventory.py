"""The software bill of materials: what an environment with the wheel and its extra `service` has."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


class IncompleteInventoryError(Exception):
    """The list lacks a package, or has one too many."""


def write(tools: Path, environment: Path, pyproject: Path, version: str, out: Path) -> None:
    """Write the list as CycloneDX. cyclonedx-py validates it against CycloneDX's schema.

    Raises:
        IncompleteInventoryError: it is not what the environment has.
    """
    python = environment / "bin" / "python"
    released = environment / "pyproject.toml"  # cyclonedx-py does not look for a dynamic version
    released.write_text(pyproject.read_text().replace('dynamic = ["version"]', f'version = "{version}"'))
    options = ["--pyproject", released, "--output-reproducible", "--short-PURLs", "--validate"]
    written = ["--spec-version", "1.6", "--output-format", "JSON", "--output-file", out]
    subprocess.run([tools / "cyclonedx-py", "environment", *options, *written, python], check=True)
    bill = json.loads(out.read_text())
    listed = {component["name"].lower() for component in bill["components"]}
    code = "import importlib.metadata as m, json; print(json.dumps([d.name for d in m.distributions()]))"
    printed = subprocess.run([python, "-Ic", code], check=True, capture_output=True, text=True).stdout
    installed = {name.lower() for name in json.loads(printed)}
    product = bill["metadata"]["component"]
    if listed | {product["name"]} != installed or product.get("version") != version:
        raise IncompleteInventoryError(f"{out.name}: {product}, {listed ^ installed}")
    print(f"{out.name}: {len(listed)} packages, valid CycloneDX {bill['specVersion']}")
