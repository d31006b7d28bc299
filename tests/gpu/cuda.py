"""A process that uses the GPUs that CUDA shows it: a context and some memory on each, by libcuda alone.

It prints their UUIDs, without `GPU-` or `MIG-`, as JSON, and stays until its input ends. `--pretend` takes
CUDA_VISIBLE_DEVICES for the answer. Standard library only: no CUDA toolkit is needed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import uuid

MEMORY_BYTES = 64 * 1024 * 1024


def main() -> None:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    uuids = [each.partition("-")[2] for each in shown] if "--pretend" in sys.argv else uuids_in_use()
    print(json.dumps({"pid": os.getpid(), "uuids": uuids}), flush=True)
    sys.stdin.read()


def uuids_in_use() -> list[str]:
    """Open each GPU that CUDA shows, and take memory of it.

    Functions: CUDA driver API, "Initialization", "Device Management", "Context Management", "Memory Management".
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    checked(cuda.cuInit(0), "cuInit")
    count = ctypes.c_int()
    checked(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    found: list[str] = []
    for number in range(count.value):
        device, raw, context, memory = ctypes.c_int(), (ctypes.c_ubyte * 16)(), ctypes.c_void_p(), ctypes.c_uint64()
        checked(cuda.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
        checked(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
        checked(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate_v2")
        checked(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(MEMORY_BYTES)), "cuMemAlloc_v2")
        found.append(str(uuid.UUID(bytes=bytes(raw))))
    return found


def checked(code: int, function: str) -> None:
    if code != 0:
        sys.exit(f"{function} returned {code}")


if __name__ == "__main__":
    main()
