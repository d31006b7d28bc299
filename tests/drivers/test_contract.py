"""Every driver of ours keeps the contract that it asks of others."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from outfitter_drivers.api import DriverParams, ExternalResourceDriver
from outfitter_drivers.nvidia.testing import FakeGpu, FakeInstance, FakeMachine
from outfitter_drivers.registry import GROUP, load_factory
from outfitter_drivers.testing import DriverContract
from support.documents import ROOT
from support.drivers.gpu_machine import PROGRAM, executable, nvidia_smi

ROWS = """\
0, GPU-00000000-aaaa, 143771, 00000000:19:00.0, NVIDIA H200
1, GPU-11111111-bbbb, 143771, 00000000:3B:00.0, NVIDIA H200
2, GPU-22222222-cccc, 143771, 00000000:4C:00.0, NVIDIA H200
3, GPU-33333333-dddd, [GPU is lost], 00000000:5D:00.0, NVIDIA H200
"""

COUNTING = 'i=0; out=; [ "$1" -le 4 ] || exit 1; while [ $i -lt "$1" ]; do out="$out$i,"; i=$((i+1)); done; echo "$out"'


class TestStatic(DriverContract):
    amount = 2

    def make_driver(self) -> ExternalResourceDriver:
        params = {"devices": "a;b;c", "device.a.id": "LIC-1", "device.b.env.TOKEN": "x", "device.c.health": "unhealthy"}
        return load_factory("static").create_external_resource_driver(DriverParams(params))


class TestFiles(DriverContract):
    amount = 2

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.params = DriverParams({"path": "devices"}, directory=tmp_path)
        (tmp_path / "devices").mkdir()
        for name, content in (("gpu0", "model=A"), ("gpu1", "id=GPU-1\n"), ("gpu2", "what?"), (".hidden", "?")):
            (tmp_path / "devices" / name).write_text(content)

    def make_driver(self) -> ExternalResourceDriver:
        return load_factory("files").create_external_resource_driver(self.params)


class TestNvidia(DriverContract):
    amount = 3

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", f"{nvidia_smi(tmp_path, ROWS)}:{os.environ['PATH']}")

    def make_driver(self) -> ExternalResourceDriver:
        return load_factory("gpu").create_external_resource_driver(DriverParams({}))


class TestNvml(DriverContract):
    amount = 3

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path) -> None:
        gpus = [FakeGpu(number, lost=15 if number == 3 else 0) for number in range(4)]
        self.fake = FakeMachine(tmp_path, gpus)

    def make_driver(self) -> ExternalResourceDriver:
        return self.fake.driver()


class TestMig(DriverContract):
    amount = 3

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path) -> None:
        instances = [FakeInstance(slot=slot, uuid=f"MIG-{slot}", gpu_instance=slot) for slot in (0, 1)]
        self.fake = FakeMachine(tmp_path, [FakeGpu(0, mig=(1, 1), instances=instances), FakeGpu(1)])

    def make_driver(self) -> ExternalResourceDriver:
        return self.fake.driver()


class TestScript(DriverContract):
    amount = 3

    @pytest.fixture(autouse=True)
    def script(self, tmp_path: Path) -> None:
        self.path = str(executable(tmp_path / "discover.sh", COUNTING))

    def make_driver(self) -> ExternalResourceDriver:
        params = {"discovery-script.path": self.path}
        return load_factory("gpu").create_external_resource_driver(DriverParams(params))


class TestAllocateRelease(DriverContract):
    """With our own program as the script, since it speaks that form too."""

    amount = 2

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bin_folder = nvidia_smi(tmp_path, "0\n1\n2\n3\n")
        monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
        self.file = tmp_path / "assignment"

    def make_driver(self) -> ExternalResourceDriver:
        params = {
            "discovery-script.path": str(PROGRAM),
            "discovery-script.contract": "allocate-release",
            "discovery-script.args": f"--privilege --assign-file '{self.file}'",
        }
        return load_factory("gpu").create_external_resource_driver(DriverParams(params))


def test_every_driver_that_can_be_configured_by_name_is_tried_here() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    assert set(re.findall(r'load_factory\("(\w+)"\)', Path(__file__).read_text())) == named.keys()
