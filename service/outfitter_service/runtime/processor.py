"""The partition processor: the one cycle in which everything happens.

    event → decide → records and commands → commit the records → act on the commands → events …

It takes a partition by fencing, replays the ledger, and goes on at the position the ledger names. Nothing is
acted on before the commit that says so has returned; a commit that failed takes its decisions back, and the
processor takes the partition anew. It knows no rules of allocation (core/) and no driver.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import chain, islice

import anyio
import structlog
from msgspec import UNSET, Struct, structs

from outfitter_proto.bus import (
    Bus,
    BusConfigurationError,
    BusError,
    OffsetOutOfRangeError,
    TooLargeError,
    Writer,
)
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    Host,
    InputPosition,
    Note,
)
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.hosts import host_record
from outfitter_service.core.ledger import Ledger, PutHost
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.attendance import Attendance
from outfitter_service.runtime.batch import Batch
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.drivers import DriverCalls
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.intake import Intake
from outfitter_service.runtime.portion import Portion
from outfitter_service.runtime.restore import Restored, restore
from outfitter_service.runtime.retries import Retries, edges
from outfitter_service.runtime.telling import Telling

log = structlog.get_logger("outfitter.processor")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
TICK_S = 0.25
"""How often deadlines are looked at."""
SUPERSEDED_LEASE_S = 30.0
"""The lease that an older incarnation without any gets when a newer one registers and none is configured."""
FILL = 0.7
"""How full of the largest possible ledger batch a commit is made: the next event's output must still fit."""


class ForeignManagerError(RuntimeError):
    """Another manager works for this writer: this one gives up instead of fencing back."""


class Limits(Struct, frozen=True, kw_only=True):
    """How much and how long: records, seconds. `take_over`: accept a ledger that another machine wrote."""

    batch_records: int = 1000
    lease_grace_s: float = 2.0
    checkpoint_interval_s: float = 3600.0
    checkpoint_records: int = 5000
    take_over: bool = False


class Work(Struct, kw_only=True):
    """One batch and what it consumes: internal events, messages, notes. `position` is the input's next offset.
    `closing`: it is the last one."""

    batch: Batch
    position: int
    internal: int = 0
    taken: int = 0
    notes: int = 0
    closing: bool = False


class RecycledError(BusError):
    """The writer is tainted: a late request of it could still act, so it is replaced."""


