"""The driver on a fake of NVIDIA's library: real processes, real marshalling, real files."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from outfitter_drivers.api import (
    CannotTell,
    Device,
    DeviceUser,
    DriverParams,
    Grant,
    PermanentDriverError,
    TemporaryDriverError,
    Worker,
)
from outfitter_drivers.nvidia import driver as driver_module
from outfitter_drivers.nvidia import inventory, process
from outfitter_drivers.nvidia.driver import CheckingNvmlDriver, Interface, NvmlDriver
from outfitter_drivers.nvidia.process import NvmlProcess, ReleasedError
from outfitter_drivers.nvidia.snapshot import XID, Event, Gpu, Snapshot
from outfitter_drivers.nvidia.testing import FakeGpu, FakeGpuDriverFactory, FakeInstance, FakeMachine
from outfitter_drivers.support.tree import Tree
from outfitter_proto.records import Health
from outfitter_proto.support import processes
from simulation.loop import running
from support.drivers.gpu_machine import nvidia_smi

LONG_S = 60.0
WORKER = Worker(host="h", resource="gpu", worker="w", incarnation="1", owner_pid=4711)
ROWS = "0, GPU-00000000-0000-4000-8000-000000000000, 143771, 00000000:19:00.0, NVIDIA H200, [N/A], Disabled\n"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path / "machine", [FakeGpu(0), FakeGpu(1)])


@asynccontextmanager
async def driving(machine: FakeMachine, **more: object) -> AsyncIterator[NvmlDriver]:
    driver = machine.driver(**{"timeout": LONG_S, **more})
    try:
        yield driver
    finally:
        await driver.aclose()


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: str = ROWS) -> None:
    monkeypatch.setenv("PATH", f"{nvidia_smi(folder, rows)}:{os.environ['PATH']}")


def healths(devices: list[Device]) -> list[str]:
    return [str(device.health) for device in devices]


def grant(machine: FakeMachine, number: int, *, is_given_back: bool = False) -> Grant:
    uuid = machine.state.gpus[number].uuid
    return Grant(
        allocation="h/w/1",
        token=1,
        worker=WORKER,
        device_ids=(uuid,),
        devices=({"uuid": uuid},),
        is_given_back=is_given_back,
    )


async def test_a_gpu_that_falls_ill_is_unhealthy_alone_and_heals(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        assert healths(await driver.look()) == ["healthy", "healthy"]
        machine.change(1, recovery_action=1)
        _, ill = await driver.look()
        assert (str(ill.health), ill.reason) == ("unhealthy", "NVML's recovery action is Reset")
        machine.change(1, recovery_action=0)
        assert healths(await driver.look()) == ["healthy", "healthy"]


async def test_after_the_loss_of_a_gpu_a_new_process_looks_once(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        machine.change(1, lost=15)
        for _ in range(4):
            assert healths(await driver.look()) == ["healthy", "unhealthy"]
        assert driver.nvml.starts == 2


async def test_while_nobody_can_ask_nvml_no_gpu_is_healthy_and_none_is_gone(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        machine.change(hangs=True)
        driver.nvml.timeout = 0.05
        with pytest.raises(TemporaryDriverError, match="NVML did not answer within"):
            await driver.look()
        machine.change(hangs=False)
        driver.nvml.timeout = LONG_S
        assert healths(await driver.look()) == ["healthy", "healthy"]


async def test_while_the_process_hangs_in_the_kernel_the_gpus_are_unknown(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driving(machine) as driver:
        await driver.look()
        machine.change(hangs=True)
        monkeypatch.setattr(process, "kill", lambda _process: None)  # as in the kernel's state D
        monkeypatch.setattr(process, "_END_S", 0.05)
        driver.nvml.timeout = 0.05
        with pytest.raises(TemporaryDriverError, match="did not answer"):
            await driver.look()
        for device in await driver.look():
            assert device.health is Health.UNKNOWN
            assert "has hung since" in (device.reason or "")
        machine.change(hangs=False)
        driver.nvml.timeout = LONG_S
        with anyio.fail_after(LONG_S):
            while healths(await driver.look()) != ["healthy", "healthy"]:  # noqa: ASYNC110  until the process has ended
                await anyio.sleep(0.01)
        monkeypatch.undo()


async def test_after_the_gpus_were_let_go_of_an_xid_of_before_counts_no_more(machine: FakeMachine) -> None:
    """Without a recovery action nothing else says that a GPU was reset."""
    machine.change(0, recovery_action=None)
    program = "import os, signal, sys\nos.kill(int(sys.argv[1]), signal.SIGUSR1)\nsys.stdin.read()"
    async with driving(machine, poll_interval=3600.0) as driver:
        await driver.look()
        machine.xid(62, 0)
        with anyio.fail_after(LONG_S):
            await driver.until_next_look()
        assert healths(await driver.look()) == ["unhealthy", "healthy"]
        with subprocess.Popen([sys.executable, "-c", program, str(driver.nvml.pid)], stdin=subprocess.PIPE):
            with anyio.fail_after(LONG_S):
                await driver.until_next_look()
            assert healths(await driver.look()) == ["unknown", "unknown"]
        assert healths(await driver.look()) == ["healthy", "healthy"]


@pytest.mark.parametrize("is_late", [False, True], ids=["waiting", "before it waits"])
async def test_as_soon_as_nobody_needs_the_gpus_any_more_the_driver_looks(machine: FakeMachine, is_late: bool) -> None:
    program = "import os, signal, sys\nos.kill(int(sys.argv[1]), signal.SIGUSR1)\nsys.stdin.read()"
    async with driving(machine, poll_interval=3600.0) as driver:
        await driver.look()
        with subprocess.Popen([sys.executable, "-c", program, str(driver.nvml.pid)], stdin=subprocess.PIPE) as sender:
            with anyio.fail_after(LONG_S):
                await driver.until_next_look()
            assert healths(await driver.look()) == ["unknown", "unknown"]
            assert sender.stdin is not None
            async with anyio.create_task_group() as tasks:
                if is_late:
                    sender.stdin.close()
                    sender.wait()
                else:
                    tasks.start_soon(_end_once_it_is_awaited, sender)
                with anyio.fail_after(LONG_S):
                    await driver.until_next_look()
        assert healths(await driver.look()) == ["healthy", "healthy"]


async def _end_once_it_is_awaited(process: subprocess.Popen[bytes]) -> None:
    await anyio.lowlevel.checkpoint()
    assert process.stdin is not None
    process.stdin.close()


async def test_a_new_driver_in_the_kernel_needs_a_new_process(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        (machine.root / "sys/module/nvidia/version").write_text("580.65.06\n")
        for _ in range(3):
            await driver.look()
        assert driver.nvml.starts == 2  # and not one for each look, if both go on to differ


async def test_an_event_is_a_reason_to_look_at_once(machine: FakeMachine, caplog: pytest.LogCaptureFixture) -> None:
    async with driving(machine, poll_interval=3600.0) as driver:
        sets = driver.inventory("h")
        assert healths(list(await anext(sets))) == ["healthy", "healthy"]
        machine.change(0, recovery_action=2)
        machine.xid(79, 0)
        with anyio.fail_after(LONG_S), caplog.at_level(logging.WARNING):
            assert healths(list(await anext(sets))) == ["unhealthy", "healthy"]
        await sets.aclose()  # type: ignore[attr-defined]
        assert f"NVML reports Xid 79 on {machine.state.gpus[0].uuid}: reboot" in caplog.text


async def test_with_an_old_driver_an_xid_makes_a_gpu_ill(machine: FakeMachine) -> None:
    machine.change(0, recovery_action=None)
    async with driving(machine, poll_interval=3600.0) as driver:
        await driver.look()
        machine.xid(62, 0)
        with anyio.fail_after(LONG_S):
            await driver.until_next_look()
        ill, _ = await driver.look()
        assert ill.reason == "its last Xid is 62, after which NVIDIA advises a reset"


class PromptProcess(NvmlProcess):
    """NVML without a process. `ends`: how each wait ends, which takes no time."""

    def __init__(self, ends: Callable[[], Sequence[Event]]) -> None:
        super().__init__(())
        self.looks = 0
        self._ends = ends

    async def look(self) -> Snapshot:
        self.looks += 1
        assert self.looks < 1000, "the driver looks without a pause"
        return Snapshot(gpus=(Gpu(index=0, uuid="GPU-a"),))

    async def wait(self, seconds: float) -> Sequence[Event]:
        await anyio.lowlevel.checkpoint()
        return self._ends()


def looks_in_a_minute(monkeypatch: pytest.MonkeyPatch, root: Path, ends: Callable[[], Sequence[Event]]) -> int:
    """How often the driver looks, in virtual time."""

    async def at_once(call: Callable[..., object], *arguments: object, **_: object) -> object:
        return call(*arguments)

    nvml = PromptProcess(ends)

    async def run() -> None:
        driver = NvmlDriver(nvml=nvml, interface=Interface.NVML, root=root, poll_interval=10.0)
        with anyio.move_on_after(60):
            async for _ in driver.inventory("h"):
                pass

    monkeypatch.setattr(anyio.to_thread, "run_sync", at_once)
    with running(0) as loop:
        loop.run_until_complete(run())
    return nvml.looks


def test_a_storm_of_events_is_a_look_a_second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storm = [Event(uuid="GPU-a", kind=XID, data=13)]
    assert 30 <= looks_in_a_minute(monkeypatch, tmp_path, lambda: storm) <= 61


def test_where_each_wait_for_events_fails_the_driver_looks_in_its_interval(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail() -> Sequence[Event]:
        raise TemporaryDriverError("NVML: unknown error")

    assert 5 <= looks_in_a_minute(monkeypatch, tmp_path, fail) <= 7


# --- what hangs beside NVML ---


async def test_while_the_kernels_files_hang_they_cost_one_thread_and_the_gpus_are_unknown(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, back, read = [], threading.Event(), inventory.read_machine

    def hang(tree: Tree) -> inventory.Machine:
        begun.append(tree)
        back.wait(LONG_S)
        return read(tree)

    async with driving(machine) as driver:
        await driver.look()
        monkeypatch.setattr(inventory, "read_machine", hang)
        driver.timeout = 0.05
        while not begun:  # a look may be given up before its thread has begun
            with pytest.raises(TemporaryDriverError, match="the kernel does not answer within"):
                await driver.look()
        driver.timeout = LONG_S
        for _ in range(5):
            for device in await driver.look():
                assert device.health is Health.UNKNOWN
                assert "the kernel still does not answer" in (device.reason or "")
        assert len(begun) == 1
        back.set()
        with anyio.fail_after(LONG_S):
            while healths(await driver.look()) != ["healthy", "healthy"]:  # noqa: ASYNC110  until the thread has ended
                await anyio.sleep(0.01)


async def test_while_proc_hangs_nobody_can_tell_who_uses_a_gpu_and_none_is_given_back(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    machine.change(0, processes=[4711])
    monkeypatch.setattr(driver_module, "PROC_WITHIN_S", 0.05)
    monkeypatch.setattr(CheckingNvmlDriver, "_path", lambda *_: str(back.wait(LONG_S)))
    async with driving(machine) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        for device in await driver.look():
            assert device.health is Health.HEALTHY
            assert isinstance(device.users, CannotTell)
        with pytest.raises(TemporaryDriverError, match="/proc still does not answer"):
            await driver.in_use(grant(machine, 0))
        back.set()


# --- which way ---


async def test_where_nothing_of_nvidia_is_there_nvidia_smi_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch)
    driver = NvmlDriver(root=tmp_path)
    (device,) = await driver.look()
    assert "driver_version" not in device.properties
    assert driver.nvml.starts == 0


async def test_where_nvml_cannot_be_used_nvidia_smi_is_asked_under_the_same_ids_and_the_driver_says_so(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    smi(tmp_path, monkeypatch)
    async with driving(machine) as driver:
        by_nvml, _ = await driver.look()
    machine.change(init=12)
    async with driving(machine) as driver:
        for _ in range(2):
            (by_smi,) = await driver.look()
        assert (by_smi.id, by_smi.aliases, by_smi.env) == (by_nvml.id, by_nvml.aliases, by_nvml.env)
        assert by_smi.properties.items() <= by_nvml.properties.items()
        words = "NVML cannot be used: there is no NVML library (libnvidia-ml.so.1) (NVML code 12); nvidia-smi is asked"
        assert sum(words in record.message for record in caplog.records) == 1
        assert any(words in remark for remark in await driver.remarks())


async def test_on_a_machine_with_gpus_the_driver_says_that_its_package_is_missing(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    smi(tmp_path, monkeypatch)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pynvml" else find(name))
    async with driving(machine) as driver:
        for _ in range(2):
            assert len(await driver.look()) == 1
        words = "the package nvidia-ml-py is not there; install outfitter[nvidia]; nvidia-smi is asked instead"
        assert sum(words in record.message for record in caplog.records) == 1
        assert any(words in remark for remark in await driver.remarks())


async def test_once_nvml_has_answered_nvidia_smi_is_asked_no_more(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of an upgrade neither library nor node may be there. By nvidia-smi a GPU in MIG mode is a whole."""
    smi(tmp_path, monkeypatch)
    async with driving(machine) as driver:
        await driver.look()
        machine.change(codes={"nvmlDeviceGetCount_v2": 12})
        (machine.root / "dev/nvidiactl").unlink()
        with pytest.raises(TemporaryDriverError, match="NVML cannot be used: there is no NVML library"):
            await driver.look()
        machine.change(codes={})
        assert healths(await driver.look()) == ["healthy", "healthy"]


