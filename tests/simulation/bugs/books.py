"""Bugs of what is remembered of an offer, of which only a script with books of its own knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from outfitter_service.runtime.drivers.pool import DriverPool
from simulation.bugs.bug import Bug, nothing
from simulation.world import settings


@contextmanager
def _offering(method: str, instead: Callable[..., Any]) -> Iterator[None]:
    """Looked for where all scripts have books, and managers and workers end without a word."""
    with (
        patch.object(settings, "BOOKED", 1.0),
        patch.object(settings, "FAULTS", ("kill", "worker", "slow")),
        patch.object(DriverPool, method, instead),
    ):
        yield


BUGS: tuple[Bug, ...] = (
    Bug(
        name="offers-forgotten",
        what="after a restart nobody gives back what a script had offered to workers that went without a grant",
        within=60,
        patches=lambda: _offering("see_restored", nothing),
    ),
    Bug(
        name="offers-kept",
        what="what a script has offered is not given back when its worker goes without a grant",
        within=60,
        patches=lambda: _offering("see_committed", nothing),
    ),
)
