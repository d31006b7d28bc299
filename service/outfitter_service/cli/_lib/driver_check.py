"""Lets drivers check their own settings: `outfitter config check` builds each driver as a manager does. It calls none
here; device_lists.py calls those that list devices.

A driver raises only its first error. To find all errors we build it again without the refused setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from msgspec import structs

from outfitter_drivers.api import NotOnThisMachineError
from outfitter_drivers.settings import SettingError
from outfitter_service.config import ConfigProblem, Inspection, ResourceConfig, Settings, Severity
from outfitter_service.core.model import SpecState
from outfitter_service.runtime.drivers.building import UnservableDriverError, build_error_text, build_served


def driver_problems(configuration: Settings | Inspection | None) -> Iterator[ConfigProblem]:
    """The errors and warnings of drivers about their settings, also for resources with other errors.

    If a setting may be right on another machine, its error is a warning.
    """
    if configuration is None:
        return
    settings = configuration if isinstance(configuration, Settings) else configuration.settings
    scope = "host" if settings is None else settings.scope
    for config in configuration.resources:
        if config.driver is not None and config.state in (SpecState.OK, SpecState.MISCONFIGURED):
            yield from _of(config, scope, configuration.origins)


def _of(config: ResourceConfig, scope: str, origins: Mapping[str, str]) -> Iterator[ConfigProblem]:
    warned, refused = set[str](), False
    while True:
        warnings: list[str] = []
        error = _refusal(config, scope, warnings.append)
        for warning in warnings:
            if warning not in warned:
                warned.add(warning)
                yield _about(config, origins, ValueError(warning), Severity.WARNING)
        key = None if error is None else _key(config, error)
        if error is None or (refused and key is None):
            return  # no error, or a consequence of the removed setting
        severity = Severity.WARNING if isinstance(error, NotOnThisMachineError) else Severity.ERROR
        yield _about(config, origins, error, severity)
        if key is None:
            return
        refused = True
        config = structs.replace(config, params={name: config.params[name] for name in config.params if name != key})


def _refusal(config: ResourceConfig, scope: str, warn: Callable[[str], None]) -> Exception | None:
    try:
        build_served(config, scope, warn)
    except Exception as error:  # noqa: BLE001 - foreign code: any error concerns this resource only
        return error
    return None


def _key(config: ResourceConfig, error: Exception) -> str | None:
    """The configured setting that an error is about: a `SettingError` says it, other messages begin with it."""
    if isinstance(error, UnservableDriverError):
        return None
    key = error.key if isinstance(error, SettingError) else build_error_text(error).partition(" ")[0].removesuffix(":")
    return key if key in config.params else None


def _about(config: ResourceConfig, origins: Mapping[str, str], error: Exception, severity: Severity) -> ConfigProblem:
    words, suggestion = build_error_text(error), None
    if isinstance(error, SettingError) and error.suggestion is not None:
        words = f"{error.key} {error.problem}"
        suggestion = f"did you mean {config.key('param.')}{error.suggestion}?"
    key = _key(config, error)
    option, value = "driver-factory.class", config.driver
    if key is not None:
        option, value = f"param.{key}", config.params[key]
    elif isinstance(error, UnservableDriverError) and error.option == "sharing":
        option, value = error.option, config.sharing
    return ConfigProblem(
        file=origins.get(config.key(option), ""),
        key=config.key(option),
        found=value,
        problem=words if isinstance(error, UnservableDriverError) else f"its driver says: {words}",
        suggestion=suggestion,
        severity=severity,
        resource=config.name,
    )
