"""What the driver asks nvidia-smi for, where it knows the field: the recovery action, and the mode of MIG."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from outfitter_drivers.api import Device
from outfitter_drivers.gpu import fields
from outfitter_drivers.gpu.nvidia import IN_MIG_MODE, NvidiaDriver
from outfitter_proto.records import Health
from support.drivers.gpu_machine import executable
from support.processes.command_line import outfitter

A, B = "GPU-aaaaaaaa", "GPU-bbbbbbbb"
RECOVERY, MIG = "gpu_recovery_action", "mig.mode.current"


class Smi:
    """An nvidia-smi that knows some fields, and answers in the order of the question, as the real one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values = {
            A: {
                "index": "0",
                "uuid": A,
                "memory.total": "81559",
                "pci.bus_id": "00000000:1A:00.0",
                "name": "H, H",
            },
            B: {"index": "1", "uuid": B, "memory.total": "81559", "pci.bus_id": "00000000:40:00.0", "name": "NVIDIA H"},
        }
        (folder / "asked").touch()

    def install(self, version: str = "", **newer: tuple[str, str]) -> None:
        """`newer`: the two GPUs' values of a newer field. A field without values is not known."""
        told = {name.replace("mig", MIG).replace("recovery", RECOVERY): values for name, values in newer.items()}
        checks = "\n".join(
            f'case ",$q," in *,{field},*) echo \'Field "{field}" is not a valid field to query.\'; exit 2 ;; esac'
            for field in (RECOVERY, MIG)
            if field not in told
        )
        rows: list[str] = []
        for number, gpu in enumerate((A, B)):
            known = {**self.values[gpu], **{field: values[number] for field, values in told.items()}}
            cases = " ".join(f"{field}) v='{value}' ;;" for field, value in known.items())
            rows.append(f'r=""; for f in $(echo $q | tr , " "); do case $f in {cases} esac; r="$r, $v"; done')
            rows.append('echo "${r#, }"')
        script = f'# {version}\necho "$*" >> {self.folder}/asked\nq=${{1#--query-gpu=}}\n{checks}\n' + "\n".join(rows)
        executable(self.folder / "new", script).rename(self.folder / "bin/nvidia-smi")

    def calls(self) -> int:
        return len((self.folder / "asked").read_text().splitlines())


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Smi(tmp_path)


def judged(devices: list[Device]) -> dict[str | None, str]:
    return {device.id: str(device.health) for device in devices}


@pytest.mark.parametrize("action", ["Reset", "Reboot", "Drain P2P", "Drain and Reset", "System Reboot"])
@pytest.mark.parametrize("mig", [{}, {"mig": ("[N/A]", "Disabled")}])
async def test_a_gpu_that_needs_to_be_recovered_is_unhealthy_alone(
    smi: Smi, action: str, mig: dict[str, tuple[str, str]]
) -> None:
    smi.install(recovery=("None", action), **mig)
    good, ill = await NvidiaDriver().look()
    assert judged([good, ill]) == {A: "healthy", B: "unhealthy"}
    assert ill.reason == f"nvidia-smi reports gpu_recovery_action: {action}"
    assert (good.properties["model"], ill.properties["model"]) == ("H, H", "NVIDIA H")


@pytest.mark.parametrize("action", ["None", "N/A", "[N/A]", "[Not Supported]", ""])
async def test_without_an_action_a_gpu_is_healthy(smi: Smi, action: str) -> None:
    smi.install(recovery=("None", action), mig=("Disabled", "[N/A]"))
    assert judged(await NvidiaDriver().look()) == {A: "healthy", B: "healthy"}


@pytest.mark.parametrize("newer", [{}, {"mig": ("[N/A]", "Disabled")}, {"recovery": ("None", "None")}])
async def test_an_old_nvidia_smi_names_its_gpus_in_full_and_is_asked_once_a_look(
    smi: Smi, newer: dict[str, tuple[str, str]]
) -> None:
    smi.install(**newer)
    driver = NvidiaDriver()
    first = await driver.look()
    assert [(device.id, device.properties["pci.bus_id"], device.properties["model"]) for device in first] == [
        (A, "0000:1a:00.0", "H, H"),
        (B, "0000:40:00.0", "NVIDIA H"),
    ]
    before = smi.calls()
    for _ in range(3):
        assert await driver.look() == first
    assert smi.calls() == before + 3


