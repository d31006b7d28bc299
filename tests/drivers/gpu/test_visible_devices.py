"""What `CUDA_VISIBLE_DEVICES` has: UUIDs, or indexes for programs that read numbers from it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from outfitter_drivers.api import Device, DriverParams
from outfitter_drivers.gpu.factory import GPUDriverFactory
from outfitter_drivers.gpu.nvidia import NvidiaDriver
from outfitter_drivers.settings import SettingError
from outfitter_proto import environment
from support.drivers.gpu_machine import executable, nvidia_smi
from support.managers.process import StartManager
from support.processes.command_line import outfitter

A = "0, GPU-aaaaaaaa, 81559, 00000000:1A:00.0, NVIDIA H100"
B = "1, GPU-bbbbbbbb, 81559, 00000000:40:00.0, NVIDIA H100"
LOST = (
    "Unable to determine the device handle for GPU1: 0000:40:00.0: GPU is lost. Reboot the system to recover this GPU"
)
CONFIG = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'


async def look(visible: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[Device]:
    """The devices after the last of these answers."""
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    params = {} if visible is None else {"visible-devices": visible}
    driver = GPUDriverFactory().create_external_resource_driver(DriverParams(params))
    assert isinstance(driver, NvidiaDriver)
    for answer in answers:
        nvidia_smi(folder, answer)
        devices = await driver.look()
    return devices


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaaaaaa", "GPU-bbbbbbbb"]),
        ("uuid", ["GPU-aaaaaaaa", "GPU-bbbbbbbb"]),
        ("index", ["0", "1"]),
        (" Index ", ["0", "1"]),
    ],
)
async def test_the_setting_says_what_the_variable_has_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    devices = await look(visible, tmp_path, monkeypatch, f"{A}\n{B}\n")
    assert [device.env for device in devices] == [
        {"CUDA_VISIBLE_DEVICES": value, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for value in expected
    ]
    assert [device.id for device in devices] == ["GPU-aaaaaaaa", "GPU-bbbbbbbb"]
    assert [device.aliases for device in devices] == [("pci:0000:1a:00.0",), ("pci:0000:40:00.0",)]
    assert {str(device.health) for device in devices} == {"healthy"}
    assert environment.unknown({name for device in devices for name in device.env}, ()) == []


@pytest.mark.parametrize(
    "answer",
    [f"{A}\n{LOST}\n", f"{A}\n1, [GPU is lost], [GPU is lost], 00000000:40:00.0, [GPU is lost]\n", f"{A}\n1, ERR!\n"],
)
async def test_while_a_gpu_is_lost_nobody_gets_another_one_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """CUDA counts without it, so the index of another one may mean the next one, which somebody else has."""
    by_uuid = await look("uuid", tmp_path, monkeypatch, f"{A}\n{B}\n", answer)
    assert [str(device.health) for device in by_uuid] == ["healthy", "unhealthy"]
    good, ill = await look("index", tmp_path, monkeypatch, f"{A}\n{B}\n", answer)
    assert (str(good.health), str(ill.health)) == ("unknown", "unhealthy")
    assert "CUDA may count the GPUs without GPU 1" in (good.reason or "")
    again = await look("index", tmp_path, monkeypatch, f"{A}\n{B}\n", answer, f"{A}\n{B}\n")
    assert [str(device.health) for device in again] == ["healthy", "healthy"]


async def test_a_gpu_that_waits_for_its_recovery_has_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, ill = await look("index", tmp_path, monkeypatch, f"{A}, None, Disabled\n{B}, Drain P2P, Disabled\n")
    assert (str(good.health), str(ill.health)) == ("healthy", "unhealthy")


@pytest.mark.parametrize("wrong", ["", "uuids", "indexes", "0,1", "true"])
def test_another_value_is_refused_with_the_valid_ones(wrong: str) -> None:
    with pytest.raises(SettingError, match="valid is uuid or index") as refused:
        GPUDriverFactory().create_external_resource_driver(DriverParams({"visible-devices": wrong}))
    assert refused.value.key == "visible-devices"


@pytest.mark.parametrize("contract", ["", "allocate-release"])
def test_a_scripts_names_are_as_it_prints_them(tmp_path: Path, contract: str) -> None:
    script = executable(tmp_path / "script", "echo 0")
    params = {"discovery-script.path": str(script), "visible-devices": "uuid", "discovery-script.contract": contract}
    with pytest.raises(SettingError, match="for the built-in discovery"):
        GPUDriverFactory().create_external_resource_driver(DriverParams(params))


def test_config_check_says_what_is_valid(tmp_path: Path) -> None:
    (tmp_path / "outfitter.toml").write_text(f'{CONFIG}param.visible-devices = "number"\n')
    done = outfitter("config", "check", "outfitter.toml", cwd=tmp_path)
    assert "external-resource.gpu.param.visible-devices" in done.stdout
    assert "valid is uuid or index" in done.stdout
    assert done.returncode == 1


def test_a_worker_gets_numbers_and_the_order_that_they_are_counted_in(
    start_manager: StartManager, tmp_path: Path
) -> None:
    executable(
        tmp_path / "bin/nvidia-smi",
        f"case \"$*\" in *compute-apps*) exit 0 ;; esac\nprintf '%s\\n' '{A}' '{B}'",
    )
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    manager = start_manager(f'{CONFIG}param.visible-devices = "index"\n', variables={"PATH": path})
    show = 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER"'
    done: subprocess.CompletedProcess[str] = manager.outfitter("run", "--resource", "gpu=2", "--", "sh", "-c", show)
    assert (done.returncode, done.stdout) == (0, "0,1 PCI_BUS_ID\n"), done.stderr
