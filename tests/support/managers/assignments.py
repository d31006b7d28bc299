"""What the processors of tests are assigned."""

from __future__ import annotations

from outfitter_proto.bus import Bus
from outfitter_proto.names import topics
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.identity import Identity, host_identity
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.scope import HostScope, Scope
from outfitter_service.runtime.survivors.processes import Search


def assignment_of(
    bus: Bus, identity: Identity | None = None, *, partition: int = 0, partitions: int | None = None,
    scope: Scope | None = None, clock: Clock = SYSTEM,
) -> Assignment:  # fmt: skip
    """A partition for the writer that `identity` says; left out, a manager of host `h` that starts now."""
    identity = identity or host_identity("outfitter", "h")
    return Assignment(
        bus=bus,
        topics=topics(identity.cluster),
        partition=partition,
        partitions=partitions,
        identity=identity,
        scope=scope or HostScope(identity.host or "", identity.writer),
        since=clock.utc(),
    )


async def nobody_runs(_: str) -> Search:
    """A search for the processes of a host's workers, in which there are none."""
    return Search({}, frozenset())
