"""What the drivers say of their own settings: `outfitter config check` builds each of them, and asks it nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from outfitter_drivers import registry
from outfitter_drivers.api import DriverParams, NotOnThisMachineError
from outfitter_service.config import Problem, ResourceConfig, Settings, Severity
from outfitter_service.core.model import SpecState

_GUESS = re.compile(r"did you mean (?P<guess>'[^']*'|[^\s?]+)\?")


def driver_problems(settings: Settings | None) -> Iterator[Problem]:
    """A problem for each resource whose driver refuses to be built, a warning if it may be built elsewhere; and what it
    warns of."""
    for config in settings.resources if settings is not None else ():
        if config.state is not SpecState.OK or config.driver is None:
            continue
        params = DriverParams(config.params, directory=config.directory)
        try:
            registry.create_driver(config.driver, params)
        except registry.DriverLookupError as error:
            yield _problem(settings, config, "driver-factory.class", config.driver, error)
        except NotOnThisMachineError as error:
            yield _about_setting(settings, config, error, Severity.WARNING)
        except Exception as error:  # noqa: BLE001 - a third party's factory: whatever it raises is about this resource
            yield _about_setting(settings, config, error, Severity.ERROR)
        for warning in params.warnings:
            yield _about_setting(settings, config, ValueError(warning), Severity.WARNING)


def _about_setting(settings: Settings | None, config: ResourceConfig, error: Exception, severity: Severity) -> Problem:
    """The setting is the one that the driver's words name, as they should."""
    named = [key for key in config.params if re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-])", str(error))]
    key = max(named, key=len, default=None)
    if key is None:
        return _problem(settings, config, "driver-factory.class", config.driver, error, severity)
    return _problem(settings, config, f"param.{key}", config.params[key], error, severity)


def _problem(
    settings: Settings | None,
    config: ResourceConfig,
    option: str,
    found: str | None,
    error: Exception,
    severity: Severity = Severity.ERROR,
) -> Problem:
    key = config.key(option)
    words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    guess = _GUESS.search(words)
    return Problem(
        file=settings.origins.get(key, "") if settings is not None else "",
        key=key,
        found=found,
        problem=f"its driver says: {words}",
        suggestion=f"did you mean {config.key('param.')}{guess['guess'].strip(chr(39))}?" if guess else None,
        severity=severity,
        resource=config.name,
    )
