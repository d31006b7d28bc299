"""Reads a snapshot from NVML, in the child process.

One bad GPU costs that GPU: a code that NVML returns for it becomes a value of its own, and the list goes on. Which code
means what follows nvml.h (`nvmlReturn_t`). A function that an old driver does not have is a value that is not told.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outfitter_drivers.nvidia.codes import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
)
from outfitter_drivers.nvidia.protocol import short
from outfitter_drivers.nvidia.snapshot import (
    MOST_GPUS,
    MOST_INSTANCES,
    MOST_PROCESSES,
    Gpu,
    MigInstance,
    Processes,
    Snapshot,
)

FIELD_REMAPPING_PENDING, FIELD_REMAPPING_FAILED, FIELD_RECOVERY_ACTION = 144, 145, 230
"""nvml.h, `NVML_FI_DEV_REMAPPED_PENDING`, `…_FAILURE` and `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`."""
MOST_LINKS = 36
SWITCH = 2
"""`NVML_NVLINK_DEVICE_TYPE_SWITCH`."""

_NOT_TOLD = frozenset((INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, FUNCTION_NOT_FOUND, 26))
"""Codes of what this GPU or this driver does not have. 26: deprecated."""
_ENDS_A_GPU = frozenset((GPU_IS_LOST, RESET_REQUIRED))
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""include/linux/proc_ns.h, `PROC_PID_INIT_INO`."""
_LIES_ABOUT_PROCESSES = re.compile(r"535\.(?:4[3-9]|[5-7][0-9]|8[0-5])\.")
"""These drivers name processes that do not exist and miss others: wookayin/gpustat#161."""


