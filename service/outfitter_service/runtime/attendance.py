"""Who is still there: leases and watched owners of all live allocations, and the judgement of silence.

Silence counts only for a manager that hears: a lease that has run out is suspected first, then an end offset of
the input is sampled, and only when everything before it has been decided without a sign of life has the
lease expired. It writes nothing; what it concludes goes to the core as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import structlog

from outfitter_proto.bus import Bus, BusError
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.leases import Leases
from outfitter_service.core.ledger import Ledger
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.identity import Identity, SuspendWatch
from outfitter_service.runtime.owners import OwnerWatch

log = structlog.get_logger("outfitter.attendance")

SAMPLE_RETRY_S = 1.0


class Attendance:
    """Leases and owners of one partition's live allocations."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        partition: int,
        *,
        identity: Identity,
        grace_s: float,
        default_lease_s: float,
        emit: Callable[[m.Event], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._bus = bus
        self._now = clock.monotonic
        self._topic = topic
        self._partition = partition
        self._identity = identity
        self._default_lease_s = default_lease_s
        self._emit = emit
        self.leases = Leases(grace_s)
        self._owners: OwnerWatch | None = None
        self._suspend = SuspendWatch(clock)
        self._suspected = anyio.Event()
        self._sampled_at = float("-inf")
        self._sampled_end = 0

    @property
    def watched(self) -> int:
        return len(self._owners) if self._owners is not None else 0

    def restart(self, ledger: Ledger, earlier_boot_id: str | None) -> None:
        """Begin with a replayed ledger: whoever is live has one whole lease anew, and owners are looked at again.

        `earlier_boot_id`: a boot of this machine that is over, so that its owners are dead.
        """
        if self._owners is None:
            self._owners = OwnerWatch(
                boot_id=self._identity.boot_id,
                pid_ns=self._identity.pid_ns,
                earlier_boot_id=earlier_boot_id,
                died=lambda key, detail: self._emit(m.OwnerDied(allocation=key, detail=detail)),
            )
        now = self._now()
        live = [record for record in ledger.allocations.values() if record.state not in FINAL_STATES]
        for key in self._owners.keys() - {record.key for record in live}:
            self._owners.forget(key)
        for record in live:
            self._attend(record, now)
            newest = ledger.book(record.host).current.get(record.worker)
            if newest != record.key or record.reason_code == ReasonCode.SUPERSEDED:
                self.cut([record.key], ledger)
        self.leases.renew_all(now)

    def follow(self, records: Iterable[Allocation]) -> None:
        """Attend to what was just committed."""
        now = self._now()
        for record in records:
            if record.state in FINAL_STATES:
                self.forget(record.key)
            else:
                self._attend(record, now)

    def forget(self, key: str) -> None:
        self.leases.drop(key)
        if self._owners is not None:
            self._owners.forget(key)

    def renew(self, keys: Iterable[str]) -> None:
        now = self._now()
        for key in keys:
            self.leases.renew(key, now)

    def renew_all(self) -> None:
        """Nobody could be heard for a while: one whole lease for everybody from now."""
        self.leases.renew_all(self._now())

    def cut(self, keys: Iterable[str], ledger: Ledger) -> None:
        """A worker's older incarnations: nothing renews them any more, so a lease must end them if no owner does."""
        now = self._now()
        for key in keys:
            record = ledger.allocations.get(key)
            watched = self._owners is not None and key in self._owners
            if record is not None and record.state not in FINAL_STATES and not watched and key not in self.leases:
                self.leases.start(key, record.request.lease_s or self._default_lease_s, now)

    def _attend(self, record: Allocation, now: float) -> None:
        key = record.key
        owner = record.request.owner
        if self._owners is not None and owner is not None and (key in self._owners or self._owners.watch(key, owner)):
            self.leases.drop(key)
        elif record.request.lease_s is not None and key not in self.leases:
            self.leases.start(key, record.request.lease_s, now)

    # --- silence ---

    def expired(self, position: int) -> list[m.LeaseExpired]:
        """The leases that have run out, judged with everything before `position` decided."""
        now = self._now()
        if self._suspend.slept():
            log.warning("the machine was suspended: every lease starts anew")
            self.leases.renew_all(now)
        due = self.leases.due(now)
        if not due:
            return []
        judged = [key for key in due if self.leases.deadline(key) <= self._sampled_at and position >= self._sampled_end]
        if len(judged) < len(due):
            self._suspected.set()
        for key in judged:
            self.leases.drop(key)
        return [m.LeaseExpired(allocation=key) for key in judged]

    async def listen(self) -> None:
        """Sample the input's end whenever a lease is suspected to have run out; runs until cancelled."""
        while True:
            await self._suspected.wait()
            self._suspected = anyio.Event()
            asked_at = self._now()
            try:
                _, end = await self._bus.offsets(self._topic, self._partition)
            except BusError as error:
                log.warning("cannot tell silence from an outage, leases are kept", error=str(error))
                self.leases.renew_all(self._now())
                await anyio.sleep(SAMPLE_RETRY_S)
                continue
            self._sampled_at, self._sampled_end = asked_at, end

    def close(self) -> None:
        if self._owners is not None:
            self._owners.close()
            self._owners = None
