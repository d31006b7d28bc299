"""What the kernel says of NVIDIA's GPUs, beside NVML: which the driver has, their NUMA nodes, the driver's version.

A GPU that fell off the bus is often missing from NVML's list, without any Xid. The kernel still has its PCI function,
bound to the driver. Documents: the kernel's ABI/testing/sysfs-bus-pci; NVIDIA's driver README, chapter on /proc.
"""

from __future__ import annotations

import re

from msgspec import Struct

from outfitter_drivers.gpu.complaints import BUS_ID, linux_bus_id
from outfitter_drivers.support.tree import Tree

DEVICES = "sys/bus/pci/devices"
INFORMATION = "proc/driver/nvidia/gpus/{}/information"
VERSION = "sys/module/nvidia/version"

_VENDOR = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
_FACT = re.compile(r"^([A-Za-z ]{1,40}?)\s*:\s*(.{0,200}?)\s*$", re.MULTILINE)
_UUID = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Function(Struct, frozen=True, kw_only=True):
    """A GPU's PCI function that is bound to NVIDIA's driver."""

    bus_id: str
    uuid: str | None = None
    is_offered: bool = False
    """Whether the driver offers it to this machine or container: it has a node in /dev, and is not excluded."""


def driver_version(tree: Tree) -> str | None:
    """The version of the driver that the kernel runs."""
    return tree.line(VERSION)


def functions(tree: Tree) -> dict[str, Function] | None:
    """The GPUs that the driver has, by bus id. None: the kernel does not list its devices here."""
    try:
        names = tree.names(DEVICES)
    except OSError:
        return None
    return {name: _function(tree, name) for name in names if BUS_ID.fullmatch(name) and _is_gpu(tree, name)}


def numa_node(tree: Tree, bus_id: str) -> str | None:
    """The number of its NUMA node; None if the machine has only one."""
    node = tree.line(f"{DEVICES}/{bus_id}/numa_node")
    return node if node is not None and node.isascii() and node.isdigit() else None


def normal_bus_id(text: str | None) -> str | None:
    """NVML's bus id as Linux writes it; None if it is none."""
    match = BUS_ID.fullmatch(text or "")
    return linux_bus_id(match) if match else None


def facts(information: str) -> dict[str, str]:
    """The lines `name: value` of the driver's `information` about a GPU."""
    return dict(_FACT.findall(information))


def _is_gpu(tree: Tree, name: str) -> bool:
    folder = f"{DEVICES}/{name}"
    return (
        tree.line(f"{folder}/vendor") == _VENDOR
        and (tree.line(f"{folder}/class") or "").startswith(_DISPLAYS)
        and tree.target(f"{folder}/driver") == "nvidia"
    )


def _function(tree: Tree, bus_id: str) -> Function:
    try:
        told = facts(tree.text(INFORMATION.format(bus_id)))
    except OSError:
        return Function(bus_id=bus_id)
    uuid, minor = told.get("GPU UUID", ""), told.get("Device Minor", "")
    return Function(
        bus_id=bus_id,
        uuid=uuid if _UUID.fullmatch(uuid) else None,
        is_offered=minor.isascii()
        and minor.isdigit()
        and told.get("GPU Excluded", "No") != "Yes"
        and tree.exists(f"dev/nvidia{int(minor[:6])}"),
    )
