"""Checks of what an administrator wrote and installed: the configuration, its files, and the drivers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from outfitter_service.cli._lib.diagnosis.finding import UNCONFIGURED, Finding, Machine, Verdict
from outfitter_service.config import Problem, Severity, inspect, options

if TYPE_CHECKING:
    from outfitter_drivers.api import Device
    from outfitter_service.config import ResourceConfig
    from outfitter_service.core.model import KnownDevice
    from outfitter_service.runtime.drivers.building import ServableDriver

CLOSE_WITHIN_S = 2.0
"""Time limit for closing a driver."""
ANSWER_WITHIN_S = 15.0
"""How long a driver may take for its first report, if its own limit is longer: less than `doctor` waits for all."""


def configuration(machine: Machine) -> Iterator[Finding]:
    """Errors and warnings of `outfitter config check`."""
    yield from _of_problems(inspect(machine.config, machine.given).problems)


def secrets(machine: Machine) -> Iterator[Finding]:
    """Whether this user can read the files of secrets and certificates, and nobody else can change them."""
    from outfitter_proto.support import file_ownership

    settings = inspect(machine.config, machine.given).settings
    if settings is None:
        yield UNCONFIGURED
        return
    names = {f"{options.KAFKA}{name}": value for name, value in settings.login.items() if name.endswith("-file")}
    for name, file in (names | {"api-token-file": settings.api_token_file}).items():
        if not file:
            continue
        if not os.access(file, os.R_OK):
            why = "cannot be read by this user" if Path(file).exists() else "is not there"
            remedy = "write it, and let the manager's user read it; see deploy/systemd for LoadCredential"
            yield Finding(Verdict.PROBLEM, f"{name}: {file} {why}", remedy)
        elif doubt := file_ownership.doubt(Path(file)):
            remedy = f"give {file} and its directory to root or to the manager's user, and let nobody else write them"
            yield Finding(Verdict.WARNING, f"{name}: {doubt}", remedy)


def drivers(machine: Machine) -> Iterator[Finding]:
    """What the drivers say of their settings and this machine."""
    from outfitter_service.cli._lib.driver_check import driver_problems
    from outfitter_service.cli._lib.driver_remarks import remark_problems

    inspection = inspect(machine.config, machine.given)
    yield from _of_problems(driver_problems(inspection))
    yield from _of_problems(remark_problems(inspection))
    if inspection.settings is None:  # the drivers have seen what could be read, for a scope that may be another
        yield UNCONFIGURED


def devices(machine: Machine) -> Iterator[Finding]:
    """What the drivers find, and whether the programs that they run are there: each lists its devices once. A driver
    without a list is not asked, because it would hand devices out."""
    from outfitter_service.runtime.drivers.building import build_served
    from outfitter_service.runtime.drivers.translation import DriverCallError

    settings = inspect(machine.config, machine.given).settings
    if settings is None:
        yield UNCONFIGURED
        return
    for config in settings.resources:
        if config.driver is None:
            continue
        try:
            served = build_served(config, settings.scope, lambda _: None)
        except Exception:  # noqa: BLE001, S112 - foreign code, of which the check of drivers speaks
            continue
        if (inventory := served.inventory) is None:
            continue
        try:
            found = anyio.run(_listed, config.name, served, inventory.inventory(settings.host))
        except DriverCallError as error:
            remedy = f"correct that, then run `outfitter discover {config.name}`"
            yield Finding(Verdict.PROBLEM, f"{config.name}: its driver fails: {error}", remedy)
            continue
        yield from _of_devices(config, found)


def _of_devices(config: ResourceConfig, found: tuple[KnownDevice, ...]) -> Iterator[Finding]:
    if not found:
        remedy = f"see whether the hardware is there and this user may see it: `outfitter discover {config.name}`"
        yield Finding(Verdict.WARNING, f"{config.name}: its driver finds no device", remedy)
    for device in found:
        if device.health != "healthy":
            seen = f"{config.name}: {device.id} is {device.health}{f': {device.reason}' if device.reason else ''}"
            yield Finding(Verdict.WARNING, seen, "look at it, or replace it; nobody gets it meanwhile")


async def _listed(
    resource: str, served: ServableDriver, reports: AsyncIterator[Sequence[Device]]
) -> tuple[KnownDevice, ...]:
    """The driver's first report.

    Raises:
        DriverCallError: there is none.
    """
    from outfitter_service.core.model import DriverFailure
    from outfitter_service.runtime.drivers.translation import DriverCallError, foreign_code, known_devices

    limit = min(served.timeout_s, ANSWER_WITHIN_S)
    try:
        with anyio.fail_after(limit), foreign_code():
            return await known_devices(resource, await anext(reports))
    except TimeoutError as error:
        raise DriverCallError(DriverFailure(reason=f"no answer within {limit:g} s")) from error
    finally:
        with anyio.move_on_after(CLOSE_WITHIN_S, shield=True), contextlib.suppress(DriverCallError), foreign_code():
            await served.driver.aclose()


def _of_problems(problems: Iterable[Problem]) -> Iterator[Finding]:
    for problem in problems:
        if problem.severity is not Severity.INFO:
            verdict = Verdict.PROBLEM if problem.severity is Severity.ERROR else Verdict.WARNING
            place = f"correct {problem.key or 'it'} in {problem.file or 'the configuration'}"
            if problem.key == "--config":  # there is none
                place = "write /etc/outfitter/outfitter.toml, or name another file by --config"
            yield Finding(verdict, f"{problem.key}: {problem.problem}", problem.suggestion or place)
