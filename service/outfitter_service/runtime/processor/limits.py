"""The limits that a manager's settings give its processors."""

from __future__ import annotations

from msgspec import Struct

from outfitter_service.core.state.sizes import MAX_BYTES
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.changelog.topic_layout import CHECK_S
from outfitter_service.runtime.input.input_reader import READ_AHEAD
from outfitter_service.runtime.input.lookahead import QUIET_LIMIT
from outfitter_service.runtime.processor.commit.quotas import REWRITTEN_BYTES


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of one processor."""

    events_per_commit: int = 1000
    """The most events in a commit."""
    max_bytes: int = MAX_BYTES
    """As in `Rules`."""
    lease_grace_s: float = 2.0
    """Seconds between a lease's end and its judgement."""
    checkpoint_interval_s: float = 3600.0
    checkpoint_records: int = 5000
    """After so many seconds or messages a checkpoint is written, even if nothing else is."""
    beat_s: float | None = 20.0
    """Seconds between two signs of life. None: there are none."""
    hosts: int = 10_000
    """The most hosts of one partition."""
    take_over: bool = False
    """Accept a ledger that another machine wrote."""
    adopt: bool = False
    """Accept a ledger that was written to another topic, or is gone."""
    look_s: float = CHECK_S
    """Seconds between two checks of the topics' layout."""
    history: Pace | None = Pace()
    """How often the history topic gets snapshots. None: nothing is written to it."""
    read_ahead: int = READ_AHEAD
    """As in input_reader.py."""
    quiet_limit: int = QUIET_LIMIT
    """As in lookahead.py."""
    rewritten_bytes: int = REWRITTEN_BYTES
    """The most bytes of records that are written again, without a step, in each window of commit/quotas.py. Half of
    them may be one host's."""


DEFAULT_LIMITS = Limits()
