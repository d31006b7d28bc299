"""Bus, host, cluster and whether there is history alone, for commands that need nothing else and must start fast.

The same sources in the same order as `settings.load`, without looking at the rest of the file, and without loading
what only a file of Flink's needs unless there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from outfitter_service.config import options, sources
from outfitter_service.config.problems import ConfigurationError, Problem

_WANTED = ("bus", "host", "cluster", "history")


class Connection(Struct, frozen=True, kw_only=True):
    """Where to meet the manager: the bus, this machine's name there, and whose topics. `history`: whether its manager
    writes that topic."""

    bus: str
    host: str
    cluster: str
    history: bool = True


def connection(
    path: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Connection:
    """The connection from `overrides` (the command line's), the environment, a file if there is one, and defaults.

    Raises:
        ConfigurationError: the file cannot be used, or one of the four values is wrong.
    """
    environment = os.environ if environment is None else environment
    texts: dict[str, tuple[str, str, str]] = {}
    found = sources.find(path, environment)
    settings = [option for option in options.SETTINGS if option.name in _WANTED]
    if found is not None:
        source = sources.read(found)
        keys = {option.name: {option.flat_key} | ({option.name} if source.toml else set()) for option in settings}
        for entry in source.entries:
            for name, spellings in keys.items():
                if entry.key in spellings and isinstance(entry.value, str):
                    texts[name] = (entry.value, str(found), entry.key)
    for option in settings:
        if environment.get(option.variable):
            texts[option.name] = (environment[option.variable], "environment", option.variable)
        if overrides and overrides.get(option.name) is not None:
            texts[option.name] = (overrides[option.name], "command line", f"--{option.name}")
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for option in settings:
        text, place, key = texts.get(option.name) or (option.default() or "", "default", option.name)
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            problems.append(Problem(file=place, key=key, found=text, problem=str(error)))
    if problems:
        raise ConfigurationError(problems)
    return Connection(**values)
