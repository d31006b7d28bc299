"""The one cycle in which everything happens, for as long as one writer holds the partition:

    event → decide → records and commands → commit the records → act on the commands → events …

While one commit is under way the next one is decided, on the ledger as it will be; nothing is acted on or told
before the commit that says so has returned. A commit that fails takes its decisions back, and those that were
built on them. It knows no rules of allocation (core/), no driver, and not how a partition is taken (processor.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import structs

from outfitter_proto.bus import BusError, Message, OffsetOutOfRangeError, TooLargeError, Writer
from outfitter_proto.records import Allocation, Checkpoint
from outfitter_service.core import model as m
from outfitter_service.core.decide import is_due
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.encoding import checkpoint
from outfitter_service.runtime.changelog.shape import Shape
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.processor.batch import Batch
from outfitter_service.runtime.processor.host_announcer import HostAnnouncer
from outfitter_service.runtime.processor.pending_commit import PendingCommit, Sealed
from outfitter_service.runtime.processor.reporting import concerned
from outfitter_service.runtime.processor.station import Station, StopRequest

log = structlog.get_logger("outfitter.processor")

TICK_S = 0.25
"""How often deadlines are looked at."""
SLICE = 48
"""Events decided at a stretch: a commit under way must not wait for long until its answer is seen."""
SLICE_S = 0.01
"""Seconds of deciding at a stretch, whatever events cost: a probe, too, waits at most so long, and for the last one."""
HOSTS_AT_ONCE = 500
"""Hosts whose deadlines are looked at in one turn: a partition may have 10,000 of them."""
TURNS = 6
"""Of the event loop after each slice: a commit takes several for each of its steps, and while it is slower than the
decisions of the next one, that is what everybody waits for."""
FILL = 0.8
"""How full of the largest possible ledger batch a commit is made: the next event's output must still fit."""


class RecycledError(BusError):
    """The writer is tainted: a late request of it could still act, so it is replaced."""


