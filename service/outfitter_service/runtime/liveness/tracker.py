"""Who is still there: leases and watched owners of all live allocations, and the judgement of silence and of deaths.

Silence counts only for a manager that hears: a lease that has run out is suspected first, then an end offset of
the input is sampled, and only when everything that its host said before it has been decided without a sign of life has
the lease expired. A death is judged alike, because the kernel tells it sooner than the bus tells what the worker's last
words were. It writes nothing; what it concludes goes to the core as an event.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from operator import attrgetter

import anyio
import anyio.lowlevel
import structlog
from msgspec import UNSET, Struct

from outfitter_proto.bus import Bus, BusError
from outfitter_proto.keys import allocation_names
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode, Unwatched
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.identity import Identity, SuspendWatch
from outfitter_service.runtime.liveness.leases import Leases
from outfitter_service.runtime.liveness.process_watch import REASONS, ProcessWatch

log = structlog.get_logger("outfitter.attendance")

SAMPLE_RETRY_S = 1.0
LAST_WORDS_S = 5.0
"""How long a death waits at most for what was said before it, where the bus is away or the input piles up: the device
is worth more than the right word for the end."""
LOOK_EVERY_S = 0.25
"""How often owners that no descriptor tells of are looked at, some at a time."""
SAID_EVERY_S = 60.0
"""Between two lines of the log that say why owners are not watched."""
SUSPECTS_AT_ONCE = 500
"""Leases that have run out, or may have, that are looked at in one turn of the event loop."""
AT_A_STRETCH = 200
"""Records of a replayed ledger that are looked at in one turn of the event loop."""
FROM_AFAR = frozenset({Unwatched.SCOPE, Unwatched.MACHINE, Unwatched.PID_NAMESPACE})
"""What a worker can tell from its host's record: that its owner is not watched."""
MOST_SAMPLES = 1000
"""Samples of the input's end that wait to be come to. Beyond that every second one is left out: leases that ran out in
between wait for the next one."""


class _Sample(Struct, frozen=True):
    """Where the input ended, when that was asked `at`."""

    at: float
    end: int


_AT = attrgetter("at")


class _Death(Struct):
    """An owner's death that has not been judged. `end`: the input's end offset, sampled since it was seen."""

    detail: str
    seen_at: float
    end: int | None = None


