"""Bugs that are planted on purpose, each a mistake that a manager or its bus adapter could well contain.

A simulator that does not find them finds nothing. Each says within how many seeds it must be found, which is
several times what was measured. Most sit in the bus, where they are independent of how the runtime is built.
"""

from __future__ import annotations

from simulation.bugs import (
    ailing,
    books,
    client,
    core,
    liveness,
    orders,
    parts,
    processor,
    readers,
    survivors,
    sweeper,
    writers,
)
from simulation.bugs.bug import Bug, Hunt, hunt

__all__ = ["BUGS", "Bug", "Hunt", "hunt"]

BUGS: tuple[Bug, ...] = (
    *writers.BUGS,
    *readers.BUGS,
    *processor.BUGS,
    *liveness.BUGS,
    *core.BUGS,
    *orders.BUGS,
    *ailing.BUGS,
    *parts.BUGS,
    *survivors.BUGS,
    *sweeper.BUGS,
    *books.BUGS,
    *client.BUGS,
)
"""All of them."""
