"""The partition processor: takes a partition (takeover.py), and holds it for a tenure (tenure.py), in which the commit
loop works (commit_loop.py).

When a tenure fails, the processor takes the partition again, unless another manager has taken it meanwhile. The
processor decides nothing about allocations, and knows no driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from msgspec import structs

from outfitter_proto.bus import BusConfigurationError, BusError
from outfitter_proto.support.backoff import Backoff
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.metrics import StateCounts
from outfitter_service.runtime.changelog.restore import discard
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.changelog.topic_layout import TopicCheck
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import InputReader
from outfitter_service.runtime.input.lookahead import Inputs, LookAhead
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.commit.refused_commit import RefusedCommit
from outfitter_service.runtime.processor.commit_loop import CommitLoop
from outfitter_service.runtime.processor.equipment import Equipment, ReopenError
from outfitter_service.runtime.processor.event_queue import EventQueue, StopRequest, Wakeup
from outfitter_service.runtime.processor.limits import Limits
from outfitter_service.runtime.processor.order_reader import OrderReader
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.signs_of_life import SignSender
from outfitter_service.runtime.processor.takeover import Takeover
from outfitter_service.runtime.processor.tenure import Tenure
from outfitter_service.runtime.processor.unrecorded_workers import SearchOfHost, search_host

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
JITTER = 0.5
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
        processes of a host's workers. `sweeps`: whether the manager sweeps; in cluster scope it always does."""
        identity, partition, clock = assignment.identity, assignment.partition, instruments.clock
        log_fields: dict[str, str | int] = {"host": identity.host} if identity.host else {"partition": partition}
        wakeup = Wakeup()
        self.ledger = Ledger()
        self.ready = False
        self.served = anyio.Event()
        """Set once registrations have been answered."""
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
        self._assignment = assignment
        self._instruments = instruments
        self._owns_partition = owns_partition
        self._activity = f"answering registrations of partition {partition}"
        self._condition = "taking the partition"
        self._loop: CommitLoop | None = None
        self._stop = StopRequest()
        self._refused_commit = RefusedCommit()
        self._reporter = CommitReporter(instruments.metrics, **log_fields)
        self._signs_of_life = SignSender(
            assignment,
            instruments,
            every_s=limits.beat_s,
            sweeps=sweeps if identity.host is not None else lambda: True,
            wake=wakeup.set,
        )
        self._equipment = Equipment(
            assignment=assignment,
            rules=rules,
            limits=limits,
            instruments=instruments,
            stop=self._stop,
            topic_check=TopicCheck(assignment, history=limits.history is not None, adopt=limits.adopt),
            event_queue=self.event_queue,
            inputs=self.inputs,
            liveness=self.liveness,
            drivers=drivers,
            quotas=Quotas.of(clock.monotonic, rewritten_bytes=limits.rewritten_bytes),
            snapshots=Snapshots(identity.writer, identity.instance, limits.history),
            reporter=self._reporter,
            refused_commit=self._refused_commit,
            signs_of_life=self._signs_of_life,
            orders=OrderReader(assignment, instruments, queue=self.event_queue.add_orders, wake=wakeup.set),
        )
        self._takeover = Takeover(self._equipment, judges_successors=owns_partition is None, search=search_processes)

    # --- from outside ---

    @property
    def instance(self) -> str:
        """This manager's name in checkpoints."""
        return self._assignment.identity.instance

    @property
    def position(self) -> int:
        """The input's next offset after all that is committed."""
        return self._loop.cursor.position if self._loop is not None else 0

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
                reopens = isinstance(trouble, ReopenError)
                # the file of a local bus was removed or replaced: the new file would be another ledger
                is_final = self._assignment.bus.local and isinstance(trouble, BusConfigurationError)
                if trouble is not None and not reopens and not is_final:
                    self._instruments.outage.met(self._activity, trouble)
                self._set_ready(False)
                if trouble is None:
                    return
                self._condition = f"taking the partition again, because {self._refused_commit.trouble or trouble}"
                if is_final:
                    raise trouble
                if reopens:
                    backoff.reset()
                    self._equipment.log("taking the partition again", reason=str(trouble))
                del trouble  # its traceback keeps all objects of the tenure alive
                await self._pause(backoff.next_delay(lasted=clock.monotonic() - served_since))
                await self._wait_for_ownership()
        finally:
            self._set_ready(False)
            self._instruments.outage.drop(self._activity)
            self.liveness.close()

    async def _run_tenure(self) -> BusError | None:
        """Take the partition and work until something fails or the processor is stopped. Returns the error, or None."""
        takeover = self._takeover
        try:
            if not takeover.may_fence:
                await takeover.check_before_fencing()
                if self._owns_partition is not None:
                    # reading a long ledger takes time: by now the partition may be assigned to another manager
                    await self._wait_for_ownership()
                    if self._stop.requested:
                        return None
            writer = await takeover.fence()
        except BusError as error:
            return error
        async with writer:
            try:
                restored = await takeover.restore(writer)
                # the traceback of the last tenure's error may keep the old ledger alive
                await discard(self.ledger)
                self.ledger = restored.ledger
                takeover.note_commit(self.ledger.commits)
                tenure = Tenure(self._equipment, takeover, writer, restored)
                try:
                    self._loop = loop = await tenure.resume()
                finally:
                    restored.neighbours.clear()  # nobody looks at the other hosts' records from here on
            except BusError as error:
                return error
            try:
                return await tenure.work(loop, self._set_ready)
            finally:
                if loop.first_commit.is_set():
                    takeover.note_commit(self.ledger.commits)

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

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            if ready:
                self.served.set()
            self._instruments.metrics.partition_ready.labels(str(self._assignment.partition)).set(ready)
            if not ready and self._instruments.outage.on and not self._stop.requested:
                self._instruments.outage.met(self._activity, self.condition)
            self._equipment.log("ready" if ready else "not ready")
        if ready:
            self._instruments.outage.passed(self._activity)
