"""What a processor was assigned, and what taking the partition came to."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from outfitter_proto.bus import Bus, BusError, Writer
from outfitter_proto.names import Topics
from outfitter_proto.records import ManagerIdentity
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.shape import Shape
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.scope import Scope


class RecycledError(BusError):
    """The writer is tainted: a late request of it could still act, so it is replaced."""


class Assignment(Struct, frozen=True, kw_only=True):
    """One partition of the topics, the writer identity for it, and the hosts to serve. `since`: when this manager
    started."""

    bus: Bus
    topics: Topics
    partition: int
    identity: Identity
    scope: Scope
    since: datetime

    def manager(self, stopped_at: datetime | None = None) -> ManagerIdentity:
        """What host records say of this manager."""
        return self.identity.manager(self.since, stopped_at)


class TakenPartition(Struct, frozen=True, kw_only=True):
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
