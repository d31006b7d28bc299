"""The drivers are tested on machines of the tests' own, also where there is a GPU."""

from pathlib import Path

import pytest

from outfitter_drivers.nvidia import driver


@pytest.fixture(autouse=True)
def no_gpu_of_this_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    root: Path = tmp_path_factory.getbasetemp() / "no-gpus"
    root.mkdir(exist_ok=True)
    monkeypatch.setattr(driver, "ROOT", root)
