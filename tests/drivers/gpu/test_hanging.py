"""A call that hangs in the kernel is one call: no other one is started, and its devices are not called healthy."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from outfitter_drivers import program
from outfitter_drivers.api import Grant, TemporaryDriverError, Worker
from outfitter_drivers.gpu.compute_processes import CheckingNvidiaDriver
from outfitter_drivers.gpu.discovery_script import ScriptDriver
from outfitter_drivers.script import HangingError
from outfitter_proto.records import Health
from support.drivers.gpu_machine import executable
from support.processes.ending import wait_until_ended

ROW = "0, GPU-a, 81559, 00000000:1A:00.0, NVIDIA H100"
WORKER = Worker(host="h", resource="gpu", worker="w", incarnation="1")


class Machine:
    """A program that hangs while the file `hangs` exists, and that SIGKILL does not end, as in the kernel's state D."""

    def __init__(self, folder: Path, path: Path, printed: str) -> None:
        self.folder = folder
        (folder / "pids").touch()
        hang = f"echo $$ >> {folder}/pids; exec sleep 1000"
        executable(path, f"if [ -e {folder}/hangs ]; then {hang}; fi; echo '{printed}'")

    def started(self) -> list[int]:
        return [int(line) for line in (self.folder / "pids").read_text().split()]

    def thaw(self) -> None:
        (self.folder / "hangs").unlink()
        for pid in self.started():
            os.kill(pid, signal.SIGKILL)
            wait_until_ended(pid)


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "kill_group", lambda _group: None)
    monkeypatch.setattr(program, "_END_SECONDS", 0.05)


async def test_while_nvidia_smi_hangs_no_other_one_is_started_and_no_gpu_is_called_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: None
) -> None:
    machine = Machine(tmp_path, tmp_path / "bin/nvidia-smi", ROW)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    driver = CheckingNvidiaDriver(timeout=10)
    assert [device.health for device in await driver.look()] == [Health.HEALTHY]
    (tmp_path / "hangs").touch()
    driver.timeout = 3
    for _ in range(3):
        (device,) = await driver.look()
        assert (device.id, device.health) == ("GPU-a", Health.UNKNOWN)
    (pid,) = machine.started()
    assert f"process {pid} of nvidia-smi has hung since " in (device.reason or "")
    grant = Grant(
        allocation="h/w/1", token=1, worker=WORKER, device_ids=("GPU-a",), devices=({"uuid": "GPU-a", "index": "0"},)
    )
    with pytest.raises(TemporaryDriverError, match=f"process {pid} of nvidia-smi has hung since "):
        await driver.in_use(grant)
    assert machine.started() == [pid]
    machine.thaw()
    driver.timeout = 10
    assert [device.health for device in await driver.look()] == [Health.HEALTHY]


@pytest.mark.parametrize("child", ["", "sh -c"])
async def test_a_script_that_hangs_or_whose_child_does_is_not_called_again_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    """SIGKILL ends the script, and not its child: nvidia-smi in the kernel."""
    machine = Machine(tmp_path, tmp_path / "hanging", "0")
    script = executable(tmp_path / "script", f"{child and ':;'} {tmp_path}/hanging; exit $?")

    def kill_first(group: int) -> None:
        if child:
            os.kill(group, signal.SIGKILL)

    monkeypatch.setattr(program, "kill_group", kill_first)
    monkeypatch.setattr(program, "_END_SECONDS", 0.5)
    (tmp_path / "hangs").touch()
    driver = ScriptDriver(str(script), timeout=3)
    with pytest.raises(TemporaryDriverError):
        await driver.retrieve_resource_info(1, WORKER)
    for _ in range(3):
        with pytest.raises(TemporaryDriverError, match=r"process \d+ of .*script has hung since "):
            await driver.retrieve_resource_info(1, WORKER)
    assert len(machine.started()) == 1
    machine.thaw()
    patient = ScriptDriver(str(script), timeout=30)
    with anyio.fail_after(30):
        while True:
            try:
                found = await patient.retrieve_resource_info(1, WORKER)
                break
            except HangingError:  # the shell ends in a moment
                await anyio.sleep(0.01)
    assert [info["index"] for info in found] == ["0"]
