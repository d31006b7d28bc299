"""Loads the configured drivers, and makes the core's specification of each resource.

Only configured drivers are imported. A driver that cannot be built makes its resource misconfigured; the other
resources are served.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import structlog
from msgspec import structs

from outfitter_drivers import api, registry
from outfitter_service.config import ResourceConfig
from outfitter_service.core.model import OnFailure, ResourceSpec, SpecState
from outfitter_service.runtime.drivers.building import build
from outfitter_service.runtime.drivers.supervisor import Loaded
from outfitter_service.runtime.drivers.translation import words_of

log = structlog.get_logger("outfitter.drivers")


def load(resources: Iterable[ResourceConfig], *, scope: str = "host") -> dict[str, Loaded]:
    """Every listed resource, with its driver if it is in effect and has one."""
    return {resource.name: _load(resource, scope) for resource in resources}


def _load(resource: ResourceConfig, scope: str) -> Loaded:
    spec = ResourceSpec(
        name=resource.name,
        amount=resource.amount,
        state=SpecState(resource.state),
        reason=resource.reason,
        shared=resource.sharing == "shared",
        on_failure=OnFailure(resource.on_failure),
    )
    if spec.state != SpecState.OK or resource.driver is None:
        if spec.state != SpecState.OK:
            log.warning("resource is not served", resource=spec.name, state=str(spec.state), reason=spec.reason)
        return Loaded(spec=spec)
    try:
        driver = build(resource, lambda warning: _log_warning(resource, warning))
        if resource.sharing == "shared" and isinstance(driver, api.Preparation):
            raise ValueError(
                "sharing = shared does not go with its driver, which prepares devices for one worker at a time and "
                "takes them back when that worker ends; valid is sharing = exclusive, or a driver without prepare"
            )
        if scope == "cluster" and not driver.looks_from_afar:
            raise ValueError(
                f"driver {resource.driver} looks at the machine that it runs on, so it cannot serve a manager of "
                "cluster scope; valid is one that looks from afar (static), or scope = host"
            )
        hint = _hint(driver)
    except (registry.DriverLookupError, ValueError) as error:
        message = words_of(error)
        reason = f"external-resource.{resource.name}: {message}"
        log.error("driver cannot be built, its resource is not served", resource=spec.name, error=message)
        return Loaded(spec=structs.replace(spec, state=SpecState.MISCONFIGURED, reason=reason))
    except (Exception, SystemExit) as error:
        # a factory is foreign code: any error of it, also SystemExit, concerns this resource only
        message = f"{type(error).__name__}: {words_of(error)}"
        reason = f"external-resource.{resource.name}: its driver cannot be built: {message}"
        log.exception("driver cannot be built, its resource is not served", resource=spec.name)
        return Loaded(spec=structs.replace(spec, state=SpecState.MISCONFIGURED, reason=reason))
    return Loaded(
        spec=structs.replace(
            spec,
            on_demand=not isinstance(driver, api.Inventory),
            prepares=isinstance(driver, api.Preparation),
            confirms=isinstance(driver, api.Preparation | api.InUseCheck),
            hint=hint,
        ),
        driver=driver,
    )


def _log_warning(resource: ResourceConfig, warning: str) -> None:
    log.warning(f"{resource.key('param.')}{warning}", resource=resource.name)


def _hint(driver: api.ExternalResourceDriver) -> str | None:
    """The driver's hint. Checks the driver's properties once, because they are foreign code.

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
