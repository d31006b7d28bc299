"""The devices of one look: what NVML says of each GPU, what the kernel says beside it, and what was known before.

A GPU that NVML does not speak of keeps the identity that it had. Only a GPU that neither NVML nor the kernel has any
more is gone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from outfitter_drivers.api import Device
from outfitter_drivers.gpu.fields import MIG_MODE
from outfitter_drivers.gpu.nvidia import cuda_environment
from outfitter_drivers.nvidia import cdi, health, nvlink, pci
from outfitter_drivers.nvidia.faults import Faults
from outfitter_drivers.nvidia.health import Verdict
from outfitter_drivers.nvidia.snapshot import Gpu, Snapshot
from outfitter_drivers.support.tree import Tree
from outfitter_proto.records import Health

FELL_OFF = "it fell off the bus: the driver still has its PCI function, and NVML does not list it"
NOT_NAMED = "NVML does not name it any more, and the kernel's list of devices cannot be read"
_PROFILE = re.compile(r"\bMIG (\S{1,40})")
"""In a name such as `NVIDIA H200 MIG 1g.18gb`."""


class Machine(Struct, frozen=True, kw_only=True):
    """What files say of the GPUs."""

    functions: Mapping[str, pci.Function] | None = None
    """By bus id. None: nobody knows."""
    numa_nodes: Mapping[str, str] = {}
    cdi_names: frozenset[str] = frozenset()
    driver_version: str | None = None
    """Of the driver that the kernel runs."""


class Seen(NamedTuple):
    """A device of a look."""

    device: Device
    is_counted: bool = True
    """CUDA counts it. A lost GPU may have no index."""
    is_reported: bool = True
    """It is a device to others. A GPU that is lent in MIG instances is none."""


def read_machine(tree: Tree) -> Machine:
    """Read the files. It blocks as long as the kernel does."""
    functions = pci.functions(tree)
    nodes = {bus_id: pci.numa_node(tree, bus_id) for bus_id in functions or ()}
    return Machine(
        functions=functions,
        numa_nodes={bus_id: node for bus_id, node in nodes.items() if node is not None},
        cdi_names=cdi.names(tree),
        driver_version=pci.driver_version(tree),
    )


def seen(snapshot: Snapshot, machine: Machine, faults: Faults, earlier: Sequence[Device]) -> list[Seen]:
    """All devices, whole GPUs among them that are not reported. `earlier`: those of the look before."""
    links = _links(snapshot)
    known = {uuid for gpu in snapshot.gpus if gpu.failure is None and (uuid := gpu.uuid)}
    found: dict[str, Seen] = {}
    nameless: list[tuple[Gpu, Verdict]] = []
    for gpu in snapshot.gpus:
        verdict = faults.verdict(gpu)
        if gpu.failure is None and gpu.uuid:
            of_whole = health.of_whole(gpu, verdict)
            whole = _gpu(gpu, snapshot, machine, of_whole or verdict, links)
            found.setdefault(_name(whole), Seen(whole, is_reported=of_whole is not None))
            devices = [*_instances(gpu, snapshot, machine, faults), *_unread(gpu, verdict, earlier)]
        else:
            devices = _silent(gpu, verdict, [device for device in earlier if device.id not in known])
            if not devices:
                nameless.append((gpu, verdict))
        for device in devices:
            found.setdefault(_name(device), Seen(device, is_counted=gpu.failure is None))
    for device in _missing(machine, [each.device for each in found.values()], earlier, nameless):
        found.setdefault(_name(device), Seen(device, is_counted=False))
    return list(found.values())


def _gpu(
    gpu: Gpu, snapshot: Snapshot, machine: Machine, verdict: Verdict, links: Mapping[str, Mapping[str, str]]
) -> Device:
    uuid, index = gpu.uuid or "", str(gpu.index)
    bus_id = pci.normal_bus_id(gpu.bus_id)
    properties = {"index": index, "uuid": uuid, **_facts(gpu, snapshot, machine)}
    if gpu.memory_bytes is not None:
        properties["memory.total_bytes"] = str(gpu.memory_bytes)
    if gpu.mig:
        properties[MIG_MODE] = "Enabled"
    if gpu.mig is not None and gpu.mig_pending is not None and gpu.mig_pending != gpu.mig:
        properties["mig.mode.pending"] = "Enabled" if gpu.mig_pending else "Disabled"
    properties |= links.get(bus_id or "", {})
    return Device(
        properties=properties,
        id=uuid,
        aliases=(f"pci:{bus_id}",) if bus_id else (),
        health=verdict.health,
        reason=verdict.reason,
        env=cuda_environment(uuid),
        cdi=_cdi((uuid, index), machine),
    )


def _instances(gpu: Gpu, snapshot: Snapshot, machine: Machine, faults: Faults) -> Iterator[Device]:
    """A GPU's MIG instances. CUDA and CDI number them by their slots, which are given again after a repartition."""
    for instance in gpu.instances:
        index = f"{gpu.index}:{instance.slot}"
        profile = _PROFILE.search(instance.name or "")
        told = {
            "index": index,
            "uuid": instance.uuid,
            **_facts(gpu, snapshot, machine),
            "memory.total_bytes": instance.memory_bytes,
            "mig.profile": profile[1] if profile else None,
            "mig.parent": gpu.uuid,
            "mig.gpu_instance": instance.gpu_instance,
            "mig.compute_instance": instance.compute_instance,
        }
        verdict = faults.verdict_of_instance(gpu, instance)
        yield Device(
            properties={name: str(value) for name, value in told.items() if value is not None},
            id=instance.uuid,
            health=verdict.health,
            reason=verdict.reason,
            env=cuda_environment(instance.uuid),
            cdi=_cdi((instance.uuid, index), machine),
            part_of=_whole_name(gpu),
        )


