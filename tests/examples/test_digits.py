"""The example in examples/digits does what its README says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outfitter.testing import FakeOutfitter
from support.managers.process import Manager

PATH = Path(__file__).parents[2] / "examples" / "digits" / "digits.py"
ENOUGH = 0.88


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _environment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example puts the allocation's variables into its process's environment, which is the tests' here."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_two_operators_share_one_device(digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOutfitter({"gpu": [{"id": "GPU-a"}]})
    assert digits.main([], context=fake.context) > ENOUGH
    said = capsys.readouterr().out
    assert "operator scale    has GPU-a" in said
    assert "operator classify has GPU-a" in said
    assert "% of them right" in said
    assert [registration.operators for registration in fake.registrations] == [None]


def test_two_operators_have_a_device_each(digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeOutfitter({"gpu": [{"id": "GPU-a"}, {"id": "GPU-b"}]})
    assert digits.main(["--gpus", "2"], context=fake.context) > ENOUGH
    said = capsys.readouterr().out
    assert "operator scale    has GPU-a" in said
    assert "operator classify has GPU-b" in said


def test_it_runs_under_outfitter_run(manager: Manager) -> None:
    shares = ["--resource", "gpu=2", "--operator", "scale:gpu=1", "--operator", "classify:gpu=1"]
    done = manager.outfitter("run", *shares, "--", sys.executable, str(PATH), "--gpus", "2")
    assert done.returncode == 0, done.stderr
    assert "operator scale    has GPU-0" in done.stdout
    assert "operator classify has GPU-1" in done.stdout


def test_it_registers_itself(manager: Manager) -> None:
    done = subprocess.run(
        [sys.executable, str(PATH)], env=manager.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    manager.wait_for(lambda: [record["state"] for record in manager.records()] == ["ended"])
