"""The partition processor: takes a partition (takeover.py), adopts its ledger (adoption.py), and runs the commit loop
(commit_loop.py).

When the loop fails, the processor takes the partition again, unless another manager has taken it meanwhile. The
processor decides nothing about allocations, and knows no driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from msgspec import structs

from outfitter_proto.bus import BusConfigurationError, BusError, Writer
from outfitter_proto.support.backoff import Backoff
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.metrics import StateCounts
from outfitter_service.runtime.changelog.restore import Restored, discard
from outfitter_service.runtime.changelog.shape import TopicCheck
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.changelog.topic_watch import TopicWatch
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import InputReader
from outfitter_service.runtime.input.lookahead import Inputs, LookAhead
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.adoption import Adoption
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.commit.refused_commit import RefusedCommit
from outfitter_service.runtime.processor.commit_builder import CommitBuilder
from outfitter_service.runtime.processor.commit_loop import CommitLoop
from outfitter_service.runtime.processor.deadlines import Deadlines
from outfitter_service.runtime.processor.event_queue import EventQueue, StopRequest, Wakeup
from outfitter_service.runtime.processor.limits import Limits
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.same_machine import SameMachine
from outfitter_service.runtime.processor.settlement import InputLoss, Settlement
from outfitter_service.runtime.processor.signs_of_life import SignsOfLife
from outfitter_service.runtime.processor.takeover import Takeover
from outfitter_service.runtime.processor.tenure import RecycledError, Tenure
from outfitter_service.runtime.processor.unrecorded_workers import SearchOfHost, search_host

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
JITTER = 0.5
AHEAD_SHARE = 32
"""A checkpoint has so many hosts that are ahead as fit into this part of a decision's bytes."""
SUPERSEDED_LEASE_S = 30.0
"""The last lease of a superseded incarnation if neither it nor the configuration has one."""