async def test_the_interface_can_be_set(machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch)
    async with driving(machine, interface=Interface.NVIDIA_SMI) as driver:
        assert len(await driver.look()) == 1
        assert driver.nvml.starts == 0
    machine.change(init=12)
    async with driving(machine, interface=Interface.NVML) as driver:
        with pytest.raises(PermanentDriverError, match="NVML cannot be used"):
            await driver.look()


async def test_gpus_that_nobody_watches_are_remarked_on(machine: FakeMachine) -> None:
    machine.change(1, codes={"nvmlDeviceRegisterEvents": 3})
    async with driving(machine) as driver:
        assert healths(await driver.look()) == ["healthy", "healthy"]
        (remark,) = await driver.remarks()
        assert remark.startswith(f"NVML does not watch {machine.state.gpus[1].uuid}")


# --- by index ---


async def test_by_index_the_variables_have_indexes_and_a_lost_gpu_keeps_all_others(machine: FakeMachine) -> None:
    async with driving(machine, by_index=True) as driver:
        assert [device.env["CUDA_VISIBLE_DEVICES"] for device in await driver.look()] == ["0", "1"]
        machine.change(0, recovery_action=1)
        assert healths(await driver.look()) == ["unhealthy", "healthy"]
        machine.change(0, recovery_action=0, lost=15)
        first, second = await driver.look()
        assert (first.health, second.health) == (Health.UNHEALTHY, Health.UNKNOWN)
        assert second.reason is not None
        assert "param.visible-devices = uuid" in second.reason


