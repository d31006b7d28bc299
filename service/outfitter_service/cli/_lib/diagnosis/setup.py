"""Checks of what an administrator wrote and installed: the configuration, its files, and the drivers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from outfitter_service.cli._lib.diagnosis.finding import UNCONFIGURED, Finding, Grade, Machine
from outfitter_service.config import ConfigProblem, Severity, inspect, options

if TYPE_CHECKING:
    from outfitter_service.config import ResourceConfig
    from outfitter_service.core.model import KnownDevice


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
            yield Finding(Grade.PROBLEM, f"{name}: {file} {why}", remedy)
        elif doubt := file_ownership.doubt(Path(file)):
            remedy = f"give {file} and its directory to root or to the manager's user, and let nobody else write them"
            yield Finding(Grade.WARNING, f"{name}: {doubt}", remedy)


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
    """What the drivers find, and whether the programs that they run are there: each lists its devices once."""
    from outfitter_service.cli._lib.device_lists import lists, refused

    settings = inspect(machine.config, machine.given).settings
    if settings is None:
        yield UNCONFIGURED
        return
    found: dict[str, tuple[KnownDevice, ...]] = {}
    for config, listed in lists(settings, with_scripts=True):
        if isinstance(listed, Exception):
            remedy = f"correct that, then run `outfitter discover {config.name}`"
            yield Finding(Grade.PROBLEM, f"{config.name}: its driver fails: {listed}", remedy)
        else:
            found[config.name] = listed
            yield from _of_devices(config, listed)
    for name, reason in refused(found).items():
        yield Finding(Grade.PROBLEM, f"{name}: {reason}", f"nobody gets a device of {name} before that")


def _of_devices(config: ResourceConfig, found: tuple[KnownDevice, ...]) -> Iterator[Finding]:
    if not found:
        remedy = f"see whether the hardware is there and this user may see it: `outfitter discover {config.name}`"
        yield Finding(Grade.WARNING, f"{config.name}: its driver finds no device", remedy)
    for device in found:
        if device.health != "healthy":
            seen = f"{config.name}: {device.id} is {device.health}{f': {device.reason}' if device.reason else ''}"
            yield Finding(Grade.WARNING, seen, "look at it, or replace it; nobody gets it meanwhile")


def _of_problems(problems: Iterable[ConfigProblem]) -> Iterator[Finding]:
    for problem in problems:
        if problem.severity is not Severity.INFO:
            verdict = Grade.PROBLEM if problem.severity is Severity.ERROR else Grade.WARNING
            place = f"correct {problem.key or 'it'} in {problem.file or 'the configuration'}"
            if problem.key == "--config":  # there is none
                place = "write /etc/outfitter/outfitter.toml, or name another file by --config"
            yield Finding(verdict, f"{problem.key}: {problem.problem}", problem.suggestion or place)
