"""The limits that a manager's settings give its processors."""

from __future__ import annotations

from msgspec import Struct

from outfitter_service.core.state.sizes import MAX_BYTES
from outfitter_service.runtime.changelog.shape import CHECK_S
from outfitter_service.runtime.changelog.snapshots import Pace
from outfitter_service.runtime.input.input_reader import READ_AHEAD
from outfitter_service.runtime.input.lookahead import QUIET_LIMIT
from outfitter_service.runtime.processor.commit.quotas import REWRITTEN_BYTES


class Limits(Struct, frozen=True, kw_only=True):
    """The limits of one processor.

    `batch_records`: the most events in a commit. `max_bytes`: as in `Rules`. `lease_grace_s`: seconds between a lease's
    end and its judgement. `checkpoint_interval_s`, `checkpoint_records`: after so many seconds or messages a checkpoint
    is written, even if nothing else is. `beat_s`: seconds between two signs of life; None: none. `hosts`: the most
    hosts of one partition. `take_over`: accept a ledger that another machine wrote. `adopt`: accept a ledger that was
    written to another topic, or is gone. `look_s`: seconds between two checks of the topics' shape. `history`: how
    often the history topic gets snapshots; None: nothing is written to it. `read_ahead` and `quiet_limit` are as in
    input_reader.py and lookahead.py. `rewritten_bytes`: the most bytes of records that are written again, without a
    step, in each window of commit/quotas.py; half of them for one host."""

    batch_records: int = 1000
    max_bytes: int = MAX_BYTES
    lease_grace_s: float = 2.0
    checkpoint_interval_s: float = 3600.0
    checkpoint_records: int = 5000
    beat_s: float | None = 20.0
    hosts: int = 10_000
    take_over: bool = False
    adopt: bool = False
    look_s: float = CHECK_S
    history: Pace | None = Pace()
    read_ahead: int = READ_AHEAD
    quiet_limit: int = QUIET_LIMIT
    rewritten_bytes: int = REWRITTEN_BYTES


DEFAULT_LIMITS = Limits()
