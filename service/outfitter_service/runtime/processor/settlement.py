"""Settles commits: acts on written ones, and takes back failed ones. After a commit was too large, the next one is
smaller.

The manager acts on nothing and reports nothing before the commit has returned.
"""

from __future__ import annotations

import anyio
from msgspec import Struct

from outfitter_proto.bus import BusError, OffsetOutOfRangeError, TooLargeError
from outfitter_proto.records import Allocation, Note
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.lookahead import Inputs
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.batch_limits import BatchLimits
from outfitter_service.runtime.processor.commit.pending_commit import PendingCommit
from outfitter_service.runtime.processor.commit_builder import CommitBuilder
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter, subject_of
from outfitter_service.runtime.processor.tenure import Tenure


class InputLoss(Struct, frozen=True):
    """Handles the loss of registrations that no manager has read. `writer`: the writer of the note in history."""

    writer: str
    clock: Clock
    reporter: CommitReporter
    batch_limits: BatchLimits
    inputs: Inputs
    liveness: LivenessTracker
    event_queue: EventQueue

    def accept(self, explanation: str) -> None:
        """Note the loss, and give every worker a whole new lease. The input continues at the earliest registrations."""
        self.reporter.input_lost(explanation)
        self.batch_limits.forget()
        self.inputs.lookahead.pause(until=0)
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
        self._builder.settled(commit, idle=idle)
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
        if self._builder.batch_limits.shortage is None:
            self._reporter.size_refusals.over()
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

    def narrow(self, commit: PendingCommit, trouble: TooLargeError) -> bool:
        """A commit was too large: try fewer events, then smaller pieces of one event's effects. If an event's own
        record is too large even then, set that event aside, but no deregistration: it waits until the topics take more.
        An answer that had waited is left out. Returns False if that would not help."""
        self._reporter.size_refusals.split(trouble, events=commit.batch.events)
        if self._builder.shrink(commit):
            narrowed = True
        elif answers := self._builder.forget_answers(commit):  # such a commit has nothing else
            for key in answers:
                self._reporter.size_refusals.set_aside(trouble, event_kind="register", allocation=key)
            narrowed = True
        elif commit.internal:
            self._give_up(self._event_queue.pop(), trouble)
            narrowed = True
        else:
            may_refuse = commit.newest >= 0 and not commit.deregisters
            narrowed = may_refuse and self._builder.batch_limits.refuse(commit.newest)
        if narrowed:
            # the same events come again, behind announcements and reports, and the pieces stay small until then
            self._builder.batch_limits.stay_small(until=commit.position)
        else:
            self._builder.batch_limits.wait(trouble, until=commit.position)
        return narrowed

    def _give_up(self, event: m.Event, trouble: TooLargeError) -> None:
        """Set an event aside. The one record that it changes exceeds a topic's limit, which was higher before."""
        self._reporter.size_refusals.set_aside(trouble, event_kind=type(event).__name__, **subject_of(event))
        self._set_aside(event, f"its record is too large: {trouble}")

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
