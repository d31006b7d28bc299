"""NVIDIA's library as a fake below the real nvidia-ml-py, in a process of its own: see `testing`.

It answers from a file, which it reads at each call, so that a test changes the machine under a living process.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MIB = 1024 * 1024
TIMEOUT, NOT_FOUND, NOT_SUPPORTED, SIZE = 10, 6, 3, 7


class FakeInstance(Struct, kw_only=True):
    """A MIG device. `slot`: its index among its GPU's."""

    slot: int
    uuid: str
    profile: str = "1g.18gb"
    memory_mib: int = 16384
    gpu_instance: int = 1
    compute_instance: int = 0
    processes: list[int] = []


class FakeGpu(Struct):
    """A GPU: an H200 as NVML describes it."""

    number: int
    uuid: str = ""
    bus_id: str = ""
    name: str = "NVIDIA H200"
    memory_mib: int = 143771
    compute_capability: tuple[int, int] = (9, 0)
    mig: tuple[int, int] | None = (0, 0)
    """The current and the pending mode. None: it has no MIG."""
    instances: list[FakeInstance] = []
    recovery_action: int | None = 0
    """None: the driver does not know this field."""
    remapping_failed: int | None = 0
    remapping_pending: int | None = 0
    retired_pending: int | None = None
    links: list[str] = msgspec.field(default_factory=lambda: ["switch"] * 18)
    processes: list[int] = []
    graphics: list[int] = []
    numa_node: int = 0
    lost: int = 0
    """The code with which NVML refuses its handle."""
    codes: dict[str, int] = {}
    """By function: a code that it returns for this GPU."""
    is_listed: bool = True
    """Whether NVML counts it."""
    is_bound: bool = True
    """Whether the kernel's driver has its PCI function."""

    def __post_init__(self) -> None:
        self.uuid = self.uuid or f"GPU-{self.number:08x}-0000-4000-8000-{self.number:012x}"
        self.bus_id = self.bus_id or f"0000:{0x19 + 0x11 * self.number:02x}:00.0"


class FakeEvent(Struct, kw_only=True):
    """An Xid, unless `kind` says otherwise."""

    gpu: int
    data: int = 0
    kind: int = 8
    gpu_instance: int = 0xFFFFFFFF
    compute_instance: int = 0xFFFFFFFF


class State(Struct, kw_only=True):
    """All that NVML answers."""

    gpus: list[FakeGpu]
    driver_version: str = "570.124.06"
    cuda: int = 12080
    init: int = 0
    """The code of `nvmlInit`. 12: there is no library."""
    hangs: bool = False
    """Every call hangs."""
    missing: list[str] = []
    """Functions that an old driver does not have."""
    codes: dict[str, int] = {}
    """By function: a code that it returns."""
    events: list[FakeEvent] = []
    answer_s: float = 0.0
    """Seconds that a look takes."""