def _whole_name(gpu: Gpu) -> str | None:
    """What parts call their GPU: in MIG mode no device has its UUID, and the PCI address is a name that others know."""
    bus_id = pci.normal_bus_id(gpu.bus_id)
    return f"pci:{bus_id}" if bus_id else gpu.uuid


def _unread(gpu: Gpu, verdict: Verdict, earlier: Iterable[Device]) -> Iterator[Device]:
    """The MIG instances that a GPU had, where NVML did not tell which it has now: they are not gone."""
    if not gpu.unreadable.keys().isdisjoint(("mig", "instances")):
        for device in earlier:
            if device.part_of == _whole_name(gpu):
                yield msgspec.structs.replace(device, health=verdict.health, reason=verdict.reason)


def _facts(gpu: Gpu, snapshot: Snapshot, machine: Machine) -> dict[str, str]:
    """What a GPU and its instances share."""
    bus_id = pci.normal_bus_id(gpu.bus_id)
    told = {
        "model": gpu.name,
        "pci.bus_id": bus_id,
        "numa_node": machine.numa_nodes.get(bus_id or ""),
        "minor": None if gpu.minor is None else str(gpu.minor),
        "compute_capability": gpu.compute_capability,
        "driver_version": snapshot.driver_version,
        "cuda_version": snapshot.cuda_version,
    }
    return {name: value for name, value in told.items() if value}


def _cdi(names: Iterable[str], machine: Machine) -> tuple[str, ...]:
    """The first of the names that a spec defines."""
    name = next((name for name in names if name in machine.cdi_names), None)
    return () if name is None else (f"{cdi.KIND}={name}",)