async def test_by_index_the_variables_stay_while_nobody_has_nvml_open(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def released() -> Snapshot:
        raise ReleasedError("the GPUs were let go of")

    async with driving(machine, by_index=True) as driver:
        before = await driver.look()
        monkeypatch.setattr(driver.nvml, "look", released)
        after = await driver.look()
        assert healths(after) == ["unknown", "unknown"]
        assert [device.env for device in after] == [device.env for device in before]


async def test_by_index_nothing_is_lent_beside_a_gpu_in_mig_mode(machine: FakeMachine) -> None:
    machine.change(1, mig=(1, 1), instances=[FakeInstance(slot=0, uuid="MIG-a")])
    async with driving(machine, by_index=True) as driver:
        first, *_ = devices = await driver.look()
        assert healths(devices) == ["unknown", "unknown"]
        assert first.reason is not None
        assert first.reason.startswith("CUDA counts MIG instances otherwise, and GPU 1 is in MIG mode; with param.")


# --- MIG ---


async def test_mig_that_is_made_anew_is_seen_at_the_next_look(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        assert healths(await driver.look()) == ["healthy", "healthy"]
        machine.change(
            0, mig=(1, 1), instances=[FakeInstance(slot=0, uuid="MIG-a"), FakeInstance(slot=1, uuid="MIG-b")]
        )
        devices = await driver.look()
        assert [(device.id, device.part_of) for device in devices] == [
            ("MIG-a", "pci:0000:19:00.0"),
            ("MIG-b", "pci:0000:19:00.0"),
            (machine.state.gpus[1].uuid, None),
        ]
        assert healths(devices) == ["healthy", "healthy", "healthy"]
        machine.change(0, lost=15)
        assert healths(await driver.look()) == ["unhealthy", "unhealthy", "unhealthy", "healthy"]
        machine.change(0, lost=0)
        machine.change(0, instances=[FakeInstance(slot=0, uuid="MIG-c", profile="3g.71gb")])
        first, *_ = await driver.look()
        assert first.id == "MIG-c"
        assert await driver.remarks() == []
        machine.change(0, mig=(0, 0), instances=[])
        assert healths(await driver.look()) == ["healthy", "healthy"]


async def test_a_process_of_an_instance_uses_that_instance(machine: FakeMachine) -> None:
    one, two = FakeInstance(slot=0, uuid="MIG-a", processes=[4711]), FakeInstance(slot=1, uuid="MIG-b")
    machine.change(0, mig=(1, 1), instances=[one, two])
    async with driving(machine) as driver:

        async def user(uuid: str) -> str | None:
            assert isinstance(driver, CheckingNvmlDriver)
            grant = Grant(allocation="a", token=1, worker=WORKER, device_ids=(uuid,), devices=({"uuid": uuid},))
            return await driver.in_use(grant)

        assert await user("MIG-a") == "process 4711 on MIG-a"
        assert await user("MIG-b") is None


# --- who uses a GPU ---


async def test_a_process_on_a_gpu_is_named_and_one_of_another_gpu_is_not(machine: FakeMachine) -> None:
    machine.change(1, processes=[os.getpid()])
    proc = machine.root / f"proc/{os.getpid()}"
    proc.mkdir(parents=True)
    (proc / "cmdline").write_bytes(b"/usr/bin/train\0--fast\0")
    async with driving(machine) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        await driver.look()
        assert await driver.in_use(grant(machine, 0)) is None
        uuid = machine.state.gpus[1].uuid
        assert await driver.in_use(grant(machine, 1)) == f"process {os.getpid()} (train) on {uuid}"


async def test_each_look_says_who_computes_on_each_device(machine: FakeMachine) -> None:
    machine.change(0, processes=[4711, 4712])
    machine.change(1, mig=(1, 1), instances=[FakeInstance(slot=0, uuid="MIG-a", processes=[5])])
    proc = machine.root / "proc/4712"
    proc.mkdir(parents=True)
    (proc / "cmdline").write_bytes(b"/usr/bin/nvidia-cuda-mps-server\0")
    async with driving(machine) as driver:
        first, *others = await driver.look()
        assert first.users == (DeviceUser(pid=4711),)
        assert [each.users for each in others if each.id == "MIG-a"] == [(DeviceUser(pid=5),)]


async def test_neither_the_owner_that_gave_a_gpu_back_nor_the_server_of_mps_uses_it(machine: FakeMachine) -> None:
    machine.change(0, processes=[4711, 4712])
    proc = machine.root / "proc/4712"
    proc.mkdir(parents=True)
    (proc / "cmdline").write_bytes(b"/usr/bin/nvidia-cuda-mps-server\0")
    async with driving(machine) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        assert await driver.in_use(grant(machine, 0, is_given_back=True)) is None
        assert (await driver.in_use(grant(machine, 0)) or "").startswith("process 4711 on ")


async def test_who_uses_a_lost_gpu_cannot_be_told(machine: FakeMachine) -> None:
    async with driving(machine) as driver:
        await driver.look()
        machine.change(0, lost=15)
        first, second, *_ = [device.users for device in await driver.look()]
        assert isinstance(first, CannotTell)
        assert second == ()


async def test_in_a_pid_namespace_of_its_own_a_list_without_processes_says_nothing(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "INITIAL_PID_NAMESPACE", 1)
    async with driving(machine) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        first, *_ = [device.users for device in await driver.look()]
        assert isinstance(first, CannotTell)
        assert await driver.in_use(grant(machine, 0)) == first


async def test_where_nvml_is_not_asked_nvidia_smi_says_who_uses_a_gpu(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, f"{machine.state.gpus[0].uuid}, 5, train\n")
    async with driving(machine, interface=Interface.NVIDIA_SMI) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        assert "process 5 (train)" in (await driver.in_use(grant(machine, 0)) or "")


async def test_where_nvml_cannot_be_used_nvidia_smi_says_who_uses_a_gpu(
    machine: FakeMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(tmp_path, monkeypatch, f"{machine.state.gpus[0].uuid}, 5, train\n")
    machine.change(init=12)
    async with driving(machine) as driver:
        assert isinstance(driver, CheckingNvmlDriver)
        assert "process 5 (train)" in (await driver.in_use(grant(machine, 0)) or "")


# --- the fake as a driver of its own ---


async def test_the_fake_can_be_configured_by_its_path(machine: FakeMachine) -> None:
    params = DriverParams({"machine": "machine", "xid.reset": "63"}, directory=machine.folder.parent)
    driver = FakeGpuDriverFactory().create_external_resource_driver(params)
    assert healths(await driver.look()) == ["healthy", "healthy"]
    await driver.aclose()
