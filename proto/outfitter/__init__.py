"""Outfitter for workers: request external resources, use the granted devices, give them back.

Importing this package connects to nothing and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outfitter_proto import __version__

if TYPE_CHECKING:
    from outfitter.context import RuntimeContext
    from outfitter.errors import (
        AllocationEndedError,
        AllocationError,
        AllocationFailedError,
        AllocationNotUsableError,
        ChoiceIgnoredError,
        ContextStateError,
        InvalidRequestError,
        LeaseLostError,
        NoDriverError,
        NoManagerError,
        OutfitterError,
        ResourceDisabledError,
        UnknownResourceError,
        UnwatchableProcessError,
        UsedAfterForkError,
        VariableNotAllowedError,
        WaitedTooLongError,
    )
    from outfitter.flink import flink_labels
    from outfitter.infos import ExternalResourceInfos
    from outfitter.operators import Changes, OperatorContext, OperatorView
    from outfitter_drivers.api import ExternalResourceInfo
    from outfitter_proto.bus import (
        BusAuthenticationError,
        BusAuthorizationError,
        BusConfigurationError,
        BusError,
        BusUnavailableError,
    )
    from outfitter_proto.names import InvalidNameError
    from outfitter_proto.records import Allocation

__all__ = [
    "Allocation",
    "AllocationEndedError",
    "AllocationError",
    "AllocationFailedError",
    "AllocationNotUsableError",
    "BusAuthenticationError",
    "BusAuthorizationError",
    "BusConfigurationError",
    "BusError",
    "BusUnavailableError",
    "Changes",
    "ChoiceIgnoredError",
    "ContextStateError",
    "ExternalResourceInfo",
    "ExternalResourceInfos",
    "InvalidNameError",
    "InvalidRequestError",
    "LeaseLostError",
    "NoDriverError",
    "NoManagerError",
    "OperatorContext",
    "OperatorView",
    "OutfitterError",
    "ResourceDisabledError",
    "RuntimeContext",
    "UnknownResourceError",
    "UnwatchableProcessError",
    "UsedAfterForkError",
    "VariableNotAllowedError",
    "WaitedTooLongError",
    "__version__",
    "flink_labels",
]

_HOMES = (
    "outfitter.errors",
    "outfitter_proto.names",
    "outfitter_proto.bus.port",
    "outfitter_drivers.api",
    "outfitter.infos",
    "outfitter.operators",
    "outfitter.context",
    "outfitter.flink",
)
"""Modules that define the names, the cheapest import first."""

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in __all__:
            for home in _HOMES:
                module = import_module(home)
                if hasattr(module, name):
                    globals()[name] = value = getattr(module, name)
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
