"""What NVML says of a machine at one moment, as values. The child writes them, the parent reads them.

The parent takes them for foreign bytes: each text, number and list has a bound.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MOST_GPUS = 256
MOST_INSTANCES = 64
"""Of one GPU. NVML allows 7 or 8 today."""
MOST_PROCESSES = 4096
"""That are named of one device."""
MOST_EVENTS = 256
LARGEST = 2**63 - 1

Text = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=LARGEST)]
Code = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""What an NVML function returns: nvml.h, `nvmlReturn_t`."""


class Processes(Struct, frozen=True, kw_only=True):
    """Who uses a device, by NVML's lists. Each process once, as this process's PID namespace numbers it; 0: a process
    that NVML does not number."""

    pids: Annotated[tuple[Number, ...], Meta(max_length=MOST_PROCESSES)] = ()
    """Of the lists of compute and MPS processes. What is listed as graphics only is a display's."""
    unsaid: Text | None = None
    """Why nobody can tell whether more compute. None: these are all."""


class MigInstance(Struct, frozen=True, kw_only=True):
    """A MIG device: a compute instance of a GPU instance."""

    slot: Number
    """Its index among its GPU's MIG devices. NVML gives it to another one after a repartition."""
    uuid: Text
    name: Text | None = None
    """Such as `NVIDIA H200 MIG 1g.18gb`."""
    memory_bytes: Number | None = None
    gpu_instance: Number | None = None
    compute_instance: Number | None = None
    processes: Processes = Processes()


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU. A field is None where NVML does not support it, or does not tell."""

    index: Number
    failure: Code | None = None
    """The code with which NVML refuses to speak of it at all. Then only what it told before is set."""
    unreadable: Annotated[dict[Text, Code], Meta(max_length=16)] = {}
    """Fields that decide on its health, and the code with which NVML did not tell them."""
    uuid: Text | None = None
    bus_id: Text | None = None
    """As NVML writes it, such as `00000000:0C:00.0`."""
    name: Text | None = None
    minor: Number | None = None
    memory_bytes: Number | None = None
    compute_capability: Text | None = None
    mig: bool | None = None
    """Whether it is in MIG mode."""
    mig_pending: bool | None = None
    """The mode after its next reset."""
    recovery_action: Number | None = None
    remapping_failed: bool | None = None
    remapping_pending: bool | None = None
    retired_pages_pending: bool | None = None
    nvlinks: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """The other ends of its active NVLinks: bus ids of GPUs, and `switch` for an NVSwitch."""
    instances: Annotated[tuple[MigInstance, ...], Meta(max_length=MOST_INSTANCES)] = ()
    processes: Processes = Processes()


class Snapshot(Struct, frozen=True, kw_only=True):
    """One look."""

    driver_version: Text | None = None
    cuda_version: Text | None = None
    """The newest that the driver supports, such as `12.8`."""
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=MOST_GPUS)] = ()
    unwatched: Text | None = None
    """Why NVML tells no events. None: it does."""


class Event(Struct, frozen=True, kw_only=True):
    """Something that NVML said of itself: nvml.h, `nvmlEventData_t`. It is a reason to look, and no verdict."""

    uuid: Text | None
    """Of the GPU. None: NVML told of which one, but nobody knows that handle."""
    kind: Number
    data: Number = 0
    """The code, if `kind` is that of an Xid."""
    gpu_instance: Number | None = None
    compute_instance: Number | None = None

    @property
    def xid(self) -> int | None:
        return self.data if self.kind == XID else None


XID = 0x8
"""`nvmlEventTypeXidCriticalError`."""
