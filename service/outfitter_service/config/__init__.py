"""Configuration: one option table, two syntaxes (TOML; Flink's flat keys), every problem at once.

`load` and `inspect` for a manager, `connection` for commands that only need bus, host and cluster.
"""

from outfitter_service.config.connection import Connection, connection
from outfitter_service.config.problems import ConfigurationError, Problem, Severity
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