class Processor:
    """Serves the hosts of one scope from one partition of the bus, and puts its parts together."""

    def __init__(
        self,
        assignment: Assignment,
        *,
        rules: Rules,
        limits: Limits,
        instruments: Instruments,
        drivers: DriverCalls,
        owns_partition: Callable[[], Awaitable[bool]] | None = None,
        make_process_watch: Callable[..., ProcessWatch] = ProcessWatch,
        search_processes: SearchOfHost = search_host,
        sweeps: Callable[[], bool] = lambda: False,
    ) -> None:
        """`owns_partition`: the processor asks it before it takes the partition again; by default it reads in the
        ledger who wrote last. `make_process_watch`: makes the watch of owner processes. `search_processes` finds the
        processes of a host's workers. `sweeps`: whether the manager sweeps now; in cluster scope it always does."""
        identity, partition, clock = assignment.identity, assignment.partition, instruments.clock
        log_fields: dict[str, str | int] = {"host": identity.host} if identity.host else {"partition": partition}
        self._assignment = assignment
        self._rules = rules
        self._limits = limits
        self._instruments = instruments
        self._drivers = drivers
        self._owns_partition = owns_partition
        self._activity = f"answering registrations of partition {partition}"
        self._stop = StopRequest()
        wakeup = Wakeup()
        self._topic_check = TopicCheck(assignment, history=limits.history is not None, adopt=limits.adopt)
        self._loop: CommitLoop | None = None
        self._tenure: Tenure | None = None
        self._condition = "taking the partition"
        self.ledger = Ledger()
        self.ready = False
        self.served = anyio.Event()
        """Set once registrations have been answered."""
        self.neighbours: dict[bytes, bytes] = {}
        """The records of the partition's other hosts, as they were when it was taken."""
        self.event_queue = EventQueue(clock, wakeup)
        self.liveness = LivenessTracker(
            assignment,
            grace_s=limits.lease_grace_s,
            default_lease_s=rules.lease_s or SUPERSEDED_LEASE_S,
            wake=wakeup.set,
            clock=clock,
            make_process_watch=make_process_watch,
        )
        reader = InputReader(
            assignment,
            wake=wakeup.set,
            on_recovery=self.liveness.renew_all,
            on_late=self.liveness.leases.postpone,
            outage=instruments.outage,
            most=limits.read_ahead,
        )
        lookahead = LookAhead(assignment, reader, wake=wakeup.set, quiet_limit=limits.quiet_limit)
        self.inputs = Inputs(reader, lookahead, self.liveness.input_end)
        self._refused_commit = RefusedCommit()
        self._quotas = Quotas.of(clock.monotonic, rewritten_bytes=limits.rewritten_bytes)
        self._snapshots = Snapshots(identity.writer, identity.instance, limits.history)
        self._reporter = CommitReporter(instruments.metrics, **log_fields)
        self._input_loss = InputLoss(
            identity.writer, clock, self._reporter, self._refused_commit, self.inputs, self.liveness, self.event_queue
        )
        self._takeover = Takeover(
            assignment, self._topic_check, limits, clock, self._reporter,
            judges_successors=owns_partition is None,
            search=search_processes,
        )  # fmt: skip
        self._adoption = Adoption(
            assignment, self.event_queue, self.liveness, drivers, self._reporter, self._snapshots, self._input_loss,
            take_over=limits.take_over,
        )  # fmt: skip
        self._same_machine = SameMachine(assignment)
        self._signs_of_life = SignsOfLife(
            assignment,
            instruments,
            every_s=limits.beat_s,
            sweeps=sweeps if identity.host is not None else lambda: True,
            wake=wakeup.set,
        )
        self._topic_watch = TopicWatch(assignment, self._topic_check, reader, self._snapshots, every_s=limits.look_s)

    # --- from outside ---

    @property
    def instance(self) -> str:
        """This manager's name in checkpoints."""
        return self._assignment.identity.instance

    @property
    def position(self) -> int:
        """The input's next offset after all that is committed."""
        return self._tenure.cursor.position if self._tenure is not None else 0

    @property
    def condition(self) -> str:
        """What the processor does, for people: if it answers no registrations, why."""
        if self.ready:
            return "serving"
        if self._loop is not None and self.inputs.reader.obstacle is not None:
            return f"cannot read registrations: {self.inputs.reader.obstacle}"
        if self._signs_of_life.trouble is not None:
            return f"cannot write: {self._signs_of_life.trouble}"
        return self._condition

    def state_counts(self) -> StateCounts:
        """The values of the state gauges now."""
        liveness = self.liveness
        oldest = self._loop.oldest() if self._loop is not None else None
        waits = self._instruments.clock.utc().timestamp() - oldest.timestamp_ms / 1000 if oldest is not None else 0.0
        return structs.replace(
            self._reporter.state_gauges.state_counts(self.ledger),
            watched_owners=liveness.owners.watched,
            polled_owners=liveness.owners.polled,
            unwatched_owners=liveness.owners.unwatched,
            leases=len(liveness.leases),
            lag=self.inputs.end.lag(self.position, self.inputs.reader.position),
            oldest_unanswered_s=max(0.0, waits),
        )

    def stop(self, *, mark_stopped: bool = True) -> None:
        """Finish the commit under way and return from `run`. `mark_stopped`: the last commit writes that nobody manages
        the hosts; without it a successor is expected."""
        self._stop.request(mark_stopped=mark_stopped)
        self.event_queue.wakeup.set()

    async def release_memory(self) -> None:
        """Drop all large objects once `run` has ended, which has dropped the leases. Tracebacks of cancelled tasks keep
        them alive, and the garbage collector would reach these tracebacks only after days."""
        self._takeover.clear()
        self.inputs.clear()
        self._reporter.state_gauges.replay({})
        await discard(self.ledger)

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ForeignManagerError: another manager works for this writer or for its hosts.
            LedgerRefusedError: the ledger cannot be worked on by this version.
            TopicsChangedError: the ledger was written for other topics, or has gone back.
            UnrecordedWorkersError: an adopted or new ledger lacks workers that still run.
            BusConfigurationError: the file of a bus on this machine was replaced.
        """
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=JITTER)
        clock = self._instruments.clock
        try:
            while not self._stop.requested:
                served_since = clock.monotonic()
                trouble = await self._run_tenure()
                recycled = isinstance(trouble, RecycledError)
                # the file of a local bus was removed or replaced: the new file would be another ledger
                is_final = self._assignment.bus.local and isinstance(trouble, BusConfigurationError)
                if trouble is not None and not recycled and not is_final:
                    self._instruments.outage.met(self._activity, trouble)
                self._set_ready(False)
                if trouble is None:
                    return
                self._condition = self._condition_after(trouble)
                if is_final:
                    raise trouble
                if recycled:
                    backoff.reset()
                    self._log("taking the partition again", reason=str(trouble))
                del trouble  # its traceback keeps all objects of the tenure alive
                await self._pause(backoff.next_delay(lasted=clock.monotonic() - served_since))
                await self._wait_for_ownership()
        finally:
            self._set_ready(False)
            self._instruments.outage.drop(self._activity)
            self.event_queue.close("this manager no longer serves the partition")
            self.liveness.close()

    def _condition_after(self, trouble: BusError) -> str:
        return f"taking the partition again, because {self._refused_commit.trouble or trouble}"

    async def _pause(self, delay: float) -> None:
        with anyio.move_on_after(delay):
            await self._stop.wait()

    async def _wait_for_ownership(self) -> None:
        """Before fencing back, make sure that no other manager works here now."""
        if self._owns_partition is None:
            await self._takeover.refuse_if_replaced()
            return
        backoff = Backoff(FIRST_DELAY_S, FIRST_DELAY_S, jitter=JITTER)
        while not self._stop.requested and not await self._owns_partition():
            await self._pause(backoff.next_delay())

    # --- a tenure ---

    async def _run_tenure(self) -> BusError | None:
        """Take the partition and work until something fails or the processor is stopped. Returns the error, or None."""
        try:
            if not self._takeover.may_fence:
                await self._takeover.check_before_fencing()
                if self._owns_partition is not None:
                    # reading a long ledger takes time: by now the partition may be assigned to another manager
                    await self._wait_for_ownership()
                    if self._stop.requested:
                        return None
            writer = await self._takeover.fence()
        except BusError as error:
            return error
        async with writer:
            try:
                tenure = await self._adopt(writer, await self._takeover.restore(writer))
            except BusError as error:
                return error
            loop = self._loop = self._begin(tenure)
            self._tenure = tenure
            try:
                return await self._work(tenure, loop)
            finally:
                if loop.first_commit.is_set():
                    self._takeover.note_commit(self.ledger.commits)

    async def _adopt(self, writer: Writer, restored: Restored) -> Tenure:
        """Make a restored ledger the state."""
        # the traceback of the last tenure's error may keep the old ledger alive
        await discard(self.ledger)
        self.neighbours.clear()
        self.ledger, self.neighbours = restored.ledger, restored.neighbours
        self._takeover.note_commit(self.ledger.commits)
        await self._adoption.restart(restored)
        self._log(
            "ledger replayed",
            records=restored.records,
            allocations=len(self.ledger.allocations),
            seconds=round(restored.seconds, 3),
            commit=self.ledger.commits,
        )
        await self._same_machine.warn_once(restored)
        return Tenure(
            assignment=self._assignment,
            writer=writer,
            ledger=self.ledger,
            cursor=await self._adoption.cursor(restored),
            shape=self._topic_check.shape,
            end=restored.end,
            signs_of_life=self._signs_of_life,
        )

    def _begin(self, tenure: Tenure) -> CommitLoop:
        inputs, event_queue, clock = self.inputs, self.event_queue, self._instruments.clock
        self._signs_of_life.begin()
        builder = CommitBuilder(tenure, self._rules, self._limits, self._snapshots, self._quotas, event_queue, clock)
        settlement = Settlement(
            tenure, builder, inputs, self.liveness, self._drivers, event_queue, self._reporter, self._input_loss
        )
        deadlines = Deadlines(tenure, self._rules, inputs, self.liveness, event_queue, self._quotas, clock)
        return CommitLoop(tenure, builder, settlement, deadlines, inputs, event_queue, self._stop, clock)

    async def _work(self, tenure: Tenure, loop: CommitLoop) -> BusError | None:
        async with anyio.create_task_group() as tasks:
            self.inputs.reset(tenure.cursor, room=self._rules.max_bytes // AHEAD_SHARE)
            tasks.start_soon(self.inputs.reader.run)
            tasks.start_soon(self.inputs.end.run)
            if self._assignment.scope.host is None:
                tasks.start_soon(self.inputs.lookahead.run)
            tasks.start_soon(self.liveness.listen)
            tasks.start_soon(self.liveness.poll_owners)
            tasks.start_soon(self._takeover.check_for_rivals, loop.first_commit, tenure.end)
            tasks.start_soon(self._topic_watch.run, tenure.cursor, tenure.shape)
            tasks.start_soon(self._signs_of_life.run)
            trouble = await loop.run(self._set_ready)
            tasks.cancel_scope.cancel()
        if trouble is None and self._stop.mark_stopped:
            await self._signs_of_life.end(self._instruments.clock.utc())
        return trouble

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            if ready:
                self.served.set()
            self._instruments.metrics.partition_ready.labels(str(self._assignment.partition)).set(ready)
            if not ready and self._instruments.outage.on and not self._stop.requested:
                self._instruments.outage.met(self._activity, self.condition)
            self._log("ready" if ready else "not ready")
        if ready:
            self._instruments.outage.passed(self._activity)

    def _log(self, event: str, **details: object) -> None:
        """Log a line, at debug level during an outage, which has a line already."""
        (self._reporter.log.debug if self._instruments.outage.on else self._reporter.log.info)(event, **details)