def _links(snapshot: Snapshot) -> dict[str, dict[str, str]]:
    """The properties about NVLink, by bus id. In MIG mode a GPU uses none."""
    gpus = {
        bus_id: gpu
        for gpu in snapshot.gpus
        if gpu.failure is None and not gpu.mig and (bus_id := pci.normal_bus_id(gpu.bus_id))
    }
    ends = {
        bus_id: [end if end == nvlink.SWITCH else pci.normal_bus_id(end) or "" for end in gpu.nvlinks]
        for bus_id, gpu in gpus.items()
    }
    reached = nvlink.peers(ends)
    return {
        bus_id: {
            "nvlink.group": ",".join(map(str, numbers)),
            "nvlink.peers": ",".join(str(index) for index in sorted(gpus[other].index for other in reached[bus_id])),
        }
        for bus_id, numbers in nvlink.groups(reached).items()
        if numbers
    }


# --- GPUs of which NVML does not speak ---


def _silent(gpu: Gpu, verdict: Verdict, earlier: Sequence[Device]) -> list[Device]:
    """What is known of a GPU that NVML refuses to speak of: by its UUID, its bus id, or at last its index. Empty if
    nothing is."""
    bus_id = pci.normal_bus_id(gpu.bus_id)
    wholes = [device for device in earlier if _is_whole(device)]
    for name, value in (("uuid", gpu.uuid), ("pci.bus_id", bus_id), ("index", str(gpu.index))):
        for device in wholes:
            if value and device.properties.get(name) == value:
                return _with_parts(device, earlier, verdict)
    if not gpu.uuid and bus_id is None:
        return []
    properties = {"index": str(gpu.index), "uuid": gpu.uuid, "pci.bus_id": bus_id}
    return [_unknown_before({name: value for name, value in properties.items() if value}, verdict)]


def _missing(
    machine: Machine, found: Sequence[Device], earlier: Sequence[Device], nameless: Iterable[tuple[Gpu, Verdict]]
) -> Iterator[Device]:
    """The GPUs that NVML does not name although the kernel has them, or nobody knows whether it has. Of these the
    nameless ones are the first: NVML and the kernel's list have the same order."""
    left = list(nameless)
    names = {name for device in found for name in _names(device)}
    unnamed = [device for device in earlier if _is_whole(device) and names.isdisjoint(_names(device))]
    for bus_id, function in (machine.functions or {}).items():
        if f"pci:{bus_id}" in names or function.uuid in names:
            continue
        known = next((device for device in unnamed if f"pci:{bus_id}" in device.aliases), None)
        if known is None and not function.is_offered:
            continue
        gpu, verdict = left.pop(0) if left else (None, Verdict(Health.UNHEALTHY, FELL_OFF))
        if known is not None:
            yield from _with_parts(known, earlier, verdict)
        else:
            index = None if gpu is None else str(gpu.index)
            properties = {"index": index, "uuid": function.uuid, "pci.bus_id": bus_id}
            yield _unknown_before({name: value for name, value in properties.items() if value}, verdict)
    for gpu, verdict in left:
        yield _unknown_before({"index": str(gpu.index)}, verdict)
    for device in unnamed if machine.functions is None else ():
        yield from _with_parts(device, earlier, Verdict(Health.UNKNOWN, NOT_NAMED))


def _unknown_before(properties: dict[str, str], verdict: Verdict) -> Device:
    aliases = (f"pci:{properties['pci.bus_id']}",) if "pci.bus_id" in properties else ()
    return Device(
        properties=properties,
        id=properties.get("uuid") or (aliases[0] if aliases else None),
        aliases=aliases,
        health=verdict.health,
        reason=verdict.reason,
    )


def _with_parts(whole: Device, earlier: Iterable[Device], verdict: Verdict) -> list[Device]:
    """A GPU as it was known, and its instances, with another verdict."""
    return [
        msgspec.structs.replace(device, health=verdict.health, reason=verdict.reason)
        for device in earlier
        if device is whole or device.part_of in _names(whole)
    ]


def _is_whole(device: Device) -> bool:
    return device.part_of is None


def _name(device: Device) -> str:
    return device.id or f"index {device.properties.get('index')}"


def _names(device: Device) -> Collection[str]:
    return {_name(device), *device.aliases}
