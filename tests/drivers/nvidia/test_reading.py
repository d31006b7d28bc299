"""What is read from NVML, through the real marshalling of nvidia-ml-py: only the library below it is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from outfitter_drivers.nvidia.fake_library import install
from outfitter_drivers.nvidia.reading import Reader
from outfitter_drivers.nvidia.snapshot import Gpu, Processes, Snapshot
from outfitter_drivers.nvidia.testing import FakeGpu, FakeInstance, FakeMachine

MIB = 1024 * 1024


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., FakeMachine]]:
    """Makes a machine, and puts it below nvidia-ml-py in this process."""

    def make(*gpus: FakeGpu, **more: object) -> FakeMachine:
        made = FakeMachine(tmp_path, gpus, **more)
        install(made.path)
        return made

    yield make
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def look() -> Snapshot:
    pynvml._nvmlGetFunctionPointer_cache.clear()  # functions that the test took away since
    return Reader(pynvml).look()


def gpu(**fields: object) -> FakeGpu:
    return FakeGpu(0, **fields)  # type: ignore[arg-type]


def test_all_that_identifies_and_describes_a_gpu_is_read(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(links=["switch", "switch"]))
    snapshot = look()
    assert (snapshot.driver_version, snapshot.cuda_version) == ("570.124.06", "12.8")
    (read,) = snapshot.gpus
    assert read == Gpu(
        index=0,
        uuid="GPU-00000000-0000-4000-8000-000000000000",
        bus_id="00000000:19:00.0",
        name="NVIDIA H200",
        minor=0,
        memory_bytes=143771 * MIB,
        compute_capability="9.0",
        mig=False,
        mig_pending=False,
        recovery_action=0,
        remapping_failed=False,
        remapping_pending=False,
        nvlinks=("switch",),
        processes=read.processes,
    )


def test_a_lost_gpu_does_not_end_the_list(machine: Callable[..., FakeMachine]) -> None:
    machine(FakeGpu(0, lost=15), FakeGpu(1), FakeGpu(2, lost=999))
    assert [(read.index, read.failure) for read in look().gpus] == [(0, 15), (1, None), (2, 999)]


def test_a_gpu_that_is_lost_while_it_is_read_keeps_what_it_told_before(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(codes={"nvmlDeviceGetMemoryInfo": 15}), FakeGpu(1))
    first, second = look().gpus
    assert (first.failure, first.uuid, first.memory_bytes) == (15, "GPU-00000000-0000-4000-8000-000000000000", None)
    assert second.failure is None


def test_a_gpu_without_a_uuid_has_failed(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(codes={"nvmlDeviceGetUUID": 999}))
    (read,) = look().gpus
    assert (read.failure, read.bus_id) == (999, "00000000:19:00.0")


def test_what_an_old_driver_or_a_small_card_does_not_have_is_not_told(machine: Callable[..., FakeMachine]) -> None:
    missing = ["nvmlDeviceGetMigMode", "nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetName"]
    machine(gpu(), missing=missing)
    (read,) = look().gpus
    assert read.failure is None
    assert not read.unreadable
    assert (read.mig, read.recovery_action, read.remapping_failed, read.name) == (None, None, None, None)


def test_a_level_that_fails_is_noted_with_its_code(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(codes={"nvmlDeviceGetMigMode": 999, "nvmlDeviceGetRetiredPagesPendingStatus": 10}))
    (read,) = look().gpus
    assert read.unreadable == {"mig": 999, "retired_pages_pending": 10}


def test_levels_are_read(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(recovery_action=4, remapping_failed=1, remapping_pending=1, retired_pending=1))
    (read,) = look().gpus
    assert (read.recovery_action, read.remapping_failed, read.remapping_pending, read.retired_pages_pending) == (
        4,
        True,
        True,
        True,
    )


def test_instances_are_read_from_their_slots_and_empty_slots_are_passed_over(
    machine: Callable[..., FakeMachine],
) -> None:
    instances = [
        FakeInstance(slot=0, uuid="MIG-a", profile="3g.71gb", memory_mib=71424, gpu_instance=2, processes=[7]),
        FakeInstance(slot=5, uuid="MIG-b", gpu_instance=9, compute_instance=1),
    ]
    machine(gpu(mig=(1, 1), instances=instances))
    (read,) = look().gpus
    assert read.mig is True
    told = [
        (each.slot, each.uuid, each.name, each.memory_bytes, each.gpu_instance, each.compute_instance)
        for each in read.instances
    ]
    assert told == [
        (0, "MIG-a", "NVIDIA H200 MIG 3g.71gb", 71424 * MIB, 2, 0),
        (5, "MIG-b", "NVIDIA H200 MIG 1g.18gb", 16384 * MIB, 9, 1),
    ]
    assert read.instances[0].processes.pids == (7,)


def test_instances_are_read_anew_each_time(machine: Callable[..., FakeMachine]) -> None:
    made = machine(gpu(mig=(1, 1), instances=[FakeInstance(slot=0, uuid="MIG-a")]))
    reader = Reader(pynvml)
    assert [each.uuid for each in reader.look().gpus[0].instances] == ["MIG-a"]
    made.change(0, instances=[FakeInstance(slot=0, uuid="MIG-b")])
    assert [each.uuid for each in reader.look().gpus[0].instances] == ["MIG-b"]


@pytest.mark.parametrize("missing", [[], ["nvmlDeviceGetComputeRunningProcesses_v3"]])
def test_processes_are_listed_by_new_and_old_libraries(machine: Callable[..., FakeMachine], missing: list[str]) -> None:
    machine(gpu(processes=[4711, 4712]), missing=missing)
    (read,) = look().gpus
    assert read.processes.pids == (4711, 4712)


def test_a_process_that_only_draws_is_not_told(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(processes=[4711], graphics=[4711, 4712]))
    (read,) = look().gpus
    assert read.processes.pids == (4711,)


def test_a_library_that_lists_no_processes_cannot_tell(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(codes={"nvmlDeviceGetComputeRunningProcesses_v3": 3}))
    (read,) = look().gpus
    assert read.processes.pids == ()
    assert read.processes.unsaid


def test_a_driver_that_lies_about_processes_cannot_tell_and_what_it_lists_keeps_no_gpu(
    machine: Callable[..., FakeMachine],
) -> None:
    machine(gpu(processes=[4711]), driver_version="535.54.03")
    told = look().gpus[0].processes
    assert told == Processes(unsaid="driver 535.54.03 lists processes that do not exist")


def test_the_other_ends_of_links_are_gpus_or_switches(machine: Callable[..., FakeMachine]) -> None:
    machine(gpu(links=["0000:2a:00.0", "0000:2a:00.0", "", "switch"]))
    assert look().gpus[0].nvlinks == ("00000000:2A:00.0", "switch")


def test_links_that_come_up_later_are_seen(machine: Callable[..., FakeMachine]) -> None:
    made = machine(gpu(links=["", ""]))
    reader = Reader(pynvml)
    assert reader.look().gpus[0].nvlinks == ()
    made.change(0, links=["switch", "switch"])
    assert reader.look().gpus[0].nvlinks == ("switch",)