class CommitLoop:
    """Decides and commits with one writer, beginning with `ledger` at `place`."""

    def __init__(
        self,
        station: Station,
        writer: Writer,
        ledger: Ledger,
        place: Cursor,
        *,
        shape: Shape,
        since: datetime,
        stop: StopRequest,
        batch_bytes: int,
    ) -> None:
        """`shape` is the topics' when the partition was taken, `since` when this manager started; `stop` asks for one
        last commit. A commit's ledger batch, and a batch of history, may have `batch_bytes`."""
        self._station = station
        self._shape = shape
        self._writer = writer
        self._stop = stop
        self._since = since
        self._full = batch_bytes * FILL
        self._most_history = batch_bytes  # in one batch: a second one waits for the first
        station.batch_limits.take(batch_bytes)
        station.snapshots.take(batch_bytes)
        self._log = station.reporter.log
        self._checkpointed = place.position  # what comes after the last commit's input
        self._committed_at = 0.0
        self._outages = station.input_reader.outages
        self._ticked_at = 0.0
        self._unlooked: list[str] = []
        self._ticking: set[str] = set()
        self._counting = False
        self._host_announcer = HostAnnouncer(station, ledger, since=since)
        self._stale_positions = set(ledger.hosts)  # who was here before may have left that to its next commit
        self._sent: PendingCommit | None = None
        self._untold: list[Batch] = []
        self.ledger = ledger
        self.place = place
        self.opened = False
        self.first_commit = anyio.Event()
        self._open = self._new_work(place, opening=True)

    def oldest(self) -> Message | None:
        """The message that has waited longest for a decision to be settled."""
        for messages in (
            self._sent.messages if self._sent else (),
            self._open.messages,
            self._station.input_reader.messages,
        ):
            if messages:
                return messages[0]
        return None

    # --- the turn of the wheel ---

    async def run(self, ready: Callable[[bool], None]) -> BusError | None:
        """Work until something fails (returned; nothing of it is left in the ledger) or the last commit of an orderly
        shutdown is made (None). `ready` is told whether registrations are being answered."""
        async with anyio.create_task_group() as commits:
            trouble = await self._turn(commits, ready)
        self._tell()
        return trouble

    async def _turn(self, commits: TaskGroup, ready: Callable[[bool], None]) -> BusError | None:
        while True:
            self._tell()
            if self._sent is not None and self._sent.done:
                sent, self._sent = self._sent, None
                trouble = self._conclude(sent)
                if trouble is not None or (sent.sealed.closing and sent.trouble is None):
                    return trouble
            self._decide()
            if self._sent is None and not self._more:
                trouble = await self._go_on(commits)
                if trouble is not None:
                    return trouble
                if self.opened:
                    ready(self._station.input_reader.hearing)
            await self._wait()

    def _conclude(self, sent: PendingCommit) -> BusError | None:
        """A commit has ended: act on it, or take it back. What ends the tenure is returned."""
        if sent.trouble is None:
            self._settle(sent)
            if self._writer.tainted and not sent.sealed.closing:
                self._take_back(self._open)
                return RecycledError("a request to the bus was retried: the writer is replaced")
            return None
        self._take_back(self._open, sent)
        if isinstance(sent.trouble, TooLargeError) and self._narrow(sent, sent.trouble):
            # all of it comes again, behind what is said of hosts or observed anew: the pieces stay small until then
            self._station.batch_limits.stay_small(until=sent.position)
            if self._writer.tainted:
                if sent.looked_ahead:
                    self._station.lookahead.rest(until=sent.looked_ahead[-1].offset + 1)
                return RecycledError("the bus refused a commit for its size: the writer is replaced")
            return None
        return sent.trouble

    async def _go_on(self, commits: TaskGroup) -> BusError | None:
        """Nothing is under way: send off what was decided, if it has to be written; what ends the tenure is
        returned."""
        input_reader = self._station.input_reader
        if self._outages != input_reader.outages and not self._station.bus.local and not self._stopping:
            # brokers that were away may have lost the last commit's end (`kafka.producer`), and nothing else may follow
            self._take_back(self._open)
            return RecycledError("the bus was away: the last commit is seen to its end")
        if self._is_due(self._open):
            told = self._seal(self._open)
            commits.start_soon(self._commit, self._open, told)
            self._sent, self._open = self._open, self._new_work(self._open)
            return None
        work = self._open
        if work.internal or work.messages or work.looked_ahead or work.position != self.place.position:
            self._settle(work)
            self._open = self._new_work(self.place)
        if input_reader.trouble is not None:
            return input_reader.trouble
        if input_reader.lost is not None and not input_reader.messages:
            return await self._begin_again(input_reader.lost)
        return None

    async def _wait(self) -> None:
        """Wait for something to decide or to settle, at most until deadlines are to be looked at again."""
        # by what is settled, as with leases: a death whose worker deregistered before it is none
        self._station.event_queue.extend(self._station.liveness.deaths(self.place.position))
        if self._untold or self._counting or self._looking or self._more:
            for _ in range(TURNS):
                await asyncio.sleep(0)  # anyio's own way takes some microseconds more, each time
            return
        if self._sent is None and self._stopping:
            return
        await self._station.wakeup.wait(TICK_S)

    @property
    def _more(self) -> bool:
        """Whether something is left to decide for the open commit."""
        station = self._station
        waits = station.input_reader.messages or station.event_queue.queue or self._lookahead_buffer()
        return bool(waits) and self._has_room(self._open)

    @property
    def _stopping(self) -> bool:
        return self._stop.asked

    def _new_work(self, after: PendingCommit | Cursor, *, opening: bool = False) -> PendingCommit:
        station = self._station
        batch = Batch(
            self.ledger,
            structs.replace(station.rules, max_bytes=station.batch_limits.max_bytes),
            self._station.clock.utc(),
            base=self.place.base,
            on_new_host=self._host_announcer.on_new_host,
            history=station.limits.history is not None,
            dead_letter_quota=station.dead_letter_quota,
            naming=station.naming,
        )
        ahead = {key: offset for key, offset in after.ahead.items() if offset > after.position}
        return PendingCommit(batch=batch, position=after.position, ahead=ahead, opening=opening)

    # --- deciding ---

    def _decide(self) -> None:
        """Decide some of what has piled up, without awaiting anything."""
        work, station = self._open, self._station
        batch, event_queue, input_reader = work.batch, station.event_queue, station.input_reader
        output = batch.output
        batch.set_time(station.clock.utc())
        self._host_announcer.go_on(batch, self._full, station.batch_limits.records)
        self._look_at_deadlines()
        until, now = batch.events + SLICE, station.clock.monotonic
        end = now() + SLICE_S
        while event_queue.queue and batch.events < until and now() < end and self._has_room(work):
            event = event_queue.take()
            if type(event) is m.DriverReport and event.host not in self.ledger.hosts:
                event_queue.forget(event.host)  # it was forgotten while its driver was being asked
                continue
            work.decide_event(event)
        scope, batch_limits = station.scope, station.batch_limits
        if (lookahead_buffer := self._lookahead_buffer()) is not None:
            first = (batch.events + until + 1) // 2
            while lookahead_buffer.messages and batch.events < first and now() < end and self._has_room(work):
                work.decide_ahead(lookahead_buffer, scope, batch_limits)
        waiting = input_reader.messages
        most = min(until, batch_limits.records)
        # `_has_room`, spelled out: this is asked for every message
        while (
            waiting
            and batch.events < most
            and output.ledger_bytes < self._full
            and output.history_bytes < self._most_history
            and now() < end
        ):
            work.decide_in_turn(input_reader.take(), scope, batch_limits)
        if not input_reader.messages:
            work.read_to(input_reader.position)

    def _lookahead_buffer(self) -> LookAheadBuffer | None:
        """What may be decided before its turn. It begins where the intake once ended: what is before that comes first,
        some of it being of the same hosts."""
        lookahead_buffer = self._station.lookahead.lookahead_buffer
        return (
            lookahead_buffer
            if lookahead_buffer and lookahead_buffer.messages and self._open.position >= lookahead_buffer.start
            else None
        )

    def _has_room(self, work: PendingCommit) -> bool:
        batch, output = work.batch, work.batch.output
        has_bytes = output.ledger_bytes < self._full and output.history_bytes < self._most_history
        return has_bytes and batch.events < self._station.batch_limits.records

    @property
    def _looking(self) -> bool:
        """Whether some of those that deadlines are looked at for are left for the next turns."""
        return bool(self._unlooked) or (self._station.liveness.more_suspects and self._station.input_reader.hearing)

    def _look_at_deadlines(self) -> None:
        """Find out whose deadlines have passed; of many hosts and many leases some at a time."""
        station = self._station
        if self._looking:
            if station.liveness.more_suspects:
                self._judge_silence()
            self._look_at_hosts()
            return
        if station.clock.monotonic() - self._ticked_at < TICK_S:
            return
        self._ticked_at = station.clock.monotonic()
        self._open.batch.sum_up(station.dead_letter_quota.due())
        station.naming.due()  # their minutes begin anew
        event_queue = station.event_queue
        self._judge_silence()
        event_queue.extend(station.liveness.untold())
        event_queue.extend(event_queue.retries.due())
        self._unlooked = list(self.ledger.hosts)
        self._ticking = {event.host for event in event_queue.queue if type(event) is m.Tick}
        self._look_at_hosts()

    def _judge_silence(self) -> None:
        station = self._station
        if station.input_reader.hearing:
            # by what is settled: the renewals of what is under way are not counted yet
            station.event_queue.extend(station.liveness.expired(station.lookahead.heard))

    def _look_at_hosts(self) -> None:
        hosts, known, rules = self._unlooked, self.ledger.hosts, self._station.rules
        now = self._open.batch.now
        self._station.event_queue.extend(
            m.Tick(host=host)
            for host in hosts[-HOSTS_AT_ONCE:]
            if host in known and host not in self._ticking and is_due(self.ledger, rules, host, now)
        )
        del hosts[-HOSTS_AT_ONCE:]

    # --- committing ---

    def _is_due(self, work: PendingCommit) -> bool:
        """Whether there is anything to write (heartbeats move leases in memory only)."""
        if work.opening or self._stopping or not work.batch.output.empty or self._station.event_queue.notes:
            return True
        if self._station.snapshots.underway:
            return True
        if work.position - self._checkpointed >= self._station.limits.checkpoint_records:
            return True
        return self._station.clock.monotonic() - self._committed_at >= self._station.limits.checkpoint_interval_s

    def _seal(self, work: PendingCommit) -> Checkpoint:
        """Nothing more goes into this commit. What follows from it is decided for the next one."""
        event_queue, batch = self._station.event_queue, work.batch
        stale = self._stale_positions = self._stale_positions | batch.effects.hosts
        if self._station.batch_limits.whole:
            self._stale_positions = {host for host in self._stale_positions if not batch.renumber(host, self._full)}
        closing = False
        if self._stopping:
            batch.sum_up(self._station.dead_letter_quota.due(all_of_them=True))
            closing = self._host_announcer.say_stopped(batch, self._full, hosts=self._stop.parting)
        batch.output.add_piece(self._station.snapshots.piece(self.ledger, batch.now, commit=self.ledger.commits + 1))
        liveness = self._station.liveness
        deaths_left = event_queue.ended_boot_id is not None and bool(liveness.unjudged or event_queue.deaths())
        batch.output.add_notes(event_queue.notes)
        work.seal(
            Sealed(
                notes=len(event_queue.notes),
                stale_positions=frozenset(stale),
                deaths_left=deaths_left,
                closing=closing,
            )
        )
        event_queue.extend(batch.effects.follow_ups)
        self.ledger.seal()
        return checkpoint(
            self._station.identity,
            self.ledger,
            work.reading(self.place, self._station.partition, self._checkpointed),
            shape=self._shape,
            grown=self._station.scope.grown,
            at=batch.now,
            # whoever goes on after a crash must see the same deaths: the boot that ended stays named until they are in
            boot_id=event_queue.ended_boot_id if deaths_left else self._station.identity.boot_id,
            snapshot=self._station.snapshots.newest(batch.output.piece),
        )

    async def _commit(self, work: PendingCommit, told: Checkpoint) -> None:
        begun = self._station.clock.monotonic()
        try:
            await self._writer.commit(work.batch.output.transaction(self._station.topics, told))
        except BusError as error:
            work.ended(_frameless(error))
        else:
            self._station.metrics.commits.labels("ok").inc()
            self._station.metrics.commit_seconds.observe(self._station.clock.monotonic() - begun)
            self._committed_at = self._station.clock.monotonic()
            self._checkpointed = work.position
            work.ended()
        self._station.wakeup.set()

    # --- afterwards ---

    def _settle(self, work: PendingCommit) -> None:
        """The decisions are the truth now: forget what led to them, and act."""
        station, batch, effects = self._station, work.batch, work.batch.effects
        self.place.advance(work.position, work.ahead)
        station.batch_limits.grow(work.position, idle=not (station.event_queue.queue or self._open.internal))
        self.ledger.settle()
        if work.done:
            self.opened = True
            self.first_commit.set()
            station.event_queue.notes_written(work.sealed.notes)
            station.snapshots.settle(batch.output.piece, batch.output.history_bytes)
            if not work.sealed.deaths_left:
                station.event_queue.boot_judged()
        else:
            # nothing was written: what follows is decided for the next commit
            self.ledger.keep()
            station.event_queue.extend(effects.follow_ups)
        station.liveness.renew(effects.renewed)
        station.liveness.follow(effects.allocations)
        station.liveness.cut(effects.cut, self.ledger)
        for host, omitted in batch.refusals.omitted.items():
            station.dead_letter_quota.omit(host, omitted)
        for event in effects.undecided:
            self._set_aside(event)
        for host in effects.announced:
            self._attend(host)
        for command in effects.commands:
            record, _ = batch.output.values.get(command.allocation, (None, None))
            known = record if isinstance(record, Allocation) else self.ledger.allocations.get(command.allocation)
            station.drivers.perform(command, known)
        self._untold.append(batch)

    def _tell(self) -> None:
        """Count and log what was settled: once the next commit is on its way, which must not wait for that."""
        for batch in self._untold:
            self._station.reporter.committed(batch)
        self._untold.clear()
        self._counting = self._station.reporter.state_gauges.catch_up(self.ledger)

    def _attend(self, host: str) -> None:
        """Look at a host's devices from now on, or no more where its record is gone."""
        host_state = self.ledger.hosts.get(host)
        if host_state is not None and host_state.record is not None:
            self._station.drivers.serve(host)
        else:
            self._station.drivers.leave(host)
            self._station.event_queue.forget(host)
            self.ledger.forget(host)

    def _take_back(self, *works: PendingCommit) -> None:
        """These commits, the latest first, come to nothing: what led to them is to be decided again."""
        self.ledger.rollback()
        station = self._station
        station.snapshots.take_back()
        for work in works:
            station.event_queue.give_back(work.internal, but=work.batch.effects.follow_ups)
            station.input_reader.give_back(work.messages)
            station.lookahead.give_back(work.looked_ahead)
            self._give_back_ration(work.batch)
            self._stale_positions |= {host for host in work.sealed.stale_positions if host in self.ledger.hosts}
            if work.trouble is not None:
                station.reporter.failed(work.trouble)
        self._host_announcer = HostAnnouncer(station, self.ledger, since=self._since)
        self._open = self._new_work(self.place, opening=not self.opened)

    def _give_back_ration(self, batch: Batch) -> None:
        dead_letter_quota = self._station.dead_letter_quota
        dead_letter_quota.give_back(batch.refusals.rationed)
        for host, omitted in batch.refusals.summed.items():
            dead_letter_quota.omit(host, omitted)

    def _narrow(self, work: PendingCommit, trouble: TooLargeError) -> bool:
        """A commit was too large: try with fewer events, then with less of one event's effects than the bus promised to
        take. An event whose own record is too large even so is given up, for itself alone; False: there is nothing to
        give up."""
        station = self._station
        events = work.batch.events
        self._log.warning("a commit is too large, splitting it", error=str(trouble), events=events)
        narrowed = station.snapshots.shrink(work.batch.output.piece, work.batch.now) or station.batch_limits.shrink(
            events, work.batch.output.ledger_bytes
        )
        if not narrowed and work.internal:
            self._give_up(station.event_queue.take(), trouble)
            narrowed = True
        elif not narrowed and work.newest >= 0:
            narrowed = station.batch_limits.refuse(work.newest)
        self._open = self._new_work(self.place, opening=not self.opened)
        return narrowed

    def _give_up(self, event: m.Event, trouble: TooLargeError) -> None:
        """The one record that an event changes is more than the allocations topic takes now: it took more before."""
        self._log.error(
            "an event's effects are too large to commit",
            event_kind=type(event).__name__,
            **concerned(event),
            error=str(trouble),
        )
        self._set_aside(event)

    def _set_aside(self, event: m.Event) -> None:
        """An event came to nothing: its record must not be stuck by that."""
        if isinstance(event, m.LeaseExpired):
            self._station.liveness.cut([event.allocation], self.ledger)  # one lease more, and it is judged again
        else:
            self._station.event_queue.retries.keep(event)

    # --- an input that begins anew ---

    async def _begin_again(self, lost: OffsetOutOfRangeError) -> BusError | None:
        """Go on where the input begins now. Where it began anew, what comes counts as later than all there was."""
        place, station = self.place, self._station
        try:
            topic_id = (await station.bus.topic(station.topics.registrations)).id
        except BusError as error:
            return error
        place.begin_again(lost.start, topic_id)
        station.input_reader.reset(lost.start)
        station.lookahead.reset(place)
        self._checkpointed = lost.start
        station.input_lost(str(lost))
        self._open = self._new_work(place)
        return None


def _frameless(error: BusError) -> BusError:
    """An error that may be kept: the frames of its traceback hold the cycle that keeps it, and with it a ledger that
    nobody needs any more. Those of its causes do so as well, for frames know their callers from Python 3.12 on."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
