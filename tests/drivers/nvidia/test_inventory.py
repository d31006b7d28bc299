"""The devices of a look: NVML's answer, the kernel's list, and what was known before."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from outfitter_drivers.api import Device
from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.inventory import FELL_OFF, NOT_NAMED, Machine, seen
from outfitter_drivers.nvidia.pci import Function
from outfitter_drivers.nvidia.snapshot import XID, Event, Gpu, MigInstance, Snapshot
from outfitter_drivers.nvidia.xid import XidClasses

A = Gpu(index=0, uuid="GPU-a", bus_id="00000000:19:00.0", name="NVIDIA H200", minor=3, memory_bytes=10)
B = Gpu(index=1, uuid="GPU-b", bus_id="00000000:3B:00.0", name="NVIDIA H200")
BUS_A, BUS_B = "0000:19:00.0", "0000:3b:00.0"
BOTH = Machine(functions={BUS_A: Function(bus_id=BUS_A), BUS_B: Function(bus_id=BUS_B)})


def look(
    *gpus: Gpu, machine: Machine = BOTH, earlier: Sequence[Device] = (), all_of_them: bool = False, **more: str
) -> list[Device]:
    snapshot = Snapshot(gpus=gpus, **more)
    found = seen(snapshot, machine, Faults(XidClasses()), earlier)
    return [each.device for each in found if each.is_reported or all_of_them]


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
    (_, device) = look(Gpu(index=0, failure=15), B, machine=Machine())
    assert (device.id, device.properties, str(device.health)) == (None, {"index": "0"}, "unhealthy")


def test_a_gpu_that_is_lost_at_the_first_look_is_one_device_with_the_name_that_the_kernel_has() -> None:
    functions = {
        bus: Function(bus_id=bus, is_offered=True, uuid=uuid) for bus, uuid in ((BUS_A, "GPU-a"), (BUS_B, None))
    }
    devices = look(A, Gpu(index=1, failure=15), machine=Machine(functions=functions))
    assert told(devices) == [("GPU-a", "healthy"), ("pci:0000:3b:00.0", "unhealthy")]
    assert (devices[1].reason, devices[1].properties["index"]) == ("NVML: the GPU is lost (NVML code 15)", "1")
    devices = look(Gpu(index=0, failure=15), machine=Machine(functions=functions))
    assert told(devices) == [("GPU-a", "unhealthy"), ("pci:0000:3b:00.0", "unhealthy")]
    assert [device.reason == FELL_OFF for device in devices] == [False, True]
    moved = look(changed(B, index=0), Gpu(index=1, failure=999), earlier=look(A, B))
    assert told(moved) == [("GPU-b", "healthy"), ("GPU-a", "unknown")]


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


# --- MIG ---

ONE = MigInstance(
    slot=0, uuid="MIG-1", name="NVIDIA H200 MIG 3g.71gb", memory_bytes=7, gpu_instance=2, compute_instance=0
)
TWO = MigInstance(slot=3, uuid="MIG-2", name="NVIDIA H200 MIG 1c.3g.71gb", gpu_instance=5, compute_instance=1)
SPLIT = changed(A, mig=True, mig_pending=True, instances=(ONE, TWO), nvlinks=("switch",))


def known() -> list[Device]:
    """What is remembered of a look at a GPU with two instances: the GPU, too."""
    return look(SPLIT, machine=Machine(), all_of_them=True)


def test_in_mig_mode_the_instances_are_devices_and_not_the_whole() -> None:
    one, two = look(SPLIT, machine=Machine(cdi_names=frozenset(("0:0", "MIG-2"))))
    assert one == Device(
        id="MIG-1",
        part_of="pci:0000:19:00.0",
        properties={
            "index": "0:0",
            "uuid": "MIG-1",
            "model": "NVIDIA H200",
            "pci.bus_id": BUS_A,
            "minor": "3",
            "memory.total_bytes": "7",
            "mig.profile": "3g.71gb",
            "mig.parent": "GPU-a",
            "mig.gpu_instance": "2",
            "mig.compute_instance": "0",
        },
        env={"CUDA_VISIBLE_DEVICES": "MIG-1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        cdi=("nvidia.com/gpu=0:0",),
    )
    assert (two.properties["mig.profile"], two.properties["index"], two.cdi) == (
        "1c.3g.71gb",
        "0:3",
        ("nvidia.com/gpu=MIG-2",),
    )


def test_a_gpu_in_mig_mode_uses_no_nvlink() -> None:
    *_, other = look(SPLIT, changed(B, nvlinks=("switch",)), machine=Machine())
    assert other.id == "GPU-b"
    assert "nvlink.group" not in other.properties


def test_instances_that_are_made_anew_are_other_devices() -> None:
    again = changed(SPLIT, instances=(changed_instance(ONE, uuid="MIG-9"),))
    assert [device.id for device in look(again, machine=Machine(), earlier=known())] == ["MIG-9"]


def test_a_gpu_in_mig_mode_without_instances_is_a_device_that_nobody_gets() -> None:
    (whole,) = look(changed(SPLIT, instances=()), machine=Machine())
    assert (whole.id, str(whole.health), whole.reason) == (
        "GPU-a",
        "unknown",
        "it is in MIG mode, and has no MIG instances",
    )
    assert whole.properties["mig.mode.current"] == "Enabled"
    assert "nvlink.group" not in whole.properties


def changed_instance(instance: MigInstance, **fields: object) -> MigInstance:
    return msgspec.structs.replace(instance, **fields)


def test_while_another_mode_is_pending_neither_whole_nor_parts_are_lent() -> None:
    for devices in (
        look(changed(SPLIT, mig_pending=False), machine=Machine()),
        look(changed(A, mig=False, mig_pending=True), machine=Machine()),
    ):
        assert {str(device.health) for device in devices} == {"unknown"}
        assert all("at its next reset" in (device.reason or "") for device in devices)


@pytest.mark.parametrize("ill", [changed(SPLIT, recovery_action=1), Gpu(index=0, failure=15, uuid="GPU-a")])
def test_parts_are_as_ill_as_their_whole(ill: Gpu) -> None:
    devices = look(ill, machine=Machine(), earlier=known())
    assert told(devices) == [("GPU-a", "unhealthy"), ("MIG-1", "unhealthy"), ("MIG-2", "unhealthy")]
    assert len({device.reason for device in devices}) == 1


def test_the_parts_of_a_gpu_that_fell_off_the_bus_are_there_and_ill() -> None:
    devices = look(B, earlier=look(SPLIT, B, all_of_them=True))
    assert told(devices) == [
        ("GPU-b", "healthy"),
        ("GPU-a", "unhealthy"),
        ("MIG-1", "unhealthy"),
        ("MIG-2", "unhealthy"),
    ]


@pytest.mark.parametrize("name", ["instances", "mig"])
def test_instances_that_cannot_be_asked_for_are_unknown_and_not_gone(name: str) -> None:
    blind = changed(SPLIT, instances=(ONE,) if name == "instances" else (), unreadable={name: 999})
    devices = look(blind, machine=Machine(), earlier=known())
    assert sorted(told(devices), key=str) == [("GPU-a", "unknown"), ("MIG-1", "unknown"), ("MIG-2", "unknown")]


def test_an_xid_of_one_instance_is_no_other_ones_and_one_of_the_whole_is_all_of_theirs() -> None:
    split = changed(SPLIT, recovery_action=None)

    def after(**place: int) -> list[str]:
        faults = Faults(XidClasses())
        faults.note([Event(uuid="GPU-a", kind=XID, data=62, **place)])
        devices = seen(Snapshot(gpus=(split,)), Machine(), faults, [])
        return [str(each.device.health) for each in devices if each.is_reported]

    assert after(gpu_instance=2, compute_instance=0) == ["unhealthy", "healthy"]
    assert after() == ["unhealthy", "unhealthy", "unhealthy"]


def test_two_compute_instances_of_one_gpu_instance_say_that_they_share_its_memory() -> None:
    """As on an H200 in MIG mode with driver 590.48: utkuozdemir/nvidia_gpu_exporter, internal/captures."""
    mib = 1024 * 1024
    rows = (
        ("1c.3g.71gb", 71424, 2, 0),
        ("2c.3g.71gb", 71424, 2, 1),
        ("2g.35gb", 33280, 3, 0),
        ("1g.18gb", 16384, 9, 0),
    )
    instances = tuple(
        MigInstance(
            slot=slot,
            uuid=f"MIG-{slot}",
            name=f"NVIDIA H200 MIG {profile}",
            memory_bytes=memory * mib,
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
        )
        for slot, (profile, memory, gpu_instance, compute_instance) in enumerate(rows)
    )
    devices = look(changed(SPLIT, instances=instances), machine=Machine())
    names = ("mig.profile", "memory.total_bytes", "mig.gpu_instance", "mig.compute_instance")
    assert [tuple(device.properties[name] for name in names) for device in devices] == [
        ("1c.3g.71gb", str(71424 * mib), "2", "0"),
        ("2c.3g.71gb", str(71424 * mib), "2", "1"),
        ("2g.35gb", str(33280 * mib), "3", "0"),
        ("1g.18gb", str(16384 * mib), "9", "0"),
    ]
