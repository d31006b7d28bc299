"""The keys and amounts of a request to Kubernetes or YARN.

A configured key takes precedence over the driver's. A resource without a key, or switched off, is left out. Flink's
`ExternalResourceUtils.getExternalResourceConfigurationKeys` does the same, but we refuse amounts that Flink rounds (0.5
to "0").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outfitter_drivers import registry
from outfitter_drivers.api import ExternalResourceDriver, KubernetesRequest, YarnRequest
from outfitter_service.config.options import kubernetes_key, yarn_key
from outfitter_service.config.resources import ResourceConfig

DriverOf = Callable[[ResourceConfig], ExternalResourceDriver | None]
"""Returns the driver of a resource, or None."""


class RequestError(ValueError):
    """An amount that cannot be requested; the message names the resource, the key and the numbers."""


def no_driver(_config: ResourceConfig) -> None:
    """Use no drivers, only configured keys."""


def kubernetes_amounts(resources: Iterable[ResourceConfig], driver_of: DriverOf = no_driver) -> dict[str, str]:
    """Extended resource name → quantity, for `resources.requests` and `resources.limits`.

    Of two resources with one key only the first counts (a configuration refuses that).

    Raises:
        RequestError: an amount is not a positive whole number, or a driver fails or names no extended resource.
    """
    amounts: dict[str, str] = {}
    for config in _in_effect(resources):
        driver: object = driver_of(config) if config.kubernetes_key is None else None
        ask = driver.kubernetes_resources if isinstance(driver, KubernetesRequest) else None
        for key, amount in _keys_and_amounts(config, config.kubernetes_key, ask).items():
            amounts.setdefault(_checked_key(config, key, kubernetes_key), str(_whole(config, amount)))
    return amounts


def yarn_amounts(
    resources: Iterable[ResourceConfig], driver_of: DriverOf = no_driver, *, maximum: Mapping[str, int] | None = None
) -> dict[str, int]:
    """YARN resource type → amount, for a request's resource information.

    `maximum`: the cluster's limit of each type for one container; without it nothing is compared.

    Raises:
        RequestError: as for Kubernetes; or the cluster does not know the type, or allows less.
    """
    amounts: dict[str, int] = {}
    for config in _in_effect(resources):
        driver: object = driver_of(config) if config.yarn_key is None else None
        ask = driver.yarn_resources if isinstance(driver, YarnRequest) else None
        for key, value in _keys_and_amounts(config, config.yarn_key, ask).items():
            amount = _whole(config, value)
            if maximum is not None:
                _check_maximum(config, key, amount, maximum)
            amounts.setdefault(_checked_key(config, key, yarn_key), amount)
    return amounts


def _in_effect(resources: Iterable[ResourceConfig]) -> Iterable[ResourceConfig]:
    return (config for config in resources if config.in_effect)


def _keys_and_amounts(
    config: ResourceConfig, key: str | None, ask: Callable[[int], Mapping[str, Any]] | None
) -> Mapping[str, Any]:
    """The configured amount under its configured key; otherwise a driver's keys and amounts for it, if any.

    Raises:
        RequestError: the driver failed, or the configured amount cannot be requested.
    """
    if key is not None:
        return {key: config.amount}
    if ask is None:
        return {}
    amount = _whole(config, config.amount)
    try:
        with registry.contained():
            return dict(ask(amount))
    except Exception as error:
        # foreign code may raise anything
        raise RequestError(f"resource {config.name}: its driver failed: {registry.described(error)}") from error


def _whole(config: ResourceConfig, amount: Any) -> int:
    """The amount as a whole number, from a number or a driver's text."""
    number = int(amount) if isinstance(amount, str) and re.fullmatch("[0-9]{1,19}", amount) else amount
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        shown = amount[:40] if isinstance(amount, str) else amount
        raise RequestError(
            f"resource {config.name}: {shown!r} cannot be requested; devices are requested as whole numbers from 1"
        )
    return number


def _checked_key(config: ResourceConfig, key: str, check: Callable[[str], str | None]) -> str:
    try:
        name = check(key)
    except ValueError as error:
        raise RequestError(f"resource {config.name}: {key!r} {error}") from error
    if name is None:
        raise RequestError(f"resource {config.name}: its driver names a blank key")
    return name


def _check_maximum(config: ResourceConfig, key: str, amount: int, maximum: Mapping[str, int]) -> None:
    if key not in maximum:
        known = ", ".join(f"{name} (at most {most})" for name, most in sorted(maximum.items())) or "none"
        raise RequestError(
            f"resource {config.name}: {amount} of {key} requested, which the cluster does not know; it knows {known}"
        )
    most = maximum[key]
    if amount > most:
        raise RequestError(
            f"resource {config.name}: {amount} of {key} requested, the cluster allows at most {most} a container"
        )
