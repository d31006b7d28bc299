"""Builds one resource's driver from its settings, and checks that a manager can serve it. It calls no driver."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct, structs

from outfitter_drivers import api, registry
from outfitter_drivers.settings import SettingError
from outfitter_service.config import ResourceConfig
from outfitter_service.runtime.drivers import health_script
from outfitter_service.runtime.drivers.translation import REASON_LENGTH, words_of, written


class UnservableDriverError(ValueError):
    """A driver does not go with another setting of its resource or manager."""

    def __init__(self, option: str, problem: str) -> None:
        """`option`: the option of the resource that must change. `problem`: the message."""
        super().__init__(problem)
        self.option = option


class ServableDriver(Struct, frozen=True, kw_only=True):
    """A driver that a manager can serve, and its properties. They are read once: they are foreign code, which may raise
    an error at any later time.

    `inventory`, `preparation`, `offers` and `in_use_check`: the driver if it has that interface, else None.
    """

    driver: api.ExternalResourceDriver
    timeout_s: float
    """The time limit of each call in seconds."""
    hint: str | None
    """Advice for workers that wait although the driver reported enough devices."""
    knows_holders: bool
    """It never names a device that another worker holds."""
    inventory: api.Inventory | None
    preparation: api.Preparation | None
    offers: api.Offers | None
    in_use_check: api.InUseCheck | None
    health_script: health_script.HealthScript | None = None

    @property
    def on_demand(self) -> bool:
        """Whether the driver has no inventory, and is asked for each worker."""
        return self.inventory is None

    @property
    def names_users(self) -> bool:
        """Whether the driver's looks may say who uses devices."""
        return self.inventory is not None and self.in_use_check is not None

    @property
    def prepares(self) -> bool:
        """Whether the driver prepares devices and takes them back."""
        return self.preparation is not None

    @property
    def confirms(self) -> bool:
        """Whether the driver must take devices back, or can say whether a device is still in use."""
        return self.prepares or self.in_use_check is not None


def build(resource: ResourceConfig, warn: Callable[[str], object]) -> api.ExternalResourceDriver:
    """The driver of a resource, from its configured factory, parameters and time limit. `warn` gets each warning of the
    factory, which begins with a setting's key, without `param.`.

    Raises:
        DriverLookupError: the driver does not exist, or its factory returns none.
        ValueError: no driver is configured, or a parameter is wrong; the message says which.
        Exception: any other error of the factory. It is always an `Exception`; see `registry.contained`.
    """
    if resource.driver is None:
        raise ValueError("no driver is configured")
    params = api.DriverParams(health_script.divided(resource.params)[1], directory=resource.directory)
    try:
        driver = registry.create_driver(resource.driver, params)
    finally:
        for warning in params.warnings:
            warn(warning)
    if resource.timeout is not None:
        with registry.contained():
            driver.call_timeout = resource.timeout
    return driver


def build_served(resource: ResourceConfig, scope: str, warn: Callable[[str], object]) -> ServableDriver:
    """The driver of a resource, as `build` makes it, for a manager of that scope.

    Raises:
        UnservableDriverError: a manager of that scope, or with these settings of the resource, cannot serve it.
        ValueError: as `build`, or a property of the driver has a wrong value.
        Exception: as `build`, or any error of a property.
    """
    driver = build(resource, warn)
    served = inspected(driver)
    with registry.contained():
        if resource.sharing == "shared" and served.prepares:
            raise UnservableDriverError(
                "sharing",
                "sharing = shared does not go with its driver, which prepares devices for one worker at a time and "
                "takes them back when that worker ends; valid is sharing = exclusive, or a driver without prepare",
            )
        if resource.replicas > 1:
            _check_replicas(resource, served)
        if resource.clauses and served.on_demand:
            raise UnservableDriverError(
                f"where.{resource.clauses.where[0][0]}" if resource.clauses.where else "same",
                "where and same do not go with its driver, which names devices only when it is asked for some; leave "
                "them out, or configure a driver that lists its devices",
            )
        if scope == "cluster" and not driver.looks_from_afar:
            raise UnservableDriverError(
                "driver-factory.class",
                f"driver {resource.driver} looks at the machine that it runs on, so it cannot serve a manager of "
                "cluster scope; valid is one that looks from afar (static), or scope = host",
            )
    script = health_script.read(health_script.divided(resource.params)[0], resource.directory, warn)
    if script is not None:
        _check_script(served, scope)
    return structs.replace(served, health_script=script)


def _check_script(served: ServableDriver, scope: str) -> None:
    """Check that a driver may have a health script, in a manager of that scope.

    Raises:
        SettingError: it may not.
    """
    if served.on_demand:
        raise SettingError(
            health_script.SCRIPT,
            "does not go with its driver, which is asked for each worker and has no list of devices; valid is a driver "
            "with a list, or a discovery script that leaves out what is ill",
        )
    if scope == "cluster":
        raise SettingError(
            health_script.SCRIPT,
            "looks at the machine that it runs on, so it does not go with a manager of cluster scope; valid is scope = "
            "host",
        )


def _check_replicas(resource: ResourceConfig, served: ServableDriver) -> None:
    """Check that a resource's devices can be lent several times.

    Raises:
        UnservableDriverError: they cannot.
    """
    obstacle = None
    if resource.sharing == "shared":
        obstacle = "sharing = shared, which lends each device to everybody"
    elif served.prepares:
        obstacle = "its driver, which prepares devices for one worker at a time"
    elif served.on_demand:
        obstacle = "its driver, which has no inventory and is asked for each worker"
    if obstacle is not None:
        raise UnservableDriverError(
            "replicas", f"replicas = {resource.replicas} does not go with {obstacle}; valid is replicas = 1"
        )


def inspected(driver: api.ExternalResourceDriver) -> ServableDriver:
    """The driver with its properties, each read and checked once.

    Raises:
        ValueError: a property has a wrong value.
        Exception: any error of a property.
    """
    with registry.contained():
        hint: object = driver.not_granted_hint
        if not isinstance(hint, str | None):
            raise ValueError(f"its driver's not_granted_hint is {hint!r}; valid is a text, or None")
        if not isinstance(knows := driver.knows_holders, bool):
            raise ValueError(f"its driver's knows_holders is {knows!r}; valid is True or False")
        return ServableDriver(
            driver=driver,
            timeout_s=_timeout_s(driver),
            hint=None if hint is None else written(hint[:REASON_LENGTH]),
            knows_holders=knows,
            inventory=driver if isinstance(driver, api.Inventory) else None,
            preparation=driver if isinstance(driver, api.Preparation) else None,
            offers=driver if isinstance(driver, api.Offers) else None,
            in_use_check=driver if isinstance(driver, api.InUseCheck) else None,
        )


def build_error_text(error: Exception) -> str:
    """Why a driver cannot be built, for people. `error`: an error of `build` or `build_served`. The message of a
    ValueError needs no name of its class."""
    words = words_of(error)
    if isinstance(error, ValueError | registry.DriverExitError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _timeout_s(driver: api.ExternalResourceDriver) -> float:
    timeout: object = driver.call_timeout
    if isinstance(timeout, int | float):
        with suppress(OverflowError):
            seconds = float(timeout)
            if 0 < seconds < math.inf:
                return seconds
    raise ValueError(f"its driver's call_timeout is {timeout!r}; valid is a number of seconds above 0")
