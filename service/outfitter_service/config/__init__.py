"""Configuration: one option table, two syntaxes (TOML; Flink's flat keys), all problems at once.

Managers use `load` and `inspect`. Commands that only need bus, host and cluster use `connection` and must start fast,
so everything else is imported on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outfitter_service.config.connection import BusConnection, connection
from outfitter_service.config.problems import ConfigProblem, ConfigurationError, Severity

if TYPE_CHECKING:
    from outfitter_service.config.resources import ResourceConfig
    from outfitter_service.config.settings import Inspection, Settings, inspect, load

__all__ = [
    "BusConnection",
    "ConfigProblem",
    "ConfigurationError",
    "Inspection",
    "ResourceConfig",
    "Settings",
    "Severity",
    "connection",
    "inspect",
    "load",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in __all__:  # `settings` has ResourceConfig, too
            globals()[name] = value = getattr(import_module("outfitter_service.config.settings"), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