class Processor:
    """Serves one host from one partition of the bus. Set `drivers` before `run`."""

    drivers: DriverCalls

    def __init__(
        self,
        bus: Bus,
        *,
        topics: Topics,
        partition: int,
        identity: Identity,
        rules: Rules,
        limits: Limits,
        metrics: Metrics,
        clock: Clock = SYSTEM,
    ) -> None:
        self._bus = bus
        self._topics = topics
        self._partition = partition
        self._topic_id = ""
        self._base = 0
        self._identity = identity
        self._rules = rules
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._host_key = identity.host.encode()
        self._since = self._clock.utc()
        self._log = log.bind(host=identity.host)
        self._telling = Telling(metrics, identity.host)
        self._wake = anyio.Event()
        self._internal: deque[m.Event] = deque()
        self._reports: dict[str, m.DriverReport] = {}
        self._retries = Retries(clock)
        self._portion = Portion(records=limits.batch_records, chunk=rules.chunk)
        self._position = 0
        self._committed_position = 0
        self._committed_at = 0.0
        self._ticked_at = 0.0
        self._seen_commit: int | None = None
        self._ended_boot_id: str | None = None
        self._notes: list[Note] = []
        self._stop = anyio.Event()
        self.ledger = Ledger()
        self.ready = False
        self.attendance = Attendance(
            bus,
            topics.registrations,
            partition,
            identity=identity,
            grace_s=limits.lease_grace_s,
            default_lease_s=rules.lease_s or SUPERSEDED_LEASE_S,
            wake=self.wake,
            clock=clock,
        )
        self.intake = Intake(bus, topics.registrations, partition, wake=self.wake, healed=self.attendance.renew_all)

    # --- from outside ---

    def wake(self) -> None:
        self._wake.set()

    def emit(self, event: m.Event) -> None:
        """Queue an internal event; it stays queued until a commit that includes it has returned."""
        if isinstance(event, m.DriverReport):
            self._reports[event.resource] = event
        self._internal.append(event)
        self._wake.set()

    def stop(self) -> None:
        """Finish the commit under way, say so in the ledger, and return from `run`."""
        self._stop.set()
        self._wake.set()

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ForeignManagerError: another manager works for this writer.
            LedgerRefusedError: the ledger cannot be worked on by this version.
            BusConfigurationError: the file of a bus on this machine is another one than before.
        """
        delay = FIRST_DELAY_S
        try:
            await self._look_before_fencing()
            while not self._stopping:
                served_since = self._clock.monotonic()
                trouble = await self._serve()
                self._set_ready(False)
                if trouble is None:
                    return
                if self._bus.local and isinstance(trouble, BusConfigurationError):
                    # the file was removed or replaced: what comes next would be another ledger
                    raise trouble
                recycled = isinstance(trouble, RecycledError)
                if recycled or self._clock.monotonic() - served_since > LONGEST_DELAY_S:
                    delay = FIRST_DELAY_S
                if recycled:
                    self._log.info("taking the partition anew", reason=str(trouble))
                else:
                    self._log.warning("the bus failed, taking the partition anew", error=str(trouble), delay_s=delay)
                with anyio.move_on_after(delay * random.uniform(0.5, 1.5)):  # noqa: S311 - jitter, not a secret
                    await self._stop.wait()
                delay = min(delay * 2, LONGEST_DELAY_S)
                await self._refuse_if_replaced()
        finally:
            self._set_ready(False)
            self.attendance.close()

    @property
    def _stopping(self) -> bool:
        return self._stop.is_set()

    # --- taking the partition ---

    async def _look_before_fencing(self) -> None:
        """A machine that must not serve this host does not disturb the one that does."""
        try:
            self._refuse_foreign_machine(await self._restore())
        except BusError:
            return  # taking the partition meets it again, and says so

    async def _serve(self) -> BusError | None:
        """Take the partition and work until something fails (returned) or it is over (None)."""
        identity = transactional_id(self._identity.cluster, self._identity.writer)
        try:
            writer = await self._bus.open_writer(identity, self._partition)
        except BusError as error:
            return error
        async with writer:
            try:
                restored = await self._restore()
                self._refuse_foreign_machine(restored)
                start = await self._adopt(restored)
            except BusError as error:
                return error
            async with anyio.create_task_group() as tasks:
                self.intake.reset(start)
                tasks.start_soon(self.intake.run)
                tasks.start_soon(self.attendance.listen)
                trouble = await self._work(writer, start)
                tasks.cancel_scope.cancel()
            return trouble

    async def _restore(self) -> Restored:
        return await restore(
            self._bus,
            self._topics.allocations,
            self._partition,
            host=self._identity.host,
            writer=self._identity.writer,
        )

    async def _refuse_if_replaced(self) -> None:
        """After having served: look before fencing back. Somebody who wrote since then works here now."""
        if self._seen_commit is None:
            return
        try:
            found = (await self._restore()).checkpoint
        except BusError:
            return
        if found is not None and found.instance != self._identity.instance and found.commit > self._seen_commit:
            raise ForeignManagerError(
                f"another manager (instance {found.instance}, machine {found.machine_id or 'unknown'}) has taken over "
                f"host {self._identity.host!r} at {found.at:%Y-%m-%dT%H:%M:%SZ}; this one gives up"
            )

    def _refuse_foreign_machine(self, restored: Restored) -> None:
        found = restored.checkpoint
        mine = self._identity.machine_id
        if found is None or self._limits.take_over or not (mine and found.machine_id) or found.machine_id == mine:
            return
        raise ForeignManagerError(
            f"the ledger of host {self._identity.host!r} was written by machine {found.machine_id}, this is {mine}: "
            "two machines must not serve one host's name. If that machine is gone for good, start with --take-over; "
            "else give this one another --host"
        )

    async def _adopt(self, restored: Restored) -> int:
        """Make a replayed ledger the state; return the offset at which the input goes on."""
        self.ledger = restored.ledger
        found = restored.checkpoint
        self._seen_commit = self.ledger.commits
        self._telling.replayed(self.ledger)
        self._metrics.restore_seconds.set(restored.seconds)
        self._metrics.restored_records.set(restored.records)
        self._ended_boot_id = self._ended_boot(found) or self._ended_boot_id
        # levels are observed anew: the last inventories, and the command that each unfinished record implies
        self._internal = edges(self._internal, self._retries)
        deaths = {e.allocation for e in chain(self._internal, self._retries) if isinstance(e, m.OwnerDied)}
        self.attendance.restart(self.ledger, self._ended_boot_id, told=deaths)
        self._internal.extendleft(self._reports.values())
        self._internal.append(m.Reschedule(host=self._identity.host))
        answered = {
            (type(event), event.allocation, event.token)
            for event in chain(self._internal, self._retries)
            if isinstance(event, m.Prepared | m.Unprepared)
        }
        for record in self.ledger.allocations.values():
            token = record.token or 0
            if record.state == AllocationState.PREPARING and (m.Prepared, record.key, token) not in answered:
                self.drivers.perform(m.Prepare(allocation=record.key, token=token), record)
            elif record.state == AllocationState.RELEASING and (m.Unprepared, record.key, token) not in answered:
                self.drivers.perform(m.Unprepare(allocation=record.key, token=token), record)
        self._log.info(
            "ledger replayed",
            records=restored.records,
            allocations=len(self.ledger.allocations),
            seconds=round(restored.seconds, 3),
            commit=self.ledger.commits,
        )
        self._topic_id = (await self._bus.topic(self._topics.registrations)).id
        self._base = (found.input.base or 0) if found is not None else 0
        if found is not None and found.input.topic_id == self._topic_id:
            return found.input.to
        if found is not None:
            self._base += found.input.to
            self._input_lost(f"the registrations topic is another one than before (it was {found.input.topic_id})")
        earliest, _ = await self._bus.offsets(self._topics.registrations, self._partition)
        return earliest

    async def _begin_again(self, lost: OffsetOutOfRangeError) -> BusError | None:
        """Go on where the input begins now. Where it began anew, what comes counts as later than all there was."""
        try:
            self._topic_id = (await self._bus.topic(self._topics.registrations)).id
        except BusError as error:
            return error
        if lost.start < self._position:
            self._base += self._position
        self.intake.reset(lost.start)
        self._position = lost.start
        self._input_lost(str(lost))
        return None

    def _ended_boot(self, found: Checkpoint | None) -> str | None:
        """The boot in which the last manager worked, if it was another one and is known to be over: of this very
        machine, or of one that is gone for good."""
        if found is None or found.boot_id == self._identity.boot_id:
            return None
        mine = self._identity.machine_id
        same = mine is not None and found.machine_id == mine
        return found.boot_id if same or self._limits.take_over else None

    def _input_lost(self, explanation: str) -> None:
        """Registrations are gone unread: go on at the earliest there are, with a whole lease for everybody."""
        self._log.error("registrations were lost, going on at the earliest there are", reason=explanation)
        self._metrics.input_lost.inc()
        self._portion.forget()
        self.attendance.renew_all()
        self._notes.append(self._note("input-lost", explanation))

    def _note(self, event: str, explanation: str) -> Note:
        return Note(at=self._clock.utc(), writer=self._identity.writer, event=event, explanation=explanation)

    # --- the cycle ---

    async def _work(self, writer: Writer, start: int) -> BusError | None:
        self._position = start
        opening = True
        while True:
            if self.intake.lost is not None and not self.intake.messages:
                trouble = await self._begin_again(self.intake.lost)
                if trouble is not None:
                    return trouble
            work = self._decide(writer, opening=opening)
            if not work.batch.empty or opening or work.closing or self._checkpoint_is_due(work.position):
                trouble = await self._commit(writer, work)
                if isinstance(trouble, TooLargeError) and self._narrow(work, trouble):
                    if writer.tainted:
                        # all of it comes again, behind what is observed anew: the pieces stay small until then
                        self._portion.stay_small(until=work.position)
                        return RecycledError("the bus refused a commit for its size: the writer is replaced")
                    continue
                if trouble is not None:
                    self.ledger.rollback()
                    return trouble
                opening = False
            self._settle(work)
            if work.closing:
                return None
            if self.intake.trouble is not None:
                return self.intake.trouble
            if writer.tainted:
                return RecycledError("a request to the bus was retried: the writer is replaced")
            self._set_ready(self.intake.hearing)
            await self._wait()

    async def _wait(self) -> None:
        """Wait for something to decide, at most until deadlines are to be looked at again."""
        self._internal.extend(self.attendance.deaths(self._position))
        if self.intake.messages or self._internal or self._stopping:
            return
        with anyio.move_on_after(TICK_S):
            await self._wake.wait()
        self._wake = anyio.Event()

    def _decide(self, writer: Writer, *, opening: bool) -> Work:
        """Decide what has piled up, up to the batch's bounds, without awaiting anything."""
        batch = Batch(
            self.ledger, structs.replace(self._rules, chunk=self._portion.chunk), self._clock.utc(), base=self._base
        )
        work = Work(batch=batch, position=self._position, closing=self._stopping)
        full = writer.max_batch_bytes * FILL
        if opening:
            self._open(batch)
        batch.history += self._notes
        work.notes = len(self._notes)
        if self._clock.monotonic() - self._ticked_at >= TICK_S:
            self._ticked_at = self._clock.monotonic()
            if self.intake.hearing:
                self._internal.extend(self.attendance.expired(self._position))
            self._internal.extend(self._retries.due())
            self._internal.append(m.Tick(host=self._identity.host))
        for event in self._internal:
            if batch.events >= self._portion.records or batch.bytes >= full:
                break
            batch.decide(event)
            work.internal += 1
        messages = self.intake.messages
        while work.taken < len(messages) and batch.events < self._portion.records and batch.bytes < full:
            message = messages[work.taken]
            if message.key == self._host_key:
                if message.offset == self._portion.indigestible:
                    batch.refuse(message, "the answer to it would be larger than the allocations topic takes")
                else:
                    batch.message(message)
            elif message.key is None:
                batch.refuse(
                    message,
                    "it has no key: key registrations with the host's name (console producer: parse.key=true), "
                    "partitioned as Java does (librdkafka: partitioner=murmur2_random)",
                )
            work.taken += 1
            work.position = message.offset + 1
        if work.taken == len(messages):
            work.position = max(work.position, self.intake.position)
        while batch.follow_ups and batch.events < self._portion.records and batch.bytes < full:
            batch.decide(batch.follow_ups.popleft())
        if self._portion.whole:
            batch.renumber(self._identity.host, full)
        if work.closing:
            self._close(batch)
        return work

    def _open(self, batch: Batch) -> None:
        """The first commit after taking the partition says who manages the host now."""
        book = self.ledger.book(self._identity.host)
        manager = self._identity.manager(self._since)
        before = book.record or Host(host=self._identity.host, manager=manager, since=batch.now)
        named = structs.replace(before, manager=manager)
        batch.apply([PutHost(host_record(named, self._rules.specs, book.inventories, batch.now) or named)])

    def _checkpoint_is_due(self, position: int) -> bool:
        if position - self._committed_position >= self._limits.checkpoint_records:
            return True
        return self._clock.monotonic() - self._committed_at >= self._limits.checkpoint_interval_s

    async def _commit(self, writer: Writer, work: Work) -> BusError | None:
        batch = work.batch
        # Whoever goes on after a crash must see the same deaths: the boot that ended stays named until they are in.
        deaths_left = self._ended_boot_id is not None and (
            self.attendance.unjudged > 0
            or any(isinstance(event, m.OwnerDied) for event in islice(self._internal, work.internal, None))
        )
        checkpoint = Checkpoint(
            writer=self._identity.writer,
            instance=self._identity.instance,
            cluster=self._identity.cluster,
            scope=self._identity.scope,
            commit=self.ledger.commits + 1,
            token=self.ledger.token,
            input=InputPosition(
                topic_id=self._topic_id,
                partition=self._partition,
                from_=self._position,
                to=work.position,
                base=self._base or UNSET,
            ),
            at=batch.now,
            machine_id=self._identity.machine_id,
            boot_id=self._ended_boot_id if deaths_left else self._identity.boot_id,
        )
        begun = self._clock.monotonic()
        try:
            await writer.commit(batch.transaction(self._topics, checkpoint))
        except BusError as error:
            self._telling.failed(error)
            return error
        self._metrics.commits.labels("ok").inc()
        self._metrics.commit_seconds.observe(self._clock.monotonic() - begun)
        self.ledger.commits += 1
        self._seen_commit = self.ledger.commits
        self._committed_at = self._clock.monotonic()
        self._committed_position = work.position
        if not deaths_left:
            self._ended_boot_id = None
        del self._notes[: work.notes]
        return None

    def _close(self, batch: Batch) -> None:
        """The last commit of an orderly shutdown says since when nobody manages the host."""
        record = self.ledger.book(self._identity.host).record
        if record is not None:
            batch.apply([PutHost(structs.replace(record, manager=self._identity.manager(self._since, batch.now)))])

    def _narrow(self, work: Work, trouble: TooLargeError) -> bool:
        """A commit was too large: take it back and try with fewer events, then with smaller pieces of one event's
        effects. What is too large even so is given up, for itself alone; False: there is nothing to give up."""
        self.ledger.rollback()
        events = work.batch.events
        self._log.warning("a commit is too large, splitting it", error=str(trouble), events=events)
        if self._portion.shrink(events):
            return True
        if work.internal:
            self._give_up(self._internal.popleft(), trouble)
            return True
        return bool(work.taken) and self._portion.refuse(self.intake.messages[work.taken - 1].offset)

    def _give_up(self, event: m.Event, trouble: TooLargeError) -> None:
        """One event's smallest effect is more than the allocations topic takes."""
        self._log.error("an event's effects are too large to commit", event_kind=type(event).__name__)
        if isinstance(event, m.DriverReport) and event.failure is None:
            failure = m.DriverFailure(reason=f"its inventory is too large to publish: {trouble}", permanent=True)
            self._reports[event.resource] = structs.replace(event, devices=(), failure=failure)
            self._internal.appendleft(self._reports[event.resource])
        else:
            self._set_aside(event)

    def _set_aside(self, event: m.Event) -> None:
        """An event came to nothing: its record must not be stuck by that."""
        if isinstance(event, m.LeaseExpired):
            self.attendance.cut([event.allocation], self.ledger)  # one lease more, and it is judged again
        else:
            self._retries.keep(event)

    def _settle(self, work: Work) -> None:
        """The decisions are the truth now: forget what led to them, and act."""
        batch = work.batch
        self.ledger.settle()
        for _ in range(work.internal):
            self._internal.popleft()
        self._internal.extend(batch.follow_ups)
        self.intake.drop(work.taken)
        self._position = work.position
        self._portion.grow(self._position, idle=not self._internal)
        self.attendance.renew(batch.renewed)
        self.attendance.follow(record for record, _ in batch.values.values() if isinstance(record, Allocation))
        self.attendance.cut(batch.cut, self.ledger)
        for event in batch.undecided:
            self._set_aside(event)
        for command in batch.commands:
            self.drivers.perform(command, self.ledger.allocations.get(command.allocation))
        self._telling.committed(batch, self.ledger, waiting=self.intake.behind())

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._metrics.ready.set(ready)
            self._log.info("ready" if ready else "not ready")
