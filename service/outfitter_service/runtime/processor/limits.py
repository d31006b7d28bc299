"""The limits that a manager's settings give its processors."""

from __future__ import annotations

from msgspec import Struct

from outfitter_service.runtime.changelog.shape import CHECK_S
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.input.input_reader import READ_AHEAD
from outfitter_service.runtime.input.lookahead import QUIET_LIMIT


class Limits(Struct, frozen=True, kw_only=True):
    """How much and how long; each has a default of its own, and callers name the few that they change.

    A commit has at most `batch_records` events. `lease_grace_s`: seconds between a lease's end and its judgement.
    A position is written after `checkpoint_interval_s` seconds or `checkpoint_records` messages, although nothing else
    is. `hosts`: how many one partition may have. `take_over`: accept a ledger that another machine wrote, `adopt`: one
    that was written to another topic, or is gone. `look_s`: how often the shape of its topics is checked. `history`:
    how often that topic gets snapshots; None: nothing is written to it. `read_ahead` and `quiet_limit` are as in
    input_reader.py and lookahead.py."""

    batch_records: int = 1000
    lease_grace_s: float = 2.0
    checkpoint_interval_s: float = 3600.0
    checkpoint_records: int = 5000
    hosts: int = 10_000
    take_over: bool = False
    adopt: bool = False
    look_s: float = CHECK_S
    history: Pace | None = Pace()
    read_ahead: int = READ_AHEAD
    quiet_limit: int = QUIET_LIMIT


DEFAULT_LIMITS = Limits()
