"""Waiting for what another process does: look again and again, and say what there is if it does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 90.0
"""Until something has happened that must happen, on a busy machine."""


def pause_s(waited_s: float) -> float:
    """Until the next look of who has waited so long. It comes at most a tenth later than it might, and looks in all
    take little of the machine from what they wait for."""
    return min(max(0.02, waited_s / 10), 0.5)


def until(look: Callable[[], T | None], otherwise: Callable[[], str], *, within_s: float = PATIENCE_S) -> T:
    """What `look` returns, as soon as that is true.

    Raises:
        AssertionError: it did not become true. The message ends with what `otherwise` returns.
    """
    begun = time.monotonic()
    while not (seen := look()):
        waited_s = time.monotonic() - begun
        assert waited_s < within_s, f"it did not come within {within_s:g} s: {otherwise()}"
        time.sleep(pause_s(waited_s))
    return seen
