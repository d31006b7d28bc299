"""The devices of a look: NVML's answer, the kernel's list, and what was known before."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from outfitter_drivers.api import Device
from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.inventory import FELL_OFF, NOT_NAMED, Machine, seen
from outfitter_drivers.nvidia.pci import Function
from outfitter_drivers.nvidia.snapshot import Gpu, Snapshot
from outfitter_drivers.nvidia.xid import XidClasses

A = Gpu(index=0, uuid="GPU-a", bus_id="00000000:19:00.0", name="NVIDIA H200", minor=3, memory_bytes=10)
B = Gpu(index=1, uuid="GPU-b", bus_id="00000000:3B:00.0", name="NVIDIA H200")
BUS_A, BUS_B = "0000:19:00.0", "0000:3b:00.0"
BOTH = Machine(functions={BUS_A: Function(bus_id=BUS_A), BUS_B: Function(bus_id=BUS_B)})


def look(*gpus: Gpu, machine: Machine = BOTH, earlier: Sequence[Device] = (), **more: str) -> list[Device]:
    snapshot = Snapshot(gpus=gpus, **more)
    return [each.device for each in seen(snapshot, machine, Faults(XidClasses()), earlier)]


def changed(gpu: Gpu, **fields: object) -> Gpu:
    return msgspec.structs.replace(gpu, **fields)


def told(devices: Sequence[Device]) -> list[tuple[str | None, str]]:
    return [(device.id, str(device.health)) for device in devices]


def test_a_gpu_has_the_names_that_choosers_and_version_0_2_know() -> None:
    gpu = changed(A, compute_capability="9.0", nvlinks=("switch",))
    machine = Machine(functions=BOTH.functions, numa_nodes={BUS_A: "1"}, cdi_names=frozenset(("0", "GPU-a")))
    device, _ = look(gpu, changed(B, nvlinks=("switch",)), machine=machine, driver_version="570.1", cuda_version="12.8")
    assert device == Device(
        id="GPU-a",
        aliases=("pci:0000:19:00.0",),
        properties={
            "index": "0",
            "uuid": "GPU-a",
            "model": "NVIDIA H200",
            "pci.bus_id": BUS_A,
            "numa_node": "1",
            "minor": "3",
            "compute_capability": "9.0",
            "driver_version": "570.1",
            "cuda_version": "12.8",
            "memory.total_bytes": "10",
            "nvlink.group": "0",
            "nvlink.peers": "1",
        },
        env={"CUDA_VISIBLE_DEVICES": "GPU-a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        cdi=("nvidia.com/gpu=GPU-a",),
    )


@pytest.mark.parametrize(("names", "cdi"), [(("0",), ("nvidia.com/gpu=0",)), (("1", "all"), ())])
def test_a_cdi_name_is_one_that_a_spec_defines(names: Sequence[str], cdi: Sequence[str]) -> None:
    (device,) = look(A, machine=Machine(cdi_names=frozenset(names)))
    assert device.cdi == tuple(cdi)


@pytest.mark.parametrize(
    "silent",
    [
        Gpu(index=7, failure=15, uuid="GPU-b"),
        Gpu(index=7, failure=15, bus_id="00000000:3B:00.0"),
        Gpu(index=1, failure=15),
    ],
)
def test_a_gpu_that_nvml_refuses_to_speak_of_keeps_what_it_was(silent: Gpu) -> None:
    earlier = look(A, B)
    devices = look(A, silent, earlier=earlier)
    assert told(devices) == [("GPU-a", "healthy"), ("GPU-b", "unhealthy")]
    assert devices[1].properties == earlier[1].properties


def test_an_index_that_now_is_another_living_gpus_says_nothing_of_a_lost_one() -> None:
    devices = look(changed(B, index=0), Gpu(index=1, failure=15), earlier=look(A, B), machine=Machine())
    assert told(devices) == [("GPU-b", "healthy"), (None, "unhealthy"), ("GPU-a", "unknown")]
    assert devices[2].reason == NOT_NAMED


def test_a_gpu_that_is_lost_at_the_first_look_is_there_by_its_index() -> None:
    (device, _) = look(Gpu(index=0, failure=15), B, machine=Machine())
    assert (device.id, device.properties, str(device.health)) == (None, {"index": "0"}, "unhealthy")


def test_a_gpu_that_only_the_kernel_has_fell_off_the_bus_under_its_former_id() -> None:
    devices = look(A, earlier=look(A, B))
    assert told(devices) == [("GPU-a", "healthy"), ("GPU-b", "unhealthy")]
    assert devices[1].reason == FELL_OFF


def test_a_gpu_that_was_never_seen_fell_off_the_bus_only_if_it_is_offered_here() -> None:
    """A container with one of two GPUs finds both in sysfs, and a node of its own only."""
    assert told(look(A)) == [("GPU-a", "healthy")]
    offered = Function(bus_id=BUS_B, is_offered=True, uuid="GPU-b")
    devices = look(A, machine=Machine(functions={BUS_B: offered}))
    assert told(devices) == [("GPU-a", "healthy"), ("GPU-b", "unhealthy")]
    assert devices[1].aliases == ("pci:0000:3b:00.0",)
    unnamed = Function(bus_id=BUS_B, is_offered=True)
    assert told(look(A, machine=Machine(functions={BUS_B: unnamed})))[1] == ("pci:0000:3b:00.0", "unhealthy")


def test_a_gpu_that_the_kernel_has_no_more_is_gone() -> None:
    machine = Machine(functions={BUS_A: Function(bus_id=BUS_A)})
    assert told(look(A, machine=machine, earlier=look(A, B))) == [("GPU-a", "healthy")]


def test_where_the_kernels_list_cannot_be_read_a_missing_gpu_is_unknown_and_not_gone() -> None:
    devices = look(A, machine=Machine(), earlier=look(A, B))
    assert told(devices) == [("GPU-a", "healthy"), ("GPU-b", "unknown")]


def test_a_gpu_that_nvml_names_twice_is_one_device() -> None:
    assert told(look(A, changed(A, index=1), machine=Machine())) == [("GPU-a", "healthy")]


def test_a_pending_mode_is_said() -> None:
    (device,) = look(changed(A, mig=False, mig_pending=True), machine=Machine())
    assert device.properties["mig.mode.pending"] == "Enabled"
    assert "mig.mode.current" not in device.properties
