"""What the drivers say of their own settings: `outfitter config check` builds each of them, and asks it nothing.

A driver stops at the first thing that is wrong. To hear of all of them it is built again without the setting that it
has complained of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from outfitter_drivers import registry
from outfitter_drivers.api import DriverParams, NotOnThisMachineError
from outfitter_service.config import Inspection, Problem, ResourceConfig, Settings, Severity
from outfitter_service.core.model import SpecState

_GUESS = re.compile(r"[;,]? *did you mean (?P<guess>'[^']*'|[^\s?]+)\?")


def driver_problems(found: Settings | Inspection | None) -> Iterator[Problem]:
    """A problem for each thing in a resource's settings that its driver refuses (a warning if it may be right
    elsewhere), and what it warns of. Resources that are misconfigured otherwise are looked at as well."""
    for config in found.resources if found is not None else ():
        if found is None or config.driver is None or config.state not in (SpecState.OK, SpecState.MISCONFIGURED):
            continue
        yield from _of(config, found.origins)


def _of(config: ResourceConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    params, warned, refused = dict(config.params), set[str](), False
    for _ in range(len(params) + 1):
        given = DriverParams(params, directory=config.directory)
        error = _refusal(config.driver or "", given)
        for warning in given.warnings:
            if warning not in warned:
                warned.add(warning)
                yield _about(config, origins, ValueError(warning), Severity.WARNING)
        named = _named(params, str(error)) if error is not None else None
        if error is None or (refused and named is None):
            return  # nothing, or what follows from leaving a setting out
        severity = Severity.WARNING if isinstance(error, NotOnThisMachineError) else Severity.ERROR
        yield _about(config, origins, error, severity)
        if named is None:
            return
        refused = True
        del params[named]


def _refusal(driver: str, params: DriverParams) -> Exception | None:
    try:
        registry.create_driver(driver, params)
    except Exception as error:  # noqa: BLE001 - a third party's factory: whatever it raises is about this resource
        return error
    return None


def _named(params: Mapping[str, str], words: str) -> str | None:
    """The setting that a driver's words are about: the first one that they name, the longest where two begin there."""
    words = _GUESS.sub("", words)
    found = ((re.search(rf"(?<![\w.-]){re.escape(key)}(?![\w-])", words), key) for key in params)
    return min(((match.start(), -len(key), key) for match, key in found if match), default=(0, 0, None))[2]


def _guess(words: str) -> str | None:
    found = _GUESS.search(words)
    return found["guess"].strip("'") if found else None


def _about(config: ResourceConfig, origins: Mapping[str, str], error: Exception, severity: Severity) -> Problem:
    words = str(error) if isinstance(error, ValueError | NotOnThisMachineError) else f"{type(error).__name__}: {error}"
    key = None if isinstance(error, registry.DriverLookupError) else _named(config.params, str(error))
    option = f"param.{key}" if key is not None else "driver-factory.class"
    guess = _guess(words)
    return Problem(
        file=origins.get(config.key(option), ""),
        key=config.key(option),
        found=config.params[key] if key is not None else config.driver,
        problem=f"its driver says: {_GUESS.sub('', words)}",
        suggestion=f"did you mean {config.key('param.')}{guess}?" if guess else None,
        severity=severity,
        resource=config.name,
    )
