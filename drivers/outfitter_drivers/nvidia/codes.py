"""What NVML's functions return: nvml.h, `nvmlReturn_t`."""

from __future__ import annotations

INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
UNKNOWN = 999

_WORDS = {
    NOT_SUPPORTED: "not supported",
    NO_PERMISSION: "no permission",
    NOT_FOUND: "not found",
    DRIVER_NOT_LOADED: "the driver is not loaded",
    TIMEOUT: "timeout",
    LIBRARY_NOT_FOUND: "there is no NVML library (libnvidia-ml.so.1)",
    GPU_IS_LOST: "the GPU is lost",
    RESET_REQUIRED: "the GPU must be reset",
    VERSION_MISMATCH: "driver and library are of different versions",
    UNKNOWN: "unknown error",
}

RECOVERY_ACTIONS = (
    "None",
    "Reset",
    "Reboot",
    "Drain P2P",
    "Drain and Reset",
    "IMEX domain",
    "Bus Reset",
    "System reboot",
)
"""`nvmlDeviceGpuRecoveryAction_t`, by number. The first names are those that nvidia-smi writes."""


def in_words(code: int) -> str:
    words = _WORDS.get(code)
    return f"{words} (NVML code {code})" if words else f"NVML code {code}"


def recovery_action(number: int) -> str:
    return RECOVERY_ACTIONS[number] if number < len(RECOVERY_ACTIONS) else f"recovery action {number}"
