"""Builds one resource's driver from its settings, and checks that a manager can serve it. Nothing here runs it."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from outfitter_drivers import api, registry
from outfitter_service.config import ResourceConfig
from outfitter_service.runtime.drivers.translation import words_of


class UnservableDriverError(ValueError):
    """A driver does not go with another setting of its resource or manager. `option` of the resource is to blame."""

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(problem)
        self.option = option


class Served(Struct, frozen=True):
    """A driver that a manager can serve. `hint` is its `not_granted_hint`. `on_demand`: it has no inventory.
    `confirms`: it says whether a device is still in use."""

    driver: api.ExternalResourceDriver
    hint: str | None
    on_demand: bool
    prepares: bool
    confirms: bool


def build(resource: ResourceConfig, warn: Callable[[str], object]) -> api.ExternalResourceDriver:
    """The driver of a resource, from its configured factory, parameters and time limit. `warn` gets each warning of the
    factory, which begins with a setting's key, without `param.`.

    Raises:
        DriverLookupError: there is no such driver, or its factory returns none.
        ValueError: no driver is configured, or a parameter is wrong; the message says which.
        Exception: any other error of the factory. What it raises is always an `Exception`; see `registry.contained`.
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
        with registry.contained():
            driver.call_timeout = resource.timeout
    return driver


def build_served(resource: ResourceConfig, scope: str, warn: Callable[[str], object]) -> Served:
    """The driver of a resource, as `build` makes it, for a manager of that scope.

    Raises:
        UnservableDriverError: a manager of that scope, or with these settings of the resource, cannot serve it.
        ValueError: as `build`, or a property of the driver has a wrong value.
        Exception: as `build`, or any error of a property.
    """
    driver = build(resource, warn)
    with registry.contained():  # a driver's properties are foreign code, too
        prepares = isinstance(driver, api.Preparation)
        if resource.sharing == "shared" and prepares:
            raise UnservableDriverError(
                "sharing",
                "sharing = shared does not go with its driver, which prepares devices for one worker at a time and "
                "takes them back when that worker ends; valid is sharing = exclusive, or a driver without prepare",
            )
        if scope == "cluster" and not driver.looks_from_afar:
            raise UnservableDriverError(
                "driver-factory.class",
                f"driver {resource.driver} looks at the machine that it runs on, so it cannot serve a manager of "
                "cluster scope; valid is one that looks from afar (static), or scope = host",
            )
        return Served(
            driver=driver,
            hint=_hint(driver),
            on_demand=not isinstance(driver, api.Inventory),
            prepares=prepares,
            confirms=isinstance(driver, api.Preparation | api.InUseCheck),
        )


def told(error: Exception) -> str:
    """Why a driver cannot be built, from what `build` or `build_served` raised: a ValueError speaks for itself."""
    words = words_of(error)
    if isinstance(error, ValueError | registry.DriverExitError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _hint(driver: api.ExternalResourceDriver) -> str | None:
    """The driver's hint. Checks the driver's properties once.

    Raises:
        ValueError: a property has a wrong value.
        Exception: any error of a property.
    """
    timeout: object = driver.call_timeout
    if not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ValueError(f"its driver's call_timeout is {timeout!r}; valid is a number of seconds above 0")
    hint: object = driver.not_granted_hint
    if not isinstance(hint, str | None):
        raise ValueError(f"its driver's not_granted_hint is {hint!r}; valid is a text, or None")
    if not isinstance(knows := driver.knows_holders, bool):
        raise ValueError(f"its driver's knows_holders is {knows!r}; valid is True or False")
    return hint
