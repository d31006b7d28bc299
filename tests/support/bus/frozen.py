"""An embedded bus that takes nothing for a while, for its users in any process."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def frozen(url: str) -> Iterator[None]:
    """Nobody can write to the bus while this holds its lock; everybody can read."""
    path = Path(url.removeprefix("sqlite://").partition("?")[0]).with_suffix(".lock")
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
