"""Builds one resource's driver from its settings. Nothing here runs it."""

from __future__ import annotations

from collections.abc import Callable

from outfitter_drivers import api, registry
from outfitter_service.config import ResourceConfig


def build(resource: ResourceConfig, warn: Callable[[str], object]) -> api.ExternalResourceDriver:
    """The driver of a resource, from its configured factory, parameters and time limit. `warn` gets each warning of the
    factory, which begins with a setting's key, without `param.`.

    Raises:
        DriverLookupError: there is no such driver, or its factory returns none.
        ValueError: no driver is configured, or a parameter is wrong; the message says which.
        Exception: any other error of the factory.
    """
    if resource.driver is None:
        raise ValueError("no driver is configured")
    params = api.DriverParams(resource.params, directory=resource.directory)
    try:
        driver = registry.create_driver(resource.driver, params)
    finally:
        for warning in params.warnings:
            warn(warning)
    if resource.timeout is not None:
        driver.call_timeout = resource.timeout
    return driver
