"""Outfitter for workers: ask for external resources, get told which devices are yours, give them back.

Importing this package connects to nothing, starts nothing and changes nothing anywhere.
"""

from outfitter.context import RuntimeContext
from outfitter.errors import (
    AllocationEndedError,
    AllocationError,
    AllocationFailedError,
    AllocationNotUsableError,
    ContextStateError,
    InvalidRequestError,
    LeaseLostError,
    NoDriverError,
    NoManagerError,
    OutfitterError,
    ResourceDisabledError,
    UnknownResourceError,
    UsedAfterForkError,
    WaitedTooLongError,
)
from outfitter.infos import ExternalResourceInfos
from outfitter.operators import Changes, OperatorContext, OperatorView
from outfitter_drivers.api import ExternalResourceInfo
from outfitter_proto import __version__
from outfitter_proto.bus import BusConfigurationError, BusError, BusUnavailableError
from outfitter_proto.names import InvalidNameError
from outfitter_proto.records import Allocation

__all__ = [
    "Allocation",
    "AllocationEndedError",
    "AllocationError",
    "AllocationFailedError",
    "AllocationNotUsableError",
    "BusConfigurationError",
    "BusError",
    "BusUnavailableError",
    "Changes",
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
    "UsedAfterForkError",
    "WaitedTooLongError",
    "__version__",
]
