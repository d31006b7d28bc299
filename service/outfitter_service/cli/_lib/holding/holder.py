"""What holds devices by a worker's session: `outfitter run`, `outfitter hold` and `outfitter-lease` alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Final

from outfitter.errors import AllocationEndedError, LeaseLostError, NoManagerError
from outfitter.session.status import AllocationStatus, status_of
from outfitter.session.watch import AllocationWatch
from outfitter.session.worker_session import MANAGER_PATIENCE, WorkerSession
from outfitter_proto import bus as buses
from outfitter_proto.bus import WORKER, Bus, Create
from outfitter_proto.records import Allocation, Register
from outfitter_service.cli._lib import output
from outfitter_service.cli._lib.errors import warn
from outfitter_service.config import BusConnection
from outfitter_service.query import ledger_view

LOST: Final = 123
"""The exit code of `outfitter hold` after an allocation that ended before its owner did."""
FAILED: Final = 125


class Holder:
    """Registers workers on a bus. `waits_for_manager`: however long it takes until there is one."""

    def __init__(self, where: BusConnection, *, waits_for_manager: bool = False) -> None:
        self._where = where
        self._waits_for_manager = waits_for_manager

    def bus(self, create: Create = Create.NOTHING) -> AbstractAsyncContextManager[Bus]:
        """The bus, for writing as well. `create`: what to create of a missing embedded one."""
        where = self._where
        return buses.connect(where.bus, where.login, create=create, client=f"{WORKER}{where.host}")

    def session(
        self,
        bus: Bus,
        registration: Register,
        *,
        is_known: bool = False,
        on_lease_at_risk: Callable[[LeaseLostError], object] = lambda error: warn(str(error)),
    ) -> WorkerSession:
        """The session of a registration. `is_known`: a manager has answered it already."""
        return WorkerSession(
            bus,
            registration,
            cluster=self._where.cluster,
            registered=is_known,
            manager_patience=None if is_known or self._waits_for_manager else MANAGER_PATIENCE,
            on_lease_at_risk=on_lease_at_risk,
        )

    async def earlier(self, bus: Bus, registration: Register) -> Allocation | None:
        """The newest record of this incarnation, which another process may have registered; None without any. No
        manager is needed."""
        session = WorkerSession(bus, registration, cluster=self._where.cluster, attach=True)
        try:
            await session.open()
        except (AllocationEndedError, NoManagerError):
            return None
        finally:
            await session.aclose()
        return session.record


class WaitingReasons:
    """Prints on standard error why a worker waits, at each change."""

    def __init__(self, allocation_watch: AllocationWatch) -> None:
        self._watch = allocation_watch
        self._begun = datetime.now(UTC)
        self._printed = ""

    async def run(self) -> None:
        """Print until cancelled."""
        snapshot = self._watch.read()
        while True:
            record = snapshot.record
            if record is not None and status_of(record) is AllocationStatus.WAITING:
                words = ledger_view.waiting_in_words(record)
                if words != self._printed:
                    warn(words)
                    self._printed = words
            snapshot = await self._watch.changed(snapshot.version)

    def say_granted(self, record: Allocation) -> None:
        """Print what the worker has, if it had to wait."""
        if self._printed:
            waited = output.age((datetime.now(UTC) - self._begun).total_seconds())
            warn(f"has {ledger_view.devices_in_words(record)} after {waited}")
