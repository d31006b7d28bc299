"""Configuration: one option table, two syntaxes (TOML; Flink's flat keys), every problem at once.

`load` and `inspect` for a manager, `connection` for commands that only need bus, host and cluster:
those must start fast, so all the rest is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from outfitter_service.config.connection import Connection, connection
from outfitter_service.config.problems import ConfigurationError, Problem, Severity

if TYPE_CHECKING:
    from outfitter_service.config.resources import ResourceConfig
    from outfitter_service.config.settings import Inspection, Settings, inspect, load

__all__ = [
    "ConfigurationError",
    "Connection",
    "Inspection",
    "Problem",
    "ResourceConfig",
    "Settings",
    "Severity",
    "connection",
    "inspect",
    "load",
]

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in __all__:  # ResourceConfig is there, too
            globals()[name] = value = getattr(import_module("outfitter_service.config.settings"), name)
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
