"""Whether an incarnation was registered before, by another process that asked for the same owner."""

from __future__ import annotations

from outfitter.errors import AllocationEndedError, NoManagerError
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import Bus
from outfitter_proto.records import Allocation, Register


async def find(bus: Bus, cluster: str, registration: Register) -> Allocation | None:
    """The newest record of this incarnation in the ledger; None without any. No manager is needed."""
    session = WorkerSession(bus, registration, cluster=cluster, attach=True)
    try:
        await session.open()
    except (AllocationEndedError, NoManagerError):
        return None
    finally:
        await session.aclose()
    return session.record
