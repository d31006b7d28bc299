"""Bus, host, cluster, log-in and the history switch, for commands that need no more and must start fast.

It uses the sources of `settings.load` in the same order. It ignores the rest of the file. It imports the code for
Flink's files only if the file is Flink's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from outfitter_service.config import options, sources
from outfitter_service.config.problems import ConfigProblem, ConfigurationError

log = logging.getLogger("outfitter.config")

_NAMES = ("bus", "host", "cluster", "history")
_TABLE = [option for option in options.SETTINGS if option.name in _NAMES or option.name.startswith(options.KAFKA)]


class BusConnection(Struct, frozen=True, kw_only=True):
    """The bus, this machine's name on it, and the cluster. `history`: whether its manager writes that topic. `login`:
    the settings for logging in to Kafka's brokers, for `bus.connect`."""

    bus: str
    host: str
    cluster: str
    history: bool = True
    login: dict[str, str] = {}


def connection(
    path: str | Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> BusConnection:
    """The connection from `overrides` (the command line's), the environment, a file if there is one, and defaults.

    Raises:
        ConfigurationError: the file or one of these values is invalid.
    """
    environment = os.environ if environment is None else environment
    texts: dict[str, tuple[str, str, str]] = {}  # by setting: its text, origin and key
    file = sources.find(path, environment)
    if file is not None:
        source = sources.read(file)
        for problem in source.problems:
            log.warning("%s", problem)
        keys = {option.name: {option.flat_key} | ({option.name} if source.toml else set()) for option in _TABLE}
        paths = {option.name for option in _TABLE if option.is_path}
        for entry in source.entries:
            for name, spellings in keys.items():
                if entry.key in spellings and isinstance(entry.value, str):
                    value = str(file.absolute().parent / entry.value) if name in paths else entry.value
                    texts[name] = (value, str(file), entry.key)
    for option in _TABLE:
        if environment.get(option.variable):
            texts[option.name] = (environment[option.variable], "environment", option.variable)
        if overrides and overrides.get(option.name) is not None:
            texts[option.name] = (overrides[option.name], "command line", f"--{option.name}")
    values: dict[str, Any] = {}
    problems: list[ConfigProblem] = []
    for option in _TABLE:
        default = option.default_text
        if option.name not in texts and default is None:
            continue
        text, origin, key = texts.get(option.name) or (default or "", "default", option.name)
        try:
            values[option.name] = option.parse(text)
        except ValueError as error:
            problems.append(ConfigProblem(file=origin, key=key, found=text, problem=str(error)))
    if problems:
        raise ConfigurationError(problems)
    login = {name.removeprefix(options.KAFKA): value for name, value in values.items() if name not in _NAMES}
    return BusConnection(**{name: values[name] for name in _NAMES}, login=login)