class FakeLibrary:
    """Stands for `libnvidia-ml.so.1`: each attribute is a C function, called by nvidia-ml-py with ctypes arguments."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told = 0
        self._handles: dict[str, int] = {}
        self._uuids: dict[int, str] = {}
        self._read: tuple[int, State, dict[str, FakeGpu]] | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(type(self), f"_{name}", None)
        if function is None or name in self._state().missing:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            state = self._state()
            while state.hangs:
                time.sleep(0.01)
                state = self._state()
            gpu = self._gpu(arguments[0]) if arguments and _is_handle(arguments[0]) else None
            if code := state.codes.get(name) or (gpu is not None and gpu.codes.get(name)):
                return int(code)
            return int(function(self, state, *arguments))

        return call

    def _state(self) -> State:
        return self._now()[0]

    def _now(self) -> tuple[State, dict[str, FakeGpu]]:
        """What the file says, and the GPU of each UUID: its own, and its instances'."""
        changed_at = self._path.stat().st_mtime_ns
        if self._read is None or self._read[0] != changed_at:
            state = msgspec.json.decode(self._path.read_bytes(), type=State)
            gpus = {uuid: gpu for gpu in state.gpus for uuid in (gpu.uuid, *[each.uuid for each in gpu.instances])}
            self._read = changed_at, state, gpus
        return self._read[1:]

    # --- handles: numbers that stand for a GPU or a MIG instance of this moment ---

    def _handle(self, uuid: str) -> int:
        number = self._handles.setdefault(uuid, len(self._handles) + 1)
        self._uuids[number] = uuid
        return number

    def _gpu(self, handle: Any) -> FakeGpu | None:
        return self._now()[1].get(self._uuids.get(_number(handle), ""))

    def _of(self, handle: Any) -> FakeGpu | FakeInstance | None:
        gpu = self._gpu(handle)
        uuid = self._uuids.get(_number(handle))
        return next((each for each in gpu.instances if each.uuid == uuid), gpu) if gpu else None

    # --- NVML's functions ---

    def _nvmlInitWithFlags(self, state: State, flags: int) -> int:
        return state.init

    def _nvmlShutdown(self, state: State) -> int:
        return 0

    def _nvmlErrorString(self, state: State, code: Any) -> bytes:
        return b"fake error"

    def _nvmlSystemGetDriverVersion(self, state: State, buffer: Any, size: Any) -> int:
        time.sleep(state.answer_s)
        buffer.value = state.driver_version.encode()
        return 0

    def _nvmlSystemGetCudaDriverVersion_v2(self, state: State, version: Any) -> int:
        version._obj.value = state.cuda
        return 0

    def _nvmlDeviceGetCount_v2(self, state: State, count: Any) -> int:
        count._obj.value = sum(gpu.is_listed for gpu in state.gpus)
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, state: State, index: Any, handle: Any) -> int:
        gpu: FakeGpu = [gpu for gpu in state.gpus if gpu.is_listed][index.value]
        if not gpu.lost:
            _point(handle, self._handle(gpu.uuid))
        return gpu.lost

    def _nvmlDeviceGetUUID(self, state: State, handle: Any, buffer: Any, size: Any) -> int:
        device = self._of(handle)
        buffer.value = device.uuid.encode() if device else b""
        return 0 if device else 2

    def _nvmlDeviceGetName(self, state: State, handle: Any, buffer: Any, size: Any) -> int:
        gpu, device = self._gpu(handle), self._of(handle)
        name = gpu.name if gpu else ""
        buffer.value = (f"{name} MIG {device.profile}" if isinstance(device, FakeInstance) else name).encode()
        return 0

    def _nvmlDeviceGetPciInfo_v3(self, state: State, handle: Any, info: Any) -> int:
        gpu = self._gpu(handle)
        info._obj.busId = _nvml_bus_id(gpu.bus_id) if gpu else b""
        return 0

    def _nvmlDeviceGetMinorNumber(self, state: State, handle: Any, minor: Any) -> int:
        gpu = self._gpu(handle)
        minor._obj.value = gpu.number if gpu else 0
        return 0

    def _nvmlDeviceGetMemoryInfo(self, state: State, handle: Any, memory: Any) -> int:
        device = self._of(handle)
        memory._obj.total = device.memory_mib * MIB if device else 0
        return 0

    def _nvmlDeviceGetCudaComputeCapability(self, state: State, handle: Any, major: Any, minor: Any) -> int:
        gpu = self._gpu(handle)
        major._obj.value, minor._obj.value = gpu.compute_capability if gpu else (0, 0)
        return 0

    def _nvmlDeviceGetMigMode(self, state: State, handle: Any, current: Any, pending: Any) -> int:
        gpu = self._gpu(handle)
        if gpu is None or gpu.mig is None:
            return NOT_SUPPORTED
        current._obj.value, pending._obj.value = gpu.mig
        return 0

    def _nvmlDeviceGetMaxMigDeviceCount(self, state: State, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def _nvmlDeviceGetMigDeviceHandleByIndex(self, state: State, handle: Any, index: Any, instance: Any) -> int:
        gpu = self._gpu(handle)
        for each in gpu.instances if gpu else ():
            if each.slot == index.value:
                _point(instance, self._handle(each.uuid))
                return 0
        return NOT_FOUND

    def _nvmlDeviceGetGpuInstanceId(self, state: State, handle: Any, number: Any) -> int:
        device = self._of(handle)
        number._obj.value = device.gpu_instance if isinstance(device, FakeInstance) else 0
        return 0

    def _nvmlDeviceGetComputeInstanceId(self, state: State, handle: Any, number: Any) -> int:
        device = self._of(handle)
        number._obj.value = device.compute_instance if isinstance(device, FakeInstance) else 0
        return 0

    def _nvmlDeviceGetFieldValues(self, state: State, handle: Any, count: Any, values: Any) -> int:
        gpu = self._gpu(handle)
        told = {} if gpu is None else {230: gpu.recovery_action, 145: gpu.remapping_failed, 144: gpu.remapping_pending}
        for value in values._obj:
            number = told.get(value.fieldId)
            value.nvmlReturn = NOT_SUPPORTED if number is None else 0
            value.value.uiVal = number or 0
        return 0

    def _nvmlDeviceGetRetiredPagesPendingStatus(self, state: State, handle: Any, pending: Any) -> int:
        gpu = self._gpu(handle)
        if gpu is None or gpu.retired_pending is None:
            return NOT_SUPPORTED
        pending._obj.value = gpu.retired_pending
        return 0

    def _nvmlDeviceGetNvLinkState(self, state: State, handle: Any, link: int, is_active: Any) -> int:
        gpu = self._gpu(handle)
        if gpu is None or link >= len(gpu.links):
            return NOT_SUPPORTED
        is_active._obj.value = bool(gpu.links[link])
        return 0

    def _nvmlDeviceGetNvLinkRemoteDeviceType(self, state: State, handle: Any, link: int, kind: Any) -> int:
        gpu = self._gpu(handle)
        kind._obj.value = 2 if gpu and gpu.links[link] == "switch" else 0
        return 0

    def _nvmlDeviceGetNvLinkRemotePciInfo_v2(self, state: State, handle: Any, link: int, info: Any) -> int:
        gpu = self._gpu(handle)
        info._obj.busId = _nvml_bus_id(gpu.links[link]) if gpu else b""
        return 0

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, state: State, handle: Any, count: Any, infos: Any) -> int:
        device = self._of(handle)
        return _list(device.processes if device else [], count, infos)

    _nvmlDeviceGetComputeRunningProcesses_v2 = _nvmlDeviceGetComputeRunningProcesses_v3

    def _nvmlDeviceGetGraphicsRunningProcesses_v3(self, state: State, handle: Any, count: Any, infos: Any) -> int:
        device = self._of(handle)
        return _list(device.graphics if isinstance(device, FakeGpu) else [], count, infos)

    def _nvmlDeviceGetMPSComputeRunningProcesses_v3(self, state: State, handle: Any, count: Any, infos: Any) -> int:
        return _list([], count, infos)

    def _nvmlEventSetCreate(self, state: State, event_set: Any) -> int:
        self._told = len(state.events)
        _point(event_set, 1)
        return 0

    def _nvmlDeviceGetSupportedEventTypes(self, state: State, handle: Any, kinds: Any) -> int:
        kinds._obj.value = 0xFFFF
        return 0

    def _nvmlDeviceRegisterEvents(self, state: State, handle: Any, kinds: Any, event_set: Any) -> int:
        return 0

    def _nvmlEventSetWait_v2(self, state: State, event_set: Any, data: Any, timeout_ms: Any) -> int:
        end = time.monotonic() + timeout_ms.value / 1000
        while len(state.events) <= self._told:
            if time.monotonic() >= end or state.hangs:
                return TIMEOUT
            time.sleep(0.01)
            state = self._state()
        event = state.events[self._told]
        self._told += 1
        _point_at(ctypes.addressof(data._obj), self._handle(state.gpus[event.gpu].uuid))
        data._obj.eventType, data._obj.eventData = event.kind, event.data
        data._obj.gpuInstanceId, data._obj.computeInstanceId = event.gpu_instance, event.compute_instance
        return 0


def install(path: Path) -> Any:
    """Put the fake below nvidia-ml-py in this process. Returns the module."""
    import pynvml

    module: Any = pynvml
    module.nvmlLib = FakeLibrary(path)
    module._nvmlGetFunctionPointer_cache.clear()
    return module


def _list(pids: list[int], count: Any, infos: Any) -> int:
    """As NVML lists processes: with too little room it says how many there are."""
    room, count._obj.value = count._obj.value, len(pids)
    if len(pids) > room:
        return SIZE
    for info, pid in zip(infos or (), pids, strict=False):
        info.pid = pid
    return 0


def _is_handle(argument: Any) -> bool:
    return isinstance(argument, ctypes._Pointer) and type(argument).__name__ == "LP_struct_c_nvmlDevice_t"


def _number(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _point(reference: Any, number: int) -> None:
    _point_at(ctypes.addressof(reference._obj), number)


def _point_at(address: int, number: int) -> None:
    ctypes.c_void_p.from_address(address).value = number


def _nvml_bus_id(bus_id: str) -> bytes:
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):08X}:{rest.upper()}".encode()


if __name__ == "__main__":
    from outfitter_drivers.nvidia.child import main

    main(lambda: install(Path(sys.argv[1])))
