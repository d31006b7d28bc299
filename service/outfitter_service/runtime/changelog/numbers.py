"""Where the tokens and commit numbers of a ledger begin that replaces another one: a restored or an adopted ledger.

They begin behind all numbers of the other ledger. Nobody may know any more how many these were, so the clock decides.
"""

from __future__ import annotations

from datetime import datetime

SKIPPED = 2**32
"""How many numbers are left out where the clock is behind: more than a writer can have used since a backup."""
A_MILLISECOND = 2**10
"""Numbers of each millisecond since the epoch. A ledger uses fewer. All numbers stay below 2**53 until the year 2248.
Every JSON reader has such numbers exactly."""


def beyond(last: int, now: datetime) -> int:
    """A number behind `last`, and behind all numbers of each ledger that replaced another one before `now`.

    The clock alone gives it, unless `last` is ahead of the clock: numbers ahead of the clock could be above those that
    the clock gives to a later ledger.
    """
    by_clock = int(now.timestamp() * 1000) * A_MILLISECOND
    return by_clock if by_clock > last else last + SKIPPED
