"""Shared by `outfitter kubernetes` and `outfitter yarn`: the configured resources and their drivers."""

from __future__ import annotations

from outfitter_drivers.api import ExternalResourceDriver
from outfitter_service.cli._lib.errors import warn
from outfitter_service.config import ConfigurationError, ResourceConfig, inspect
from outfitter_service.runtime.drivers.building import build, build_error_text


def configured(path: str | None) -> tuple[ResourceConfig, ...]:
    """The configured resources. All must be valid, because a missing one in a request would go unnoticed.

    Raises:
        ConfigurationError: any resource is invalid.
    """
    inspection = inspect(path)
    if inspection.settings is None or inspection.errors:
        raise ConfigurationError(inspection.errors)
    return inspection.settings.resources


def driver_of(config: ResourceConfig) -> ExternalResourceDriver | None:
    """The resource's driver, used only for its deployment fields and never for hardware.

    If it cannot be built, as on a machine without the devices, log a warning and return None.
    """
    if config.driver is None:
        return None
    try:
        return build(config, lambda _: None)
    except Exception as error:  # noqa: BLE001 - foreign code: any error concerns this resource only
        warn(f"resource {config.name} is not in the request unless its key is configured: {build_error_text(error)}")
        return None
