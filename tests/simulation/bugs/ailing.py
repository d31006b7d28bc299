"""Bugs of devices that were ill: lent too early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_service.core.state import recovery
from simulation.bugs.bug import Bug
from simulation.world import settings


@contextmanager
def _ailing() -> Iterator[None]:
    """Looked for where devices fall ill, and nobody sets a clock."""
    with patch.object(settings, "AILING", 1.0), patch.object(settings, "ILL", 1.0), patch.object(settings, "JUMPY", 0):
        yield


@contextmanager
def _forgotten() -> Iterator[None]:
    def nothing_recorded(_: Any) -> recovery.Unwell:
        return {}

    with patch.object(recovery, "recorded", nothing_recorded), _ailing():
        yield


@contextmanager
def _at_once() -> Iterator[None]:
    with patch.object(recovery, "is_damped", lambda _: False), _ailing():
        yield


BUGS = (
    Bug(
        name="illness-forgotten-by-a-restart",
        what="a device that was ill before a restart is lent at the first good report",
        within=40,
        patches=_forgotten,
    ),
    Bug(
        name="lent-at-the-first-good-report",
        what="a device that was ill is lent at the first good report",
        within=40,
        patches=_at_once,
    ),
)
