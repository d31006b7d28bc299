"""What drivers remark about hardware that works, and the variables of their devices that workers must allow, for
`outfitter config check` and `doctor`.

A driver that cannot look has nothing to say: `doctor` shows its error elsewhere, and `config check` is also for
machines without the hardware.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import anyio

from outfitter_drivers.api import Device, ExternalResourceDriver, Inventory, Remarks
from outfitter_drivers.static import configured_hosts
from outfitter_proto import environment
from outfitter_service.config import ConfigProblem, Inspection, Severity
from outfitter_service.config.options import LIST_KEY
from outfitter_service.runtime.drivers.building import build_served
from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code, written

WITHIN_S = 15.0
"""Time limit for a driver's look."""
CLOSE_WITHIN_S = 2.0
"""Time limit for closing a driver."""


async def remarks_of(driver: ExternalResourceDriver) -> list[str]:
    """The driver's remarks; none if it has none, or cannot look."""
    if not isinstance(driver, Remarks):
        return []
    found: list[str] = []
    with anyio.move_on_after(min(WITHIN_S, driver.call_timeout)):
        try:
            with foreign_code():
                found = [written(str(remark)) for remark in await driver.remarks()]
        except DriverCallError:
            return []
    return found


def remark_problems(inspection: Inspection) -> Iterator[ConfigProblem]:
    """A warning for each remark of a configured driver about this machine, and one for all variables of devices that
    workers must allow."""
    settings = inspection.settings
    if settings is None:
        return
    to_allow: dict[str, list[str]] = {}
    for config in settings.resources:
        if config.driver is None or not config.in_effect:
            continue
        try:
            driver = build_served(config, settings.scope, lambda _: None).driver
        except Exception:  # noqa: BLE001, S112 - foreign code, of which the check of drivers speaks
            continue
        hosts = {settings.host, *configured_hosts(config.params)} if driver.looks_from_afar else {settings.host}
        remarks, variables = anyio.run(_once, driver, sorted(hosts))
        if names := not_allowed(variables):
            to_allow[config.name] = names
        for remark in remarks:
            yield ConfigProblem(
                file=inspection.origins.get(config.key("driver-factory.class"), ""),
                key=config.key("driver-factory.class"),
                found=config.driver,
                problem=f"its driver says: {remark}",
                severity=Severity.WARNING,
                resource=config.name,
            )
    if to_allow:
        yield ConfigProblem(
            file=str(settings.file or ""), key=LIST_KEY, problem=must_allow(to_allow), severity=Severity.WARNING
        )


def must_allow(to_allow: Mapping[str, Sequence[str]]) -> str:
    """What a worker has to set. `to_allow`: by resource, the variables of its devices that a worker must allow."""
    devices = ", ".join(f"devices of {resource} set {', '.join(names)}" for resource, names in to_allow.items())
    every = [name for names in to_allow.values() for name in names]
    return f"{devices}, which a worker must allow: {environment.how_to_allow(every, _allowed_here())}"


def not_allowed(variables: Iterable[str]) -> list[str]:
    """Those of devices' variables that a worker must allow. What a worker started here would allow is left out."""
    return environment.unknown({name for name in variables if environment.refusal(name) is None}, _allowed_here())


def variables_of(devices: Iterable[Device]) -> set[str]:
    """The variables that any of these devices sets."""
    return {written(str(name)) for device in devices for name in device.env}


def _allowed_here() -> frozenset[str]:
    try:
        return environment.allowed_by(os.environ.get(environment.ALLOWING, ""))
    except ValueError:
        return frozenset()


async def _once(driver: ExternalResourceDriver, hosts: Sequence[str]) -> tuple[list[str], set[str]]:
    """A driver's remarks, and the variables of all devices that it lists at first. A driver without a list is not
    asked, because it would hand devices out. What the driver logs is left out: the manager logs it."""
    variables: set[str] = set()
    logging.disable(logging.CRITICAL)
    try:
        remarks = await remarks_of(driver)
        if isinstance(driver, Inventory):
            with anyio.move_on_after(min(WITHIN_S, driver.call_timeout)), suppress(DriverCallError):
                for host in hosts:
                    variables |= await _variables_on(driver, host)
        return remarks, variables
    finally:
        with anyio.move_on_after(CLOSE_WITHIN_S, shield=True), suppress(DriverCallError), foreign_code():
            await driver.aclose()
        logging.disable(logging.NOTSET)


async def _variables_on(driver: Inventory, host: str) -> set[str]:
    """The variables of the devices that a driver names first for a host.

    Raises:
        DriverCallError: it failed.
    """
    with foreign_code():
        reports = driver.inventory(host)
    try:
        with foreign_code():
            return variables_of(await anext(reports, ()))
    finally:
        if isinstance(reports, AsyncGenerator):
            with suppress(DriverCallError), foreign_code():
                await reports.aclose()
