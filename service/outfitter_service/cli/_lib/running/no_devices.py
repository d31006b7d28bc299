"""The variables that hide all devices from a command whose grant is empty, or whose devices set no variable.

A grant is empty where its resources stay without infos (`on-failure = no-info`). Without these variables the command
would see all devices of the machine, those of other workers, too.
"""

from __future__ import annotations

from collections.abc import Mapping

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


_ALSO_SELECT = ("_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Other variables that select devices end in one of these."""


def hiding(record: Allocation, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that hide all devices, if no variable of the grant selects any and

    - the worker got no devices;
    - a resource that it asked for has none;
    - its devices set no variable at all.

    In the last two cases the grant is no explicit none, so a variable of the caller (`environ`) stays as it is.
    """
    if not any(record.resources.values()):
        return NONE_VISIBLE
    selects = any(name in NONE_VISIBLE or name.endswith(_ALSO_SELECT) for name in record.env)
    if selects or (record.env and all(record.resources.values()) and not record.unavailable):
        return {}
    return {name: value for name, value in NONE_VISIBLE.items() if name not in environ}