class _GpuFailedError(Exception):
    """NVML speaks of this GPU no more."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Reader:
    """Reads what `nvml`, the module of nvidia-ml-py, says. NVML is initialised."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._links: dict[str, tuple[str, ...]] = {}
        self._driver_version: str | None = None
        self.handles: dict[str, Any] = {}
        """Those of the last look, by UUID. They stay valid until NVML is shut down."""

    def look(self) -> Snapshot:
        """All GPUs. Raises the module's `NVMLError` if NVML does not even tell how many there are."""
        nvml = self._nvml
        self._driver_version = self._told(nvml.nvmlSystemGetDriverVersion, _text)
        gpus = tuple(self._gpu(index) for index in range(min(nvml.nvmlDeviceGetCount(), MOST_GPUS)))
        return Snapshot(
            driver_version=self._driver_version,
            cuda_version=self._told(nvml.nvmlSystemGetCudaDriverVersion_v2, _cuda_version),
            gpus=gpus,
        )

    def _gpu(self, index: int) -> Gpu:
        told: dict[str, Any] = {}
        unreadable: dict[str, int] = {}
        try:
            told.update(self._values(index, unreadable))
        except _GpuFailedError as error:
            return Gpu(index=index, failure=error.code, unreadable=unreadable, **told)
        return Gpu(index=index, unreadable=unreadable, **told)

    def _values(self, index: int, unreadable: dict[str, int]) -> Iterator[tuple[str, Any]]:
        """The fields of a GPU, what identifies it first.

        Raises:
            _GpuFailedError: NVML does not give its handle or its UUID, or says that it is lost.
        """
        nvml = self._nvml
        handle = self._needed(nvml.nvmlDeviceGetHandleByIndex, index)
        if (bus_id := self._told(nvml.nvmlDeviceGetPciInfo_v3, _bus_id, handle)) is not None:
            yield "bus_id", bus_id
        uuid = _text(self._needed(nvml.nvmlDeviceGetUUID, handle))
        yield "uuid", uuid
        self.handles[uuid] = handle
        yield "name", self._told(nvml.nvmlDeviceGetName, _text, handle)
        yield "minor", self._told(nvml.nvmlDeviceGetMinorNumber, int, handle)
        yield "memory_bytes", self._told(nvml.nvmlDeviceGetMemoryInfo, _total, handle)
        yield "compute_capability", self._told(nvml.nvmlDeviceGetCudaComputeCapability, _dotted, handle)
        modes = self._told(nvml.nvmlDeviceGetMigMode, tuple, handle, name="mig", unreadable=unreadable)
        if modes is not None:
            yield "mig", bool(modes[0])
            yield "mig_pending", bool(modes[1])
        yield from self._levels(handle, unreadable)
        yield "nvlinks", self._nvlinks(uuid, handle)
        if modes is not None and modes[0]:
            yield "instances", tuple(self._instances(handle, unreadable))
        yield "processes", self._processes(handle)

    def _levels(self, handle: Any, unreadable: dict[str, int]) -> Iterator[tuple[str, Any]]:
        nvml = self._nvml
        fields = {
            FIELD_RECOVERY_ACTION: "recovery_action",
            FIELD_REMAPPING_FAILED: "remapping_failed",
            FIELD_REMAPPING_PENDING: "remapping_pending",
        }
        values = self._told(
            nvml.nvmlDeviceGetFieldValues, list, handle, list(fields), name="levels", unreadable=unreadable
        )
        for name, value in zip(fields.values(), values or (), strict=False):
            if value.nvmlReturn == 0:
                yield name, value.value.uiVal if name == "recovery_action" else bool(value.value.uiVal)
            else:
                self._note(name, value.nvmlReturn, unreadable)
        yield (
            "retired_pages_pending",
            self._told(
                nvml.nvmlDeviceGetRetiredPagesPendingStatus,
                bool,
                handle,
                name="retired_pages_pending",
                unreadable=unreadable,
            ),
        )

    def _instances(self, parent: Any, unreadable: dict[str, int]) -> Iterator[MigInstance]:
        nvml = self._nvml
        most = self._told(nvml.nvmlDeviceGetMaxMigDeviceCount, int, parent, name="instances", unreadable=unreadable)
        for slot in range(min(most or 0, MOST_INSTANCES)):
            handle = self._told(
                nvml.nvmlDeviceGetMigDeviceHandleByIndex, None, parent, slot, name="instances", unreadable=unreadable
            )
            if handle is None:
                continue
            uuid = self._told(nvml.nvmlDeviceGetUUID, _text, handle, name="instances", unreadable=unreadable)
            if uuid is not None:
                yield MigInstance(
                    slot=slot,
                    uuid=uuid,
                    name=self._told(nvml.nvmlDeviceGetName, _text, handle),
                    memory_bytes=self._told(nvml.nvmlDeviceGetMemoryInfo, _total, handle),
                    gpu_instance=self._told(nvml.nvmlDeviceGetGpuInstanceId, int, handle),
                    compute_instance=self._told(nvml.nvmlDeviceGetComputeInstanceId, int, handle),
                    processes=self._processes(handle),
                )

    def _nvlinks(self, uuid: str, handle: Any) -> tuple[str, ...]:
        """The other ends of its links. They are read until there are any, as NVSwitches need their fabric manager. Then
        they stay: a GPU has dozens of links."""
        ends = self._links.get(uuid) or tuple(dict.fromkeys(self._ends(handle)))
        self._links[uuid] = ends
        return ends

    def _ends(self, handle: Any) -> Iterator[str]:
        nvml = self._nvml
        for link in range(MOST_LINKS):
            is_active = self._told(nvml.nvmlDeviceGetNvLinkState, bool, handle, link)
            if is_active is None:
                return
            if not is_active:
                continue
            if self._told(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, int, handle, link) == SWITCH:
                yield "switch"
            elif (end := self._told(nvml.nvmlDeviceGetNvLinkRemotePciInfo, _bus_id, handle, link)) is not None:
                yield end

    def _processes(self, handle: Any) -> Processes:
        if _LIES_ABOUT_PROCESSES.match(self._driver_version or ""):
            return Processes(unsaid=short(f"driver {self._driver_version} lists processes that do not exist"))
        found: dict[int, None] = {}
        doubt = _doubt()
        for kind in ("Compute", "MPSCompute"):
            try:
                found.update(dict.fromkeys(self._pids(handle, kind)))
            except self._nvml.NVMLError as error:
                if error.value in _ENDS_A_GPU:
                    raise _GpuFailedError(error.value) from error
                if kind == "Compute" or error.value not in _NOT_TOLD:
                    doubt = doubt or f"NVML does not list {kind} processes ({error})"
        if len(found) > MOST_PROCESSES:
            doubt = doubt or f"there are more than {MOST_PROCESSES} processes"
        return Processes(pids=tuple(found)[:MOST_PROCESSES], unsaid=short(doubt) if doubt else None)

    def _pids(self, handle: Any, kind: str) -> Iterable[int]:
        """NVML renamed these functions with their structures. The newest that both sides know is asked."""
        versions = (getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_{v}", None) for v in ("v3", "v2"))
        *first, last = [function for function in versions if function is not None]
        for function in first:
            try:
                return [process.pid for process in function(handle)]
            except self._nvml.NVMLError as error:
                if error.value != FUNCTION_NOT_FOUND:
                    raise
        return [process.pid for process in last(handle)]

    def _needed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise _GpuFailedError(error.value) from error

    def _told(
        self,
        function: Callable[..., Any],
        value_of: Callable[[Any], Any] | None,
        *arguments: Any,
        name: str | None = None,
        unreadable: dict[str, int] | None = None,
    ) -> Any:
        """What the function says, or None. `name`: of what decides on a GPU's health, and is noted in `unreadable`."""
        try:
            value = function(*arguments)
            return value if value_of is None else value_of(value)
        except self._nvml.NVMLError as error:
            if error.value in _ENDS_A_GPU:
                raise _GpuFailedError(error.value) from error
            if name is not None and unreadable is not None:
                self._note(name, error.value, unreadable)
        except (UnicodeDecodeError, ValueError):
            pass
        return None

    @staticmethod
    def _note(name: str, code: int, unreadable: dict[str, int]) -> None:
        if code in _ENDS_A_GPU:
            raise _GpuFailedError(code)
        if code not in _NOT_TOLD:
            unreadable[name] = code


def handle_number(handle: Any) -> int | None:
    """What tells one handle from another: it is a pointer."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _doubt() -> str | None:
    """Why a process that NVML does not list here may exist."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:  # noqa: PTH116  starts quicker
            return "in a PID namespace NVML does not name processes outside"
    except OSError:
        return "the PID namespace is not known"
    return None


def _text(value: str | bytes) -> str:
    return short(value.decode("utf-8", "replace") if isinstance(value, bytes) else value)


def _bus_id(info: Any) -> str:
    return _text(info.busId)


def _total(memory: Any) -> int:
    return int(memory.total)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
