"""The failure detector: leases and watched owners of all live allocations, and the judgement of silence and deaths.

A passed deadline is first a suspicion. Then the tracker samples the input's end. The lease has expired only once all
earlier messages of its host are decided and none of them has renewed it. The tracker judges a death in the same way,
because the kernel reports it before the bus delivers the worker's last messages. The tracker writes nothing; its
results go to the core as events.
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
from outfitter_service.runtime.input.input_end import InputEnd
from outfitter_service.runtime.liveness.deaths import OwnerDeaths
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.owners import Owners
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.liveness.silence import SilenceJudge

log = structlog.get_logger("outfitter.liveness")

SAMPLE_RETRY_S = 1.0
"""Seconds until the input's end is sampled again after an error."""
AT_A_STRETCH = 200
"""Records of a restored ledger that the tracker handles in one turn of the event loop."""


class LivenessTracker:
    """Leases and owners of one partition's live allocations. The same samples of the input's end serve for silence and
    deaths. A watched owner needs no lease."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        grace_s: float,
        default_lease_s: float,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
        make_process_watch: Callable[..., ProcessWatch] = ProcessWatch,
    ) -> None:
        """`grace_s`: seconds between a lease's end and its judgement. `default_lease_s`: the lease, in seconds, of
        superseded incarnations and unwatched owners without any. `wake` is called when there may be a death to judge.
        `make_process_watch` makes the watch of owner processes."""
        self._now = clock.monotonic
        self._default_lease_s = default_lease_s
        self._wake = wake
        self.input_end = InputEnd(assignment)
        self.leases = Leases(grace_s)
        self._silence = SilenceJudge(self.leases, clock, suspect=self.input_end.request_sample)
        self._deaths = OwnerDeaths(clock, suspect=self.input_end.request_sample)
        self.owners = Owners(assignment.identity, clock, died=self._deaths.seen, make_process_watch=make_process_watch)

    @property
    def unjudged(self) -> int:
        """How many deaths the tracker has seen and not handed out yet."""
        return len(self._deaths)

    async def restart(
        self, ledger: Ledger, earlier_boot_id: str | None, *, handed_out: Collection[AllocationKey] = ()
    ) -> None:
        """Start with a restored ledger: every live allocation gets one whole lease, and owners are watched again.

        `earlier_boot_id`: an ended boot of this machine, whose owners are dead. `handed_out`: the allocations whose
        owners' deaths were handed out and are not decided yet.
        """
        self.owners.restart(earlier_boot_id)
        now = self._now()
        live = [record for record in ledger.allocations.values() if record.state not in FINAL_STATES]
        tracked = self.owners.keys() | self._deaths.keys() | self.leases.keys()
        for key in tracked - {record.key for record in live}:
            self.forget(key)
        for count, record in enumerate(live):
            if count % AT_A_STRETCH == AT_A_STRETCH - 1:
                await anyio.lowlevel.checkpoint()  # it takes a while to find a process
            self._watch_or_lease(record.key, record, now)
            newest = ledger.host_state(record.host).runs.newest(record.worker)
            if newest != record.key or record.reason_code == ReasonCode.SUPERSEDED:
                self.start_final_leases([record.key], ledger)
        self._deaths.forget(handed_out)
        self.renew_all()

    def apply_committed(self, changed: Mapping[AllocationKey, Allocation | None]) -> None:
        """Start or end the watch of allocations that were just committed. `changed`: by key; None: deleted."""
        now = self._now()
        for key, record in changed.items():
            if record is not None and record.state not in FINAL_STATES:
                self._watch_or_lease(key, record, now)
            else:
                self.forget(key)

    def forget(self, key: AllocationKey) -> None:
        """The allocation is over."""
        self.leases.drop(key)
        self._deaths.forget([key])
        self.owners.forget(key)

    def renew(self, keys: Iterable[AllocationKey]) -> None:
        """The workers of these allocations have given a sign of life."""
        now = self._now()
        for key in keys:
            self.leases.renew(key, now)

    def renew_all(self) -> None:
        """After a time in which the input could not be read, give each worker one whole lease, and each death a new
        sample of the input's end."""
        self.leases.renew_all(self._now())
        self._deaths.sample_again()

    def start_final_leases(self, keys: Iterable[AllocationKey], ledger: Ledger) -> None:
        """Start the last leases of superseded incarnations. Nothing renews these leases: if no owner process is
        watched, only the lease can end such an incarnation."""
        now = self._now()
        for key in keys:
            record = ledger.allocations.get(key)
            is_live = record is not None and record.state not in FINAL_STATES
            if record is None or not is_live or record.request.waits_for_owner:
                continue
            if key not in self.owners and key not in self.leases:
                self.leases.start(key, record.request.lease_s or self._default_lease_s, now)

    def _watch_or_lease(self, key: AllocationKey, record: Allocation, now: float) -> None:
        """Watch a live allocation's owner process, or else start its lease if it has one. Without heartbeats it has
        none."""
        if self.owners.watch(key, record) or record.request.waits_for_owner:
            self.leases.drop(key)
            return
        lease_s = record.request.lease_s
        if lease_s is not None and key not in self.leases:
            self.leases.start(key, lease_s, now)

    def take_unreported(self) -> list[m.OwnerUnwatched]:
        """Remove and return the unwatched owners that records must mention."""
        return self.owners.take_unreported(self._default_lease_s)

    async def poll_owners(self) -> None:
        """Poll owners without a descriptor, until cancelled."""

        def resolved(key: AllocationKey) -> None:
            if key in self.owners or key in self._deaths:
                self.leases.drop(key)

        await self.owners.poll_owners(resolved)

    def expired(self, decided_before: Callable[[str], int]) -> list[m.LeaseExpired]:
        """The expired leases. `decided_before`: the offset before which all messages of a host are decided."""
        return self._silence.expired(decided_before)

    @property
    def more_suspects(self) -> bool:
        """Whether leases that were due at the last call of `expired` are not checked yet."""
        return self._silence.more_suspects

    def deaths(self, position: int) -> list[m.OwnerDied]:
        """Remove and return the deaths that can be judged once everything before `position` is decided."""
        return self._deaths.judged(position)

    async def listen(self) -> None:
        """Sample the input's end whenever a lease may have expired or an owner has died, until cancelled."""
        while True:
            await self.input_end.wait_for_request()
            requested_at = self._now()
            unsampled = self._deaths.unsampled()
            try:
                end = await self.input_end.sample()
            except BusError as error:
                log.debug("cannot sample the end of the input, renewing all leases", error=str(error))
                self.leases.renew_all(self._now())
                await anyio.sleep(SAMPLE_RETRY_S)
                if self._deaths:
                    self.input_end.request_sample()
                continue
            self._silence.sampled(requested_at, end)
            self._deaths.sampled(unsampled, end)
            if unsampled:
                self._wake()

    def close(self) -> None:
        """Stop watching, and drop everything."""
        self.owners.close()
        self._deaths.clear()
        self.leases.clear()
