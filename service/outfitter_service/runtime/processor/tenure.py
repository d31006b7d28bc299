"""What taking a partition came to."""

from __future__ import annotations

from msgspec import Struct

from outfitter_proto.bus import BusError, Writer
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.shape import Shape
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import Cursor


class RecycledError(BusError):
    """The writer is tainted: a late request of it could still act, so it is replaced."""


class Tenure(Struct, frozen=True, kw_only=True):
    """A partition as long as one writer holds it: a tenure. `shape`: that of the topics when it was taken.
    `batch_bytes`: what a commit's ledger batch may have, and its batch of history. `end`: the offset up to which the
    ledger was read."""

    assignment: Assignment
    writer: Writer
    ledger: Ledger
    cursor: Cursor
    shape: Shape
    batch_bytes: int
    end: int
