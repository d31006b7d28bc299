"""A tenure: the time for which one manager holds a partition's writer."""

from __future__ import annotations

from msgspec import Struct

from outfitter_proto.bus import BusError, Writer
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.shape import Shape
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.processor.signs_of_life import SignsOfLife


class RecycledError(BusError):
    """The writer is tainted: one of its requests may reach the bus late and still act. So the manager replaces it."""


class Tenure(Struct, frozen=True, kw_only=True):
    """What one tenure works with. `cursor`: the settled position in the input. `shape`: the topics' shape at its start.
    `end`: the offset up to which the ledger was restored. `signs_of_life`: of its loop."""

    assignment: Assignment
    writer: Writer
    ledger: Ledger
    cursor: Cursor
    shape: Shape
    end: int
    signs_of_life: SignsOfLife
