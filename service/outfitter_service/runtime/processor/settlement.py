"""Settles commits: acts on written ones, and takes back failed ones.

The manager acts on nothing and reports nothing before the commit has returned.
"""

from __future__ import annotations

import anyio
from msgspec import Struct

from outfitter_proto.bus import BusError, OffsetOutOfRangeError
from outfitter_proto.records import Allocation, Note
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.lookahead import Inputs
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.pending_commit import PendingCommit
from outfitter_service.runtime.processor.commit.refused_commit import RefusedCommit
from outfitter_service.runtime.processor.commit_builder import CommitBuilder
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.tenure import Tenure


class InputLoss(Struct, frozen=True):
    """Handles the loss of registrations that no manager has read. `writer`: the writer of the note in history."""

    writer: str
    clock: Clock
    reporter: CommitReporter
    refused_commit: RefusedCommit
    inputs: Inputs
    liveness: LivenessTracker
    event_queue: EventQueue

    def accept(self, explanation: str) -> None:
        """Note the loss, and give every worker a whole new lease. The input continues at the earliest registrations."""
        self.reporter.input_lost(explanation)
        self.refused_commit.forget()
        self.liveness.renew_all()
        self.event_queue.note(
            Note(at=self.clock.utc(), writer=self.writer, event="input-lost", explanation=explanation)
        )


class Settlement:
    """Settles the commits of one tenure. `first_commit` is set once a commit is written."""

    def __init__(
        self,
        tenure: Tenure,
        builder: CommitBuilder,
        inputs: Inputs,
        liveness: LivenessTracker,
        drivers: DriverCalls,
        event_queue: EventQueue,
        reporter: CommitReporter,
        input_loss: InputLoss,
    ) -> None:
        self._tenure = tenure
        self._builder = builder
        self._inputs = inputs
        self._liveness = liveness
        self._drivers = drivers
        self._event_queue = event_queue
        self._reporter = reporter
        self._input_loss = input_loss
        self.refused_commit = input_loss.refused_commit
        self.first_commit = anyio.Event()

    @property
    def unreported(self) -> bool:
        """Whether a settled commit is not reported yet."""
        return self._reporter.behind

    def report(self) -> None:
        """Count and log settled commits. Runs while the next commit is under way, to delay none."""
        self._reporter.catch_up(self._tenure.ledger)

    def settle(self, commit: PendingCommit, *, idle: bool) -> None:
        """The decisions of `commit` are final: drop their input, and act. `idle`: no internal event waits, and none is
        decided for the next commit."""
        ledger, event_queue, liveness, effects = (
            self._tenure.ledger, self._event_queue, self._liveness, commit.batch.effects,
        )  # fmt: skip
        self._tenure.cursor.advance(commit.position, commit.ahead)
        self._builder.settled(commit)
        self.refused_commit.passed(commit.position, idle=idle)
        ledger.settle()
        if commit.done:
            self.first_commit.set()
            self._reporter.answered(None, commit.seconds)
        else:
            # nothing was written: follow-ups are decided for the next commit
            ledger.discard_undo()
            event_queue.extend(effects.follow_ups)
        liveness.renew(effects.renewed)
        liveness.apply_committed(effects.allocations)
        liveness.start_final_leases(effects.final_leases, ledger)
        for event in effects.failed_events:
            self._set_aside(event, "deciding it met a defect, which the manager's log describes")
        event_queue.settled(
            commit.internal,
            notes=commit.sealed.notes,
            boot_judged=commit.done and not commit.sealed.deaths_left,
        )
        for host in effects.announced:
            self._update_drivers(host)
        for command in effects.commands:
            record, _ = commit.batch.output.values.get(command.allocation, (None, None))
            allocation = record if isinstance(record, Allocation) else ledger.allocations.get(command.allocation)
            self._drivers.perform(command, allocation)
        for allocation in effects.allocations.values():
            if allocation is not None:
                self._drivers.see_committed(allocation)
        self._reporter.settled(commit.batch)

    def _update_drivers(self, host: str) -> None:
        """Start the host's drivers, or stop them where its record is gone."""
        ledger = self._tenure.ledger
        host_state = ledger.hosts.get(host)
        if host_state is not None and host_state.record is not None:
            self._drivers.start_host(host)
        else:
            self._drivers.stop_host(host)
            self._event_queue.forget(host)
            ledger.forget(host)

    def take_back(self, *commits: PendingCommit) -> None:
        """Take back these commits, the latest first. Their events must be decided again."""
        self._tenure.ledger.rollback()
        for commit in commits:
            self._event_queue.give_back(commit.internal, but=commit.batch.effects.follow_ups)
            self._inputs.give_back(commit.messages, commit.looked_ahead)
            if commit.trouble is not None:
                self._reporter.answered(commit.trouble, commit.seconds)
        self._builder.taken_back(*commits)

    def _set_aside(self, event: m.Event, problem: str) -> None:
        """An event could not be committed: have its allocation judged again later, so that its record is not stuck."""
        self._event_queue.set_aside(event, problem)
        if isinstance(event, m.LeaseExpired):
            # the allocation gets one more lease, and is judged again after it
            self._liveness.start_final_leases([event.allocation], self._tenure.ledger)

    async def begin_again(self, lost: OffsetOutOfRangeError) -> BusError | None:
        """Continue where the input begins now. Messages of a recreated topic count as later than all earlier ones.
        Returns the error if the bus did not answer."""
        cursor, assignment = self._tenure.cursor, self._tenure.assignment
        try:
            topic_id = (await assignment.bus.topic(assignment.topics.registrations)).id
        except BusError as error:
            return error
        cursor.begin_again(lost.start, topic_id)
        self._inputs.reset(cursor)
        self._builder.begin_again()
        self._input_loss.accept(str(lost))
        return None
