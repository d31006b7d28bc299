"""What a processor works with from its first tenure to its last."""

from __future__ import annotations

from msgspec import Struct

from outfitter_proto.bus import BusError
from outfitter_proto.records import Note
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.changelog.topic_layout import TopicCheck
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.lookahead import Inputs
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.commit.refused_commit import RefusedCommit
from outfitter_service.runtime.processor.event_queue import EventQueue, StopRequest
from outfitter_service.runtime.processor.limits import Limits
from outfitter_service.runtime.processor.order_reader import OrderReader
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.signs_of_life import SignSender


class ReopenError(BusError):
    """The writer must be opened again: one of its requests may reach the bus late and still act."""


class Equipment(Struct, frozen=True, kw_only=True):
    """What the tenures of one processor have in common."""

    assignment: Assignment
    rules: Rules
    limits: Limits
    instruments: Instruments
    stop: StopRequest
    topic_check: TopicCheck
    event_queue: EventQueue
    inputs: Inputs
    liveness: LivenessTracker
    drivers: DriverCalls
    quotas: Quotas
    snapshots: Snapshots
    reporter: CommitReporter
    refused_commit: RefusedCommit
    signs_of_life: SignSender
    orders: OrderReader

    def lose_input(self, explanation: str) -> None:
        """Registrations are lost that no manager has read. Note that, and give every worker a whole new lease. The
        input continues at the earliest registrations."""
        self.reporter.input_lost(explanation)
        self.refused_commit.forget()
        self.liveness.renew_all()
        now, writer = self.instruments.clock.utc(), self.assignment.identity.writer
        self.event_queue.note(Note(at=now, writer=writer, event="input-lost", explanation=explanation))

    def log(self, event: str, **details: object) -> None:
        """Log a line, at debug level during an outage, which has a line already."""
        (self.reporter.log.debug if self.instruments.outage.on else self.reporter.log.info)(event, **details)
