"""Who is still there: leases and watched owners of all live allocations, and the judgement of silence and of deaths.

Silence counts only for a manager that hears: a lease that has run out is suspected first, then an end offset of
the input is sampled, and only when everything that its host said before it has been decided without a sign of life has
the lease expired. A death is judged alike, because the kernel tells it sooner than the bus tells what the worker's last
words were. It writes nothing; what it concludes goes to the core as an event.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import anyio
import anyio.lowlevel
import structlog

from outfitter_proto.bus import BusError
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.liveness.deaths import OwnerDeaths
from outfitter_service.runtime.liveness.input_end import InputEnd
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.owners import Owners
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.liveness.silence import SilenceJudge

log = structlog.get_logger("outfitter.attendance")

SAMPLE_RETRY_S = 1.0
AT_A_STRETCH = 200
"""Records of a replayed ledger that are looked at in one turn of the event loop."""


class LivenessTracker:
    """Leases and owners of one partition's live allocations. Silence and deaths are judged by the same samples of the
    input's end, and an owner that is watched needs no lease."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        grace_s: float,
        default_lease_s: float,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
        owner_watch: Callable[..., ProcessWatch] = ProcessWatch,
    ) -> None:
        """`grace_s`: seconds between a lease's end and its judgement. `default_lease_s`: the lease, in seconds, of
        older incarnations without any. `wake` is called when there may be a death to judge; `owner_watch` makes what
        watches owner processes."""
        self._now = clock.monotonic
        self._default_lease_s = default_lease_s
        self._wake = wake
        self.input_end = InputEnd(assignment)
        self.leases = Leases(grace_s)
        self._silence = SilenceJudge(self.leases, clock, suspect=self.input_end.ask)
        self._deaths = OwnerDeaths(clock, suspect=self.input_end.ask)
        self.owners = Owners(assignment.identity, clock, died=self._deaths.seen, owner_watch=owner_watch)

    @property
    def unjudged(self) -> int:
        """How many deaths have been seen and not been handed out."""
        return len(self._deaths)

    async def restart(
        self, ledger: Ledger, earlier_boot_id: str | None, *, told: Collection[AllocationKey] = ()
    ) -> None:
        """Begin with a replayed ledger: whoever is live has one whole lease anew, and owners are looked at again.

        `earlier_boot_id`: a boot of this machine that is over, so that its owners are dead. `told`: the allocations
        whose owners' deaths were handed out and are still to be decided.
        """
        self.owners.restart(earlier_boot_id)
        now = self._now()
        live = [record for record in ledger.allocations.values() if record.state not in FINAL_STATES]
        known = self.owners.keys() | self._deaths.keys() | self.leases.keys()
        for key in known - {record.key for record in live}:
            self.forget(key)
        for count, record in enumerate(live):
            if count % AT_A_STRETCH == AT_A_STRETCH - 1:
                await anyio.lowlevel.checkpoint()  # to look at a process takes a while
            self._attend(record.key, record, now)
            newest = ledger.host_state(record.host).newest(record.worker)
            if newest != record.key or record.reason_code == ReasonCode.SUPERSEDED:
                self.cut([record.key], ledger)
        self._deaths.forget(told)
        self.renew_all()

    def follow(self, changed: Mapping[AllocationKey, Allocation | None]) -> None:
        """Attend to what was just committed, by key (None: deleted)."""
        now = self._now()
        for key, record in changed.items():
            if record is not None and record.state not in FINAL_STATES:
                self._attend(key, record, now)
            else:
                self.forget(key)

    def forget(self, key: AllocationKey) -> None:
        """The allocation is over."""
        self.leases.drop(key)
        self._deaths.forget([key])
        self.owners.forget(key)

    def renew(self, keys: Iterable[AllocationKey]) -> None:
        """These have given a sign of life."""
        now = self._now()
        for key in keys:
            self.leases.renew(key, now)

    def renew_all(self) -> None:
        """Nobody could be heard for a while: one whole lease for everybody from now, and last words are listened for
        anew."""
        self.leases.renew_all(self._now())
        self._deaths.listen_anew()

    def cut(self, keys: Iterable[AllocationKey], ledger: Ledger) -> None:
        """A worker's older incarnations: nothing renews them any more, so a lease must end them if no owner does."""
        now = self._now()
        for key in keys:
            record = ledger.allocations.get(key)
            live = record is not None and record.state not in FINAL_STATES
            if record is not None and live and key not in self.owners and key not in self.leases:
                self.leases.start(key, record.request.lease_s or self._default_lease_s, now)

    def _attend(self, key: AllocationKey, record: Allocation, now: float) -> None:
        if self.owners.watch(key, record):
            self.leases.drop(key)
            return
        lease_s = record.request.lease_s
        if lease_s is not None and key not in self.leases:
            self.leases.start(key, lease_s, now)

    def untold(self) -> list[m.OwnerUnwatched]:
        """Hand out what workers must be told because they cannot know it: nobody sees their owner's end."""
        return self.owners.untold(self._default_lease_s)

    async def look(self) -> None:
        """Look again at owners that no descriptor tells of; runs until cancelled."""

        def settled(key: AllocationKey) -> None:
            if key in self.owners or key in self._deaths:
                self.leases.drop(key)

        await self.owners.look(settled)

    def expired(self, heard: Callable[[str], int]) -> list[m.LeaseExpired]:
        """The leases that have run out, judged with everything decided that a host said before the offset `heard`."""
        return self._silence.expired(heard)

    @property
    def more_suspects(self) -> bool:
        """Whether leases that had run out when `expired` was asked are still to be looked at."""
        return self._silence.more_suspects

    def deaths(self, position: int) -> list[m.OwnerDied]:
        """Hand out the deaths that can be judged with everything before `position` decided."""
        return self._deaths.judged(position)

    async def listen(self) -> None:
        """Sample the input's end whenever a lease is suspected to have run out or an owner has died; runs until
        cancelled."""
        while True:
            await self.input_end.asked()
            asked_at = self._now()
            dead = self._deaths.unsampled()
            try:
                end = await self.input_end.sample()
            except BusError as error:
                log.debug("cannot tell silence from an outage, leases are kept", error=str(error))
                self.leases.renew_all(self._now())
                await anyio.sleep(SAMPLE_RETRY_S)
                if self._deaths:
                    self.input_end.ask()
                continue
            self._silence.sampled(asked_at, end)
            self._deaths.sampled(dead, end)
            if dead:
                self._wake()

    def close(self) -> None:
        """Watch nobody any more."""
        self.owners.close()
        self._deaths.clear()
