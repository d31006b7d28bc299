"""Where the tokens and commits of a ledger begin that stands in for another one: behind all that the other one can have
given, be it that nobody knows any more how many these were."""

from __future__ import annotations

from datetime import datetime

SKIPPED = 2**32
"""How many are left out at least: more than a writer can have given since a backup."""
A_MILLISECOND = 2**10
"""A ledger that began earlier has given fewer in a millisecond. So all numbers stay below 2**53 until the year 2255:
JSON's readers have them exactly."""


def beyond(last: int, now: datetime) -> int:
    """A number behind `last`, and behind those of each ledger that stood in for another one before `now`."""
    return max(last + SKIPPED, int(now.timestamp() * 1000) * A_MILLISECOND)
