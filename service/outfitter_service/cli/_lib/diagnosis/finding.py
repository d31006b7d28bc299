"""What a check of `outfitter doctor` is, what it looks at, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum

from msgspec import Struct


class Grade(StrEnum):
    """What a check says."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_CHECKED = "not checked"


class Finding(Struct, frozen=True):
    """One thing that a check found. `remedy`: what to do, in one sentence."""

    verdict: Grade
    seen: str
    remedy: str


UNCONFIGURED = Finding(
    Grade.NOT_CHECKED,
    "the configuration has errors",
    "put right what `configuration` says, then run this again",
)
"""What a check says that needs the settings of a manager."""


class Machine(Struct, frozen=True):
    """What is checked. `config`: the configuration file; None: the one that a manager would read. `given`: settings
    of the command line."""

    config: str | None
    given: dict[str, str]


Check = Callable[[Machine], Iterator[Finding]]
"""Yields what it finds wrong, and changes nothing."""
