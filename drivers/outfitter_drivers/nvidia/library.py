"""NVIDIA's Python package for NVML, in the child process only.

The package nvidia-ml-py has the module `pynvml`. So have others, which are older or wrap it, and they lack functions
or give other values.
"""

from __future__ import annotations

import importlib
from typing import Any

NEEDED = (
    "nvmlInit",
    "nvmlShutdown",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlEventSetWait_v2",
)
"""Functions that the module must have. Whether NVIDIA's library has them is another question."""

OTHER_PACKAGE = (
    "the Python module pynvml is not that of nvidia-ml-py 12.560 or newer, but of another or an older package "
    "({where}); uninstall pynvml and nvidia-ml-py3, and install outfitter[nvidia]"
)


class UnusableLibraryError(Exception):
    """The package is not there, or another one has its name."""


def load() -> Any:
    """The module `pynvml` of nvidia-ml-py.

    Raises:
        UnusableLibraryError: see there.
    """
    try:
        module: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnusableLibraryError(f"the package nvidia-ml-py is not there ({error}); install outfitter[nvidia]") from (
            error
        )
    if hasattr(module, "__path__") or not all(hasattr(module, name) for name in NEEDED):
        raise UnusableLibraryError(OTHER_PACKAGE.format(where=getattr(module, "__file__", None) or "built in"))
    return module
