"""What `outfitter kubernetes` and `outfitter yarn` share: the configured resources, and their drivers' say."""

from __future__ import annotations

from outfitter_drivers.api import ExternalResourceDriver
from outfitter_service.config import ConfigurationError, ResourceConfig, inspect
from outfitter_service.query.errors import warn
from outfitter_service.runtime.drivers.building import build


def configured(path: str | None) -> tuple[ResourceConfig, ...]:
    """The resources of the configuration, all of them right: a request that lacks one would go unnoticed.

    Raises:
        ConfigurationError: anything is wrong.
    """
    inspection = inspect(path)
    if inspection.settings is None or inspection.errors:
        raise ConfigurationError(inspection.errors)
    return inspection.settings.resources


def driver_of(config: ResourceConfig) -> ExternalResourceDriver | None:
    """The resource's driver, built to be asked for its deployment fields, never to look at hardware.

    Where it cannot be built (this may be another machine than the workers'), a warning says so.
    """
    if config.driver is None:
        return None
    try:
        return build(config, lambda _: None)
    except Exception as error:  # noqa: BLE001 - a third party's factory: whatever it raises is about this resource
        warn(f"resource {config.name} is left out of the request unless its key is configured: {error}")
        return None
