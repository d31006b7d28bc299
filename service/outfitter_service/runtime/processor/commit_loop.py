"""The one loop in which everything happens while one writer holds the partition:

    events → decide → records and commands → commit the records → act on the commands → events …

While one commit is under way, the loop decides the next one on the ledger as it will be. A failed commit is rolled
back, and so is the next one, whose decisions build on it. Then the tenure ends. The loop knows no rules of allocation
(core/), no driver, and not how a partition is taken (takeover.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup
from msgspec import UNSET, UnsetType

from outfitter_proto.bus import BusError, Message, OffsetOutOfRangeError, TooLargeError, Writer
from outfitter_proto.records import Allocation, Checkpoint, CommitNumber, OrdersPosition
from outfitter_service.core import model as m
from outfitter_service.core.decide import is_due
from outfitter_service.core.orders import is_news
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.runtime.changelog.encoding import checkpoint
from outfitter_service.runtime.changelog.topic_layout import ClusterLayout
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.processor.commit.commit import Commit
from outfitter_service.runtime.processor.equipment import Equipment, ReopenError

SLICE = 48
"""Most events decided in one slice, so that the loop sees the answer to a commit soon."""
SLICE_S = 0.01
"""Most seconds of deciding in one slice. A probe waits at most this long, plus one event."""
YIELDS = 6
"""Turns of the event loop after each slice: a commit needs several turns for each of its steps, and usually takes
longer than the decisions of the next one."""
TICK_S = 0.25
"""Seconds between two checks of all deadlines."""
HOSTS_AT_ONCE = 500
"""Hosts whose deadlines are checked in one turn: a partition may have 10,000 of them."""


class CommitLoop:
    """The loop of one tenure."""

    def __init__(
        self,
        equipment: Equipment,
        writer: Writer,
        ledger: Ledger,
        cursor: Cursor,
        layout: ClusterLayout,
        *,
        orders: OrdersPosition | UnsetType,
    ) -> None:
        """`cursor`: the committed position in the input. `layout`: the topics' at the start of the tenure. `orders`:
        how far the last checkpoint has taken operators' orders."""
        self.cursor = cursor
        self.first_commit = anyio.Event()
        """It is set once anything is committed."""
        self._writer = writer
        self._ledger = ledger
        self._layout = layout
        self._equipment = equipment
        self._assignment = equipment.assignment
        self._rules = equipment.rules
        self._limits = equipment.limits
        self._clock = equipment.instruments.clock
        self._stop = equipment.stop
        self._event_queue = equipment.event_queue
        self._inputs = equipment.inputs
        self._reader = equipment.inputs.reader
        self._lookahead = equipment.inputs.lookahead
        self._liveness = equipment.liveness
        self._drivers = equipment.drivers
        self._quotas = equipment.quotas
        self._rewrites = equipment.quotas.rewrites
        self._snapshots = equipment.snapshots
        self._reporter = equipment.reporter
        self._refused_commit = equipment.refused_commit
        self._signs_of_life = equipment.signs_of_life
        self._orders = equipment.orders
        self._orders_taken = orders
        self._orders_trouble: str | UnsetType | None = None  # as the last checkpoint of this tenure says
        self._manager = self._assignment.manager()
        self._outages = self._reader.outages
        self._checked_at = 0.0
        self._unchecked: list[str] = []
        """Hosts whose deadlines are left for the next turns."""
        self._ticking: set[str] = set()
        """Hosts that wait for such a check's result already."""
        self._unannounced = self._hosts_to_announce()
        self._unstopped: deque[str] | None = None
        """Hosts whose records do not say yet that the manager stops."""
        self._stale_positions = dict.fromkeys(ledger.hosts)  # the last manager may have left these to its next commit
        self._written_to = cursor.position  # the next offset after the last commit's input
        self._written_at = 0.0
        self._sent: Commit | None = None
        self._open = self._open_after(cursor, opening=True)

    def oldest(self) -> Message | None:
        """The message that has waited longest for the commit of its answer."""
        for messages in (self._sent.messages if self._sent else (), self._open.messages, self._reader.messages):
            if messages:
                return messages[0]
        return None

    async def run(self, ready: Callable[[bool], None]) -> BusError | None:
        """Work until something fails or the last commit of an orderly shutdown is written. Returns the error, after
        which the ledger is rolled back, or None. `ready` is called with whether the loop answers registrations."""
        async with anyio.create_task_group() as commits:
            trouble = await self._run(commits, ready)
        self._reporter.catch_up(self._ledger)
        return trouble

    async def _run(self, commits: TaskGroup, ready: Callable[[bool], None]) -> BusError | None:
        while True:
            self._signs_of_life.ask()
            self._reporter.catch_up(self._ledger)  # while the next commit is under way, to delay none
            if self._sent is not None and self._sent.done:
                sent, self._sent = self._sent, None
                trouble = self._end_commit(sent)
                if trouble is not None or (sent.closing and sent.trouble is None):
                    return trouble
            self._decide()
            if self._sent is None and not self._more:
                trouble = await self._send(commits)
                if trouble is not None:
                    return trouble
                if self.first_commit.is_set():
                    ready(self._is_ready())
            await self._wait()

    def _is_ready(self) -> bool:
        return self._reader.is_readable and self._refused_commit.trouble is None and self._signs_of_life.trouble is None

    @property
    def _more(self) -> bool:
        """Whether something is left to decide for the open commit."""
        waits = self._reader.messages or self._event_queue.queue or self._lookahead_buffer()
        return bool(waits) and self._open.is_open

    async def _wait(self) -> None:
        """Wait for something to decide or to act on, at most until the next check of deadlines."""
        # deaths whose worker cannot have deregistered before, by the committed input
        self._event_queue.extend(self._liveness.deaths(self.cursor.position))
        if self._reporter.behind or self._is_checking or self._more:
            for _ in range(YIELDS):
                await asyncio.sleep(0)  # anyio's own way takes some microseconds more, each time
            return
        if self._sent is None and self._stop.requested:
            return
        await self._event_queue.wakeup.wait(TICK_S)

    # --- events: deadlines of leases, hosts and quotas ---

    @property
    def _is_checking(self) -> bool:
        """Whether some hosts or leases are left for the next turns."""
        return bool(self._unchecked) or (self._liveness.more_suspects and self._reader.shows_silence)

    def _check_deadlines(self, commit: Commit) -> None:
        """Queue an event for each deadline that has passed, and write the summaries of ended quotas. Of many hosts and
        leases it checks some in each turn."""
        liveness, event_queue = self._liveness, self._event_queue
        # not only when the tick is due: a worker that registers again hears by the answer whether it is watched
        event_queue.extend(liveness.take_unreported())
        if self._is_checking:
            if liveness.more_suspects:
                self._judge_silence()
            self._check_hosts(commit)
            return
        if self._clock.monotonic() - self._checked_at < TICK_S:
            return
        self._checked_at = self._clock.monotonic()
        commit.sum_up(self._quotas.letters.due())
        self._quotas.naming.due()  # starts its next minute
        event_queue.extend(m.Reschedule(host=host) for host in self._rewrites.end_windows())
        self._judge_silence()
        event_queue.queue_due_retries()
        self._unchecked = list(self._ledger.hosts)
        self._ticking = {event.host for event in event_queue.queue if type(event) is m.Tick}
        self._check_hosts(commit)

    def _judge_silence(self) -> None:
        if self._reader.shows_silence:
            # by the committed input: renewals of the commit under way do not count yet
            self._event_queue.extend(self._liveness.expired(self._lookahead.decided_before))

    def _check_hosts(self, commit: Commit) -> None:
        hosts, ledger = self._unchecked, self._ledger
        self._event_queue.extend(
            m.Tick(host=host)
            for host in hosts[-HOSTS_AT_ONCE:]
            if host in ledger.hosts and host not in self._ticking and is_due(ledger, self._rules, host, commit.now)
        )
        del hosts[-HOSTS_AT_ONCE:]

    # --- decide ---

    def _open_after(self, after: Commit | Cursor, *, opening: bool = False) -> Commit:
        """A new commit that begins where `after` ends in the input. `opening`: it is the first one of the tenure."""
        return Commit(
            self._ledger,
            self._rules,
            self._clock.utc(),
            manager=self._manager,
            cursor=self.cursor,
            after=after,
            opening=opening,
            limits=self._limits,
            quotas=self._quotas,
        )

    def _decide(self) -> None:
        """Decide one slice of the waiting events, without awaiting anything."""
        commit, event_queue, reader = self._open, self._event_queue, self._reader
        transaction, most_events = commit.transaction, self._limits.events_per_commit
        commit.set_time(self._clock.utc())
        while self._unannounced and commit.events < most_events and commit.announce(self._unannounced[0]):
            self._unannounced.popleft()
        commit.repeat_waiting()
        self._check_deadlines(commit)
        until, now = commit.events + SLICE, self._clock.monotonic
        end = now() + SLICE_S
        while event_queue.queue and commit.events < until and now() < end and commit.is_open:
            event = event_queue.pop()
            if type(event) is m.DriverReport and event.host not in self._ledger.hosts:
                event_queue.forget(event.host)  # it was deleted while the manager asked its driver
                continue
            if not commit.decide_internal(event):
                event_queue.put_back([event], but=())
        scope = self._assignment.scope
        if (lookahead_buffer := self._lookahead_buffer()) is not None:
            first = (commit.events + until + 1) // 2
            while lookahead_buffer.messages and commit.events < first and now() < end and commit.is_open:
                commit.decide_ahead(lookahead_buffer, scope)
        waiting = reader.messages
        last, full, full_history = min(until, most_events), commit.full, self._rules.max_bytes
        # `is_open`, written out, because it runs for every message
        while (
            waiting
            and commit.events < last
            and transaction.ledger_bytes < full
            and transaction.history_bytes < full_history
            and not commit.is_full
            and now() < end
        ):
            if not commit.decide_in_turn(message := reader.pop(), scope):
                reader.put_back([message])
        if not reader.messages:
            commit.read_to(reader.position)

    def _lookahead_buffer(self) -> LookAheadBuffer | None:
        """The messages that may be decided before their turn; None: there are none. The input must be decided up to the
        buffer's start, because it may have earlier messages of the same hosts."""
        buffer = self._lookahead.lookahead_buffer
        return buffer if buffer and buffer.messages and self._open.position >= buffer.start else None

    def _hosts_to_announce(self) -> deque[str]:
        """The hosts whose records must be rewritten. In host scope our own record is always rewritten; in cluster scope
        only records that say nobody manages the host."""
        own = self._assignment.identity.host
        if own is not None:
            return deque([own])
        return deque(
            name
            for name, host_state in self._ledger.hosts.items()
            if host_state.runs.incarnations
            and (host_state.record is None or host_state.record.manager.stopped_at is not None)
        )

    # --- commit ---

    async def _send(self, commits: TaskGroup) -> BusError | None:
        """No commit is under way: send the open one if it must be written. Returns an error that ends the tenure."""
        commit, reader = self._open, self._reader
        if self._outages != reader.outages and not self._assignment.bus.local and not self._stop.requested:
            # brokers that were away may have lost the last commit's end (`kafka.producer`), and must confirm it first
            self._roll_back(commit)
            return ReopenError("the bus was away: the end of the last commit must be confirmed")
        if self._stop.requested or self._must_be_written(commit):
            commits.start_soon(self._commit, commit, self._complete(commit))
            self._sent, self._open = commit, self._open_after(commit)
            return None
        if commit.events or commit.position != self.cursor.position:
            self._act(commit)
            self._open = self._open_after(self.cursor)
        if reader.trouble is not None:
            return reader.trouble
        if reader.lost is not None and not reader.messages:
            return await self._begin_again(reader.lost)
        return None

    def _must_be_written(self, commit: Commit) -> bool:
        """Whether the commit has anything to write (heartbeats move leases in memory only)."""
        if commit.opening or not commit.transaction.is_empty or self._event_queue.notes or self._snapshots.underway:
            return True
        if self._signs_of_life.is_news or self._rewrites.renewed or self._orders.trouble != self._orders_trouble:
            return True
        if commit.position - self._written_to >= self._limits.checkpoint_records:
            return True
        return self._clock.monotonic() - self._written_at >= self._limits.checkpoint_interval_s

    def _complete(self, commit: Commit) -> Checkpoint:
        """Complete this commit, and return its checkpoint. Its follow-ups are decided for the next commit."""
        event_queue, ledger, transaction = self._event_queue, self._ledger, commit.transaction
        stale = self._stale_positions | commit.effects.hosts
        self._rewrites.take_renewed()
        self._stale_positions = {host: None for host in stale if not commit.renumber(host, commit.full)}
        if self._stop.requested:
            commit.sum_up(self._quotas.letters.due(all_of_them=True))
            commit.closing = self._say_stopped(commit)
        transaction.piece = self._snapshots.piece(ledger, commit.now, commit=CommitNumber(ledger.commits + 1))
        transaction.notes += event_queue.notes
        ended_boot_id = event_queue.ended_boot_id
        commit.deaths_left = ended_boot_id is not None and bool(self._liveness.unjudged or event_queue.deaths())
        event_queue.extend(commit.effects.follow_ups)
        ledger.begin_commit()
        return checkpoint(
            self._assignment.identity,
            ledger,
            commit.input_position(self.cursor, self._assignment.partition, self._written_to),
            layout=self._layout,
            at=commit.now,
            # the ended boot stays in the checkpoint until all its deaths are committed: so a crash loses none
            boot_id=ended_boot_id if commit.deaths_left else self._assignment.identity.boot_id,
            snapshot=self._snapshots.newest(transaction.piece),
            beat_s=self._signs_of_life.say(),
            lease_grace_s=self._limits.lease_grace_s,
            orders=self._take_orders(),
            orders_unread=self._orders.trouble,
        )

    def _take_orders(self) -> OrdersPosition | UnsetType:
        """How far operators' orders are decided with the open commit."""
        self._orders_trouble = self._orders.trouble
        if self._orders.position not in (UNSET, self._orders_taken) and not self._event_queue.has_orders:
            self._orders_taken = self._orders.position
        return self._orders_taken

    def _say_stopped(self, commit: Commit) -> bool:
        """Write since when nobody manages the hosts, as far as there is room. Returns whether all hosts are done."""
        if self._unstopped is None:
            self._unstopped = deque(self._ledger.hosts if self._stop.mark_stopped else ())
        while self._unstopped and commit.say_stopped(self._unstopped[0]):
            self._unstopped.popleft()
        return not self._unstopped

    async def _commit(self, commit: Commit, checkpoint: Checkpoint) -> None:
        begun = self._clock.monotonic()
        trouble: BusError | None = None
        try:
            await self._writer.commit(commit.transaction.entries(self._assignment.topics, checkpoint))
        except BusError as error:
            trouble = _frameless(error)
        commit.ended(trouble, self._clock.monotonic() - begun)
        self._event_queue.wakeup.set()

    # --- act ---

    def _end_commit(self, sent: Commit) -> BusError | None:
        """A commit has ended: act on it, or roll it back. Returns the error if that ends the tenure."""
        if sent.trouble is None:
            self._signs_of_life.committed()
            self._act(sent)
            if self._writer.must_reopen and not sent.closing:
                self._roll_back(self._open)
                return ReopenError("a request to the bus was retried: the writer is replaced")
            return None
        self._roll_back(self._open, sent)
        if isinstance(sent.trouble, TooLargeError):
            return self._refused_commit.met(self._assignment.bus, sent.trouble, until=sent.position)
        return sent.trouble

    def _act(self, commit: Commit) -> None:
        """The decisions of `commit` are final: drop their input, and act."""
        ledger, event_queue, liveness, effects = self._ledger, self._event_queue, self._liveness, commit.effects
        self.cursor.advance(commit.position, commit.ahead)
        commit.note_omitted()
        others = event_queue.queue or (self._open.internal if self._open is not commit else ())
        self._refused_commit.passed(commit.position, idle=not others)
        ledger.end_commit()
        if commit.done:
            self._written_to, self._written_at = commit.position, self._clock.monotonic()
            self._snapshots.committed(commit.transaction.piece, commit.transaction.history_bytes)
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
            event_queue.set_aside(event)  # deciding it met a defect, which is in the log
            if isinstance(event, m.LeaseExpired):
                # the allocation gets one more lease, and is judged again after it
                liveness.start_final_leases([event.allocation], ledger)
        event_queue.committed(
            commit.internal,
            notes=len(commit.transaction.notes),
            boot_judged=commit.done and not commit.deaths_left,
        )
        for host in effects.announced:
            self._update_drivers(host)
        for command in effects.commands:
            record, _ = commit.transaction.values.get(command.allocation, (None, None))
            allocation = record if isinstance(record, Allocation) else ledger.allocations.get(command.allocation)
            self._drivers.perform(command, allocation)
        for allocation in effects.allocations.values():
            if allocation is not None:
                self._drivers.see_committed(allocation)
        self._reporter.committed(commit)

    def _update_drivers(self, host: str) -> None:
        """Start the host's drivers, or stop them where its record is gone."""
        host_state = self._ledger.hosts.get(host)
        if host_state is not None and host_state.record is not None:
            self._drivers.start_host(host)
            now = self._clock.utc()
            # a new host had no record when its orders were read
            if orders := [order for order in self._orders.of(host) if is_news(self._ledger, order, now)]:
                self._event_queue.add_orders([m.OrderRead(order=order) for order in orders])
        else:
            self._drivers.stop_host(host)
            self._event_queue.forget(host)
            self._ledger.forget(host)

    def _roll_back(self, *commits: Commit) -> None:
        """Roll back these commits, the latest first: the tenure ends. The next one decides their events again; until
        then `oldest` says which message waits."""
        self._ledger.rollback()
        for commit in commits:
            self._event_queue.put_back(commit.internal, but=commit.effects.follow_ups)
            self._reader.put_back(commit.messages)
            if commit.trouble is not None:
                self._reporter.answered(commit.trouble, commit.seconds)
            commit.refund_quotas()
        self._snapshots.rollback()
        self._signs_of_life.rollback()
        self._open = self._open_after(self.cursor)

    async def _begin_again(self, lost: OffsetOutOfRangeError) -> BusError | None:
        """Continue where the input begins now. Messages of a recreated topic count as later than all earlier ones.
        Returns the error if the bus did not answer."""
        try:
            topic_id = (await self._assignment.bus.topic(self._assignment.topics.registrations)).id
        except BusError as error:
            return error
        self.cursor.begin_again(lost.start, topic_id)
        self._inputs.reset(self.cursor)
        self._written_to = self.cursor.position
        self._equipment.lose_input(str(lost))
        self._open = self._open_after(self.cursor)
        return None


def _frameless(error: BusError) -> BusError:
    """The error without tracebacks, so that a kept error does not keep the loop and its ledger alive. Its causes lose
    their tracebacks as well, because frames know their callers from Python 3.12 on."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
