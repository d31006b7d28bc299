"""Waiting for what another process does: look again and again, and say what there is if it does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 90.0
"""Until something has happened that must happen, on a busy machine."""
PAUSE_S = 0.02


def until(look: Callable[[], T | None], otherwise: Callable[[], str], *, within_s: float = PATIENCE_S) -> T:
    """What `look` returns, as soon as that is true.

    Raises:
        AssertionError: it did not become true. The message ends with what `otherwise` returns.
    """
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"it did not come within {within_s:g} s: {otherwise()}"
        time.sleep(PAUSE_S)
    return seen
