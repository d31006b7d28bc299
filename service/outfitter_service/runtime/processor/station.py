"""What a processor works with for as long as it lives, whoever writes to its partition meanwhile.

The processor takes the partition and gives each of its cycles this to work with.
"""

from __future__ import annotations

import anyio
from msgspec import Struct

from outfitter_proto.bus import Bus
from outfitter_proto.names import Topics
from outfitter_proto.records import Note
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.shape import LOOK_S
from outfitter_service.runtime.changelog.snapshots import Pace, Snapshots
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.input_reader import READ_AHEAD, InputReader
from outfitter_service.runtime.input.lookahead import LIGHT, LookAhead
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.batch_limits import BatchLimits
from outfitter_service.runtime.processor.event_queue import EventQueue, Wakeup
from outfitter_service.runtime.processor.reporting import CommitReporter


class Limits(Struct, frozen=True, kw_only=True):
    """How much and how long: records, seconds. `take_over`: accept a ledger that another machine wrote, `adopt`: one
    that was written to another topic, or is gone. `look_s`: how often it looks at the shape of its topics. `history`:
    how often that topic gets snapshots; None: nothing is written to it. `read_ahead` and `quiet_limit` are as in
    intake.py
    and scout.py."""

    batch_records: int = 1000
    lease_grace_s: float = 2.0
    checkpoint_interval_s: float = 3600.0
    checkpoint_records: int = 5000
    hosts: int = 10_000
    take_over: bool = False
    adopt: bool = False
    look_s: float = LOOK_S
    history: Pace | None = Pace()
    read_ahead: int = READ_AHEAD
    quiet_limit: int = LIGHT


DEFAULT_LIMITS = Limits()


class StopRequest:
    """A wish to stop after one last commit. `parting`: that commit says that nobody manages the hosts any more."""

    def __init__(self) -> None:
        self.parting = True
        self._asked = anyio.Event()

    def ask(self, *, parting: bool) -> None:
        self.parting = parting
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()


class Station(Struct, kw_only=True):
    """One processor's tools and settings."""

    bus: Bus
    topics: Topics
    partition: int
    identity: Identity
    scope: Scope
    rules: Rules
    limits: Limits
    metrics: Metrics
    clock: Clock
    drivers: DriverCalls
    wakeup: Wakeup
    event_queue: EventQueue
    liveness: LivenessTracker
    input_reader: InputReader
    lookahead: LookAhead
    batch_limits: BatchLimits
    dead_letter_quota: DeadLetterQuota
    naming: DeadLetterQuota
    snapshots: Snapshots
    reporter: CommitReporter

    def input_lost(self, explanation: str) -> None:
        """Registrations are gone unread: it goes on at the earliest there are, with a whole lease for everybody."""
        self.reporter.log.error("registrations were lost, going on at the earliest there are", reason=explanation)
        self.metrics.input_lost.inc()
        self.batch_limits.forget()
        self.lookahead.rest(until=0)
        self.liveness.renew_all()
        self.event_queue.note(
            Note(at=self.clock.utc(), writer=self.identity.writer, event="input-lost", explanation=explanation)
        )
