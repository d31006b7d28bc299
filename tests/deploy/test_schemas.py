"""Kubernetes' own schemas on each overlay, as kustomize renders it. A real API server judges the kinds of others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.kube import MANIFESTS, OVERLAYS, rendered

pytestmark = pytest.mark.deploy

VALIDATE = Path(sys.executable).with_name("kubernetes-validate")


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_each_manifest_is_of_the_schema(version: str, tmp_path: Path) -> None:
    assert OVERLAYS
    for overlay in OVERLAYS:
        (tmp_path / f"{overlay}.yaml").write_text(rendered(overlay))
    files = [*sorted(tmp_path.iterdir()), MANIFESTS / "worker.yaml"]
    options = ["--kubernetes-version", version, "--strict", "--quiet", "--no-warn"]
    done = subprocess.run([VALIDATE, *options, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