class LivenessTracker:
    """Leases and owners of one partition's live allocations. It is large, for silence and deaths are judged by the same
    samples of the input's end, and an owner that is watched needs no lease."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        partition: int,
        *,
        identity: Identity,
        grace_s: float,
        default_lease_s: float,
        wake: Callable[[], None],
        clock: Clock = SYSTEM,
        owner_watch: Callable[..., ProcessWatch] = ProcessWatch,
    ) -> None:
        """`wake` is called when there may be a death to judge; `owner_watch` makes what watches owner processes."""
        self._bus = bus
        self._now = clock.monotonic
        self._topic = topic
        self._partition = partition
        self._identity = identity
        self._default_lease_s = default_lease_s
        self._wake = wake
        self._owner_watch = owner_watch
        self.leases = Leases(grace_s)
        self._owners: ProcessWatch | None = None
        self._to_tell: set[str] = set()
        self._look_again = anyio.Event()
        self._said: frozenset[str] = frozenset()
        self._said_at = -SAID_EVERY_S
        self._deaths: dict[str, _Death] = {}
        self._suspend = SuspendWatch(clock)
        self._suspected = anyio.Event()
        self._samples: list[_Sample] = []
        self._earliest = math.inf
        self._round_at: float | None = None

    @property
    def watched(self) -> int:
        """How many owner processes are watched."""
        return len(self._owners) if self._owners is not None else 0

    @property
    def polled(self) -> int:
        """How many of them are looked at in turns, for want of descriptors."""
        return self._owners.polled if self._owners is not None else 0

    @property
    def unwatched(self) -> Counter[Unwatched]:
        """How many live allocations' owners are not watched, by why."""
        return self._owners.unwatched() if self._owners is not None else Counter()

    @property
    def unjudged(self) -> int:
        """How many deaths have been seen and not been handed out."""
        return len(self._deaths)

    async def restart(self, ledger: Ledger, earlier_boot_id: str | None, *, told: Collection[str] = ()) -> None:
        """Begin with a replayed ledger: whoever is live has one whole lease anew, and owners are looked at again.

        `earlier_boot_id`: a boot of this machine that is over, so that its owners are dead. `told`: the allocations
        whose owners' deaths were handed out and are still to be decided.
        """
        if self._owners is None:
            self._owners = self._owner_watch(
                boot_id=self._identity.boot_id,
                pid_ns=self._identity.pid_ns,
                time_ns=self._identity.time_ns,
                earlier_boot_id=earlier_boot_id,
                died=self._died,
            )
        now = self._now()
        live = [record for record in ledger.allocations.values() if record.state not in FINAL_STATES]
        known = self._owners.keys() | self._deaths.keys() | self.leases.keys()
        for key in known - {record.key for record in live}:
            self.forget(key)
        self._to_tell.clear()
        for count, record in enumerate(live):
            if count % AT_A_STRETCH == AT_A_STRETCH - 1:
                await anyio.lowlevel.checkpoint()  # to look at a process takes a while
            self._attend(record.key, record, now)
            newest = ledger.host_state(record.host).newest(record.worker)
            if newest != record.key or record.reason_code == ReasonCode.SUPERSEDED:
                self.cut([record.key], ledger)
        for key in told:
            self._deaths.pop(key, None)
        self.renew_all()

    def follow(self, changed: Mapping[str, Allocation | None]) -> None:
        """Attend to what was just committed, by key (None: deleted)."""
        now = self._now()
        for key, record in changed.items():
            if record is not None and record.state not in FINAL_STATES:
                self._attend(key, record, now)
            else:
                self.forget(key)

    def forget(self, key: str) -> None:
        self.leases.drop(key)
        self._deaths.pop(key, None)
        self._to_tell.discard(key)
        if self._owners is not None:
            self._owners.forget(key)

    def renew(self, keys: Iterable[str]) -> None:
        now = self._now()
        for key in keys:
            self.leases.renew(key, now)

    def renew_all(self) -> None:
        """Nobody could be heard for a while: one whole lease for everybody from now, and last words are listened for
        anew."""
        self.leases.renew_all(self._now())
        for death in self._deaths.values():
            death.end = None
            self._suspected.set()

    def cut(self, keys: Iterable[str], ledger: Ledger) -> None:
        """A worker's older incarnations: nothing renews them any more, so a lease must end them if no owner does."""
        now = self._now()
        for key in keys:
            record = ledger.allocations.get(key)
            watched = self._owners is not None and key in self._owners
            if record is not None and record.state not in FINAL_STATES and not watched and key not in self.leases:
                self.leases.start(key, record.request.lease_s or self._default_lease_s, now)

    def _attend(self, key: str, record: Allocation, now: float) -> None:
        owner, lease_s = record.request.owner, record.request.lease_s
        if self._owners is not None and owner is not None:
            watched = self._owners.watch(key, owner)
            if self._owners.unsettled or not watched:
                self._look_again.set()
            if watched:
                self.leases.drop(key)
                return
            if lease_s is None or (record.unwatched is UNSET and self._owners.reason(key) not in FROM_AFAR):
                self._to_tell.add(key)
        if lease_s is not None and key not in self.leases:
            self.leases.start(key, lease_s, now)

    # --- owners that are not watched ---

    def untold(self) -> list[m.OwnerUnwatched]:
        """Hand out what workers must be told because they cannot know it: nobody sees their owner's end."""
        if self._owners is None or not self._to_tell:
            return []
        events: list[m.OwnerUnwatched] = []
        for key in sorted(self._to_tell):
            reason = self._owners.reason(key)
            if reason != Unwatched.DESCRIPTORS:  # that one is looked at again
                self._to_tell.discard(key)
                if reason is not None:
                    told = REASONS[reason]
                    events.append(
                        m.OwnerUnwatched(allocation=key, code=reason, reason=told, lease_s=self._default_lease_s)
                    )
        return events

    async def look(self) -> None:
        """Look again at owners that no descriptor tells of; runs until cancelled."""
        while True:
            await self._look_again.wait()
            self._look_again = anyio.Event()
            await anyio.sleep(LOOK_EVERY_S)
            if self._owners is None:
                continue
            for key in self._owners.look():
                if key in self._owners or key in self._deaths:
                    self.leases.drop(key)
            self._say_unwatched()
            if self._owners.unsettled:
                self._look_again.set()

    def _say_unwatched(self) -> None:
        """One line for all, when there is a new reason."""
        counts = {str(reason): count for reason, count in self.unwatched.items() if reason != Unwatched.SCOPE}
        if self.polled:
            counts["looked-at-in-turns"] = self.polled
        if counts.keys() <= self._said or self._now() - self._said_at < SAID_EVERY_S:
            return
        self._said, self._said_at = self._said | counts.keys(), self._now()
        log.warning("not every owner process is watched by the kernel's means", **counts)

    # --- silence ---

    def expired(self, heard: Callable[[str], int]) -> list[m.LeaseExpired]:
        """The leases that have run out, judged with everything decided that a host said before the offset `heard`. Of
        many at once some: `more_suspects` says that the others are still to be looked at."""
        now = self._now() if self._round_at is None else self._round_at
        if self._suspend.slept():
            log.warning("the machine was suspended: every lease starts anew")
            self.leases.renew_all(self._now())
        due = self.leases.due(now, SUSPECTS_AT_ONCE)
        samples, deadline = self._samples, self.leases.deadline
        if due:
            self._earliest = min(self._earliest, deadline(due[0]))
        judged: list[str] = []
        for key in due:
            # each lease has its own sample: where the input is never read to its end, the newest one is never come to
            first = bisect_left(samples, deadline(key), key=_AT)
            if first == len(samples):
                self._suspected.set()
                break
            if heard(allocation_names(key).host) >= samples[first].end:
                judged.append(key)
        for key in judged:
            self.leases.drop(key)
        self._round_at = now if self.leases.left else None
        if self._round_at is None:
            del samples[: bisect_left(samples, self._earliest, key=_AT)]  # nobody waits for those
            self._earliest = math.inf
        return [m.LeaseExpired(allocation=key) for key in judged]

    @property
    def more_suspects(self) -> bool:
        """Whether leases that had run out when `expired` was asked are still to be looked at."""
        return self._round_at is not None

    # --- deaths ---

    def _died(self, key: str, detail: str) -> None:
        if key not in self._deaths:
            self._deaths[key] = _Death(detail, self._now())
            self._suspected.set()

    def deaths(self, position: int) -> list[m.OwnerDied]:
        """Hand out the deaths that can be judged with everything before `position` decided."""
        if not self._deaths:
            return []
        late = self._now() - LAST_WORDS_S
        judged = [
            m.OwnerDied(allocation=key, detail=death.detail)
            for key, death in self._deaths.items()
            if death.seen_at <= late or (death.end is not None and position >= death.end)
        ]
        for event in judged:
            del self._deaths[event.allocation]
        return judged

    async def listen(self) -> None:
        """Sample the input's end whenever a lease is suspected to have run out or an owner has died; runs until
        cancelled."""
        while True:
            await self._suspected.wait()
            self._suspected = anyio.Event()
            asked_at = self._now()
            dead = [death for death in self._deaths.values() if death.end is None]
            try:
                _, end = await self._bus.offsets(self._topic, self._partition)
            except BusError as error:
                log.debug("cannot tell silence from an outage, leases are kept", error=str(error))
                self.leases.renew_all(self._now())
                await anyio.sleep(SAMPLE_RETRY_S)
                if self._deaths:
                    self._suspected.set()
                continue
            self._samples.append(_Sample(asked_at, end))
            if len(self._samples) > MOST_SAMPLES:
                del self._samples[1::2]
            for death in dead:
                death.end = end
            if dead:
                self._wake()

    def close(self) -> None:
        if self._owners is not None:
            self._owners.close()
            self._owners = None
        self._deaths.clear()
