"""The driver contract for driver authors, re-exported from `outfitter_drivers.api`."""

from outfitter_drivers.api import (
    Device,
    DriverError,
    DriverParams,
    ExternalResourceDriver,
    ExternalResourceDriverFactory,
    ExternalResourceInfo,
    Grant,
    InUseCheck,
    Inventory,
    KubernetesRequest,
    NotEnoughDevicesError,
    PermanentDriverError,
    Preparation,
    Remarks,
    TemporaryDriverError,
    Worker,
    YarnRequest,
)
from outfitter_proto.records import Health

__all__ = [
    "Device",
    "DriverError",
    "DriverParams",
    "ExternalResourceDriver",
    "ExternalResourceDriverFactory",
    "ExternalResourceInfo",
    "Grant",
    "Health",
    "InUseCheck",
    "Inventory",
    "KubernetesRequest",
    "NotEnoughDevicesError",
    "PermanentDriverError",
    "Preparation",
    "Remarks",
    "TemporaryDriverError",
    "Worker",
    "YarnRequest",
]