async def test_a_driver_that_is_upgraded_or_goes_back_is_noticed(smi: Smi) -> None:
    smi.install("old")
    driver = NvidiaDriver()
    assert judged(await driver.look()) == {A: "healthy", B: "healthy"}
    smi.install("new", recovery=("Reset", "None"), mig=("[N/A]", "[N/A]"))
    assert judged(await driver.look()) == {A: "unhealthy", B: "healthy"}
    smi.install("old")
    assert judged(await driver.look()) == {A: "healthy", B: "healthy"}


async def test_the_same_nvidia_smi_is_asked_anew_after_a_while(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wrapper stands before the real one, the file does not change."""
    monkeypatch.setattr(fields, "ASK_ANEW_S", 0.0)
    monkeypatch.setattr(fields, "_program", lambda: ("wrapper", 1, 1, 1))
    smi.install("old")
    driver = NvidiaDriver()
    await driver.look()
    smi.install("new", recovery=("Reset", "None"), mig=("[N/A]", "[N/A]"))
    assert judged(await driver.look()) == {A: "unhealthy", B: "healthy"}


# --- MIG ---

MIG_CONFIG = 'external-resources = ["gpu"]\n[external-resource.gpu]\namount = 1\ndriver = "gpu"\n'
WARNED = f"GPU 1 ({B}) has MIG enabled, and is lent to nobody"


def test_a_card_with_mig_is_warned_of_by_config_check_discover_and_doctor(smi: Smi, tmp_path: Path) -> None:
    smi.install(recovery=("None", "None"), mig=("Disabled", "Enabled"))
    (tmp_path / "outfitter.toml").write_text(f'bus = "sqlite:///{tmp_path}/bus/bus.db"\n{MIG_CONFIG}')
    path = {"PATH": os.environ["PATH"]}
    config = ("--config", "outfitter.toml")
    checked = outfitter("config", "check", "outfitter.toml", cwd=tmp_path, environment=path)
    assert (checked.returncode, checked.stdout.count(WARNED)) == (0, 1)
    found = outfitter("discover", "gpu", *config, "--json", cwd=tmp_path, environment=path)
    assert (found.returncode, found.stderr.count(WARNED)) == (0, 1)
    assert [device.get(MIG) for device in json.loads(found.stdout)] == [None, "Enabled"]
    one = outfitter("discover", "gpu", *config, "--amount", "1", cwd=tmp_path, environment=path)
    assert (one.returncode, one.stderr.count(WARNED)) == (0, 1)
    assert outfitter("doctor", *config, cwd=tmp_path, environment=path).stdout.count(WARNED) == 1


async def test_a_card_with_mig_is_unknown_and_makes_no_other_so_unless_it_is_ill_itself(smi: Smi) -> None:
    smi.install(recovery=("None", "None"), mig=("Disabled", "Enabled"))
    for driver in (NvidiaDriver(), NvidiaDriver(by_index=True)):
        other, card = await driver.look()
        assert (other.health, card.health, card.reason) == (Health.HEALTHY, Health.UNKNOWN, IN_MIG_MODE)
    smi.install(recovery=("None", "Reset"), mig=("Disabled", "Enabled"))
    _, card = await NvidiaDriver().look()
    assert card.health is Health.UNHEALTHY


async def test_the_driver_logs_mig_once_and_again_only_after_it_was_off(
    smi: Smi, caplog: pytest.LogCaptureFixture
) -> None:
    driver = NvidiaDriver()
    for mode, times in (("Enabled", 1), ("Enabled", 1), ("[N/A]", 1), ("Enabled", 2)):
        smi.install(mig=(mode, "Disabled"))
        await driver.look()
        assert sum("has MIG enabled" in record.getMessage() for record in caplog.records) == times
