"""The variables that hide all devices from a command whose grant is empty.

A grant is empty where its resources stay without infos (`on-failure = no-info`). Without these variables the command
would see all devices of the machine, those of other workers, too.
"""

from __future__ import annotations

from outfitter_proto.records import Allocation

NONE_VISIBLE = {
    # CUDA ends its list at the first index that no device has; HIP and OpenCL on AMD do the same
    "CUDA_VISIBLE_DEVICES": "-1",
    "HIP_VISIBLE_DEVICES": "-1",
    "GPU_DEVICE_ORDINAL": "-1",
    # for containers that the command starts; "none" would still mount the driver
    "NVIDIA_VISIBLE_DEVICES": "void",
    # ZE_AFFINITY_MASK has no value for none
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
}
"""By variable: the vendor's value for no device."""


def hiding(record: Allocation) -> dict[str, str]:
    """The variables that hide all devices, if the worker got none; else none."""
    return {} if any(record.resources.values()) else NONE_VISIBLE
