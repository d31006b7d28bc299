"""Loads the configured drivers, and makes the core's specification of each resource.

Only configured drivers are imported. A driver that cannot be built makes its resource misconfigured; the other
resources are served.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from msgspec import structs

from outfitter_service.config import ResourceConfig
from outfitter_service.core.model import OnFailure, ResourceSpec, SpecState
from outfitter_service.runtime.drivers.building import ServableDriver, build_error_text, build_served
from outfitter_service.runtime.drivers.supervisor import Loaded

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
        replicas=resource.replicas,
        replicas_same_device=resource.replicas > 1 and resource.replicas_same_device,
        on_failure=OnFailure(resource.on_failure),
        min_healthy_s=resource.min_healthy,
        clauses=resource.clauses,
    )
    if spec.state != SpecState.OK or resource.driver is None:
        if spec.state != SpecState.OK:
            log.warning("resource is not served", resource=spec.name, state=str(spec.state), reason=spec.reason)
        return Loaded(spec=spec)
    try:
        served = build_served(resource, scope, lambda warning: _log_warning(resource, warning))
    except ValueError as error:
        message = build_error_text(error)
        reason = f"external-resource.{resource.name}: {message}"
        log.error("driver cannot be built, its resource is not served", resource=spec.name, error=message)
        return Loaded(spec=structs.replace(spec, state=SpecState.MISCONFIGURED, reason=reason))
    except Exception as error:
        # a factory is foreign code: any error of it concerns this resource only
        reason = f"external-resource.{resource.name}: its driver cannot be built: {build_error_text(error)}"
        log.exception("driver cannot be built, its resource is not served", resource=spec.name)
        return Loaded(spec=structs.replace(spec, state=SpecState.MISCONFIGURED, reason=reason))
    return with_driver(spec, served)


def with_driver(spec: ResourceSpec, served: ServableDriver) -> Loaded:
    """A resource with its driver, whose properties the core goes by."""
    return Loaded(
        spec=structs.replace(
            spec,
            on_demand=served.on_demand,
            per_worker=served.offers is not None,
            prepares=served.prepares,
            confirms=served.confirms and spec.replicas == 1,  # the others who have the device may be using it
            hint=served.hint,
        ),
        served=served,
    )


def _log_warning(resource: ResourceConfig, warning: str) -> None:
    log.warning(f"{resource.key('param.')}{warning}", resource=resource.name)
