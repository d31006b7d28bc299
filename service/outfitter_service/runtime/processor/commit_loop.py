"""The one loop in which everything happens while one writer holds the partition:

    event → decide → records and commands → commit the records → act on the commands → events …

While one commit is under way, the loop decides the next one on the ledger as it will be. A failed commit undoes its
decisions and those that build on them (settlement.py). The loop knows no rules of allocation (core/), no driver, and
not how a partition is taken (takeover.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from outfitter_proto.bus import BusError, Message, OffsetOutOfRangeError, TooLargeError
from outfitter_proto.records import Checkpoint
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.input.lookahead import Inputs, LookAheadBuffer
from outfitter_service.runtime.processor.commit.pending_commit import PendingCommit
from outfitter_service.runtime.processor.commit_builder import CommitBuilder
from outfitter_service.runtime.processor.deadlines import TICK_S, Deadlines
from outfitter_service.runtime.processor.event_queue import EventQueue, StopRequest
from outfitter_service.runtime.processor.settlement import Settlement
from outfitter_service.runtime.processor.tenure import RecycledError, Tenure

SLICE = 48
"""Most events decided in one slice, so that the loop sees the answer to a commit soon."""
SLICE_S = 0.01
"""Most seconds of deciding in one slice. A probe waits at most this long, plus one event."""
YIELDS = 6
"""Turns of the event loop after each slice: a commit needs several turns for each of its steps, and usually takes
longer than the decisions of the next one."""


class CommitLoop:
    """Decides and commits during one tenure."""

    def __init__(
        self,
        tenure: Tenure,
        builder: CommitBuilder,
        settlement: Settlement,
        deadlines: Deadlines,
        inputs: Inputs,
        event_queue: EventQueue,
        stop: StopRequest,
        clock: Clock,
    ) -> None:
        """`stop`: requests one last commit. `first_commit` is set once anything is committed."""
        self._tenure = tenure
        self._builder = builder
        self._settlement = settlement
        self._deadlines = deadlines
        self.first_commit = settlement.first_commit
        self._refused_commit = settlement.refused_commit
        self._most_events = builder.most_events
        self._inputs = inputs
        self._event_queue = event_queue
        self._stop = stop
        self._clock = clock
        self._outages = inputs.reader.outages
        self._sent: PendingCommit | None = None
        self._open = builder.open(tenure.cursor, opening=True)

    def oldest(self) -> Message | None:
        """The message that has waited longest for the commit of its answer."""
        for messages in (self._sent.messages if self._sent else (), self._open.messages, self._inputs.reader.messages):
            if messages:
                return messages[0]
        return None

    # --- the loop ---

    async def run(self, ready: Callable[[bool], None]) -> BusError | None:
        """Work until something fails or the last commit of an orderly shutdown is written. Returns the error, after
        which the ledger is rolled back, or None. `ready` is called with whether the loop answers registrations."""
        async with anyio.create_task_group() as commits:
            trouble = await self._run_loop(commits, ready)
        self._settlement.report()
        return trouble

    async def _run_loop(self, commits: TaskGroup, ready: Callable[[bool], None]) -> BusError | None:
        while True:
            self._tenure.signs_of_life.ask()
            self._settlement.report()
            if self._sent is not None and self._sent.done:
                sent, self._sent = self._sent, None
                trouble = self._conclude(sent)
                if trouble is not None or (sent.sealed.closing and sent.trouble is None):
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
        return (
            self._inputs.reader.is_readable
            and self._refused_commit.trouble is None
            and self._tenure.signs_of_life.trouble is None
        )

    def _conclude(self, sent: PendingCommit) -> BusError | None:
        """A commit has ended: act on it, or take it back. Returns the error if that ends the tenure."""
        writer = self._tenure.writer
        if sent.trouble is None:
            self._tenure.signs_of_life.committed()
            self._settle(sent)
            if writer.tainted and not sent.sealed.closing:
                self._take_back(self._open)
                return RecycledError("a request to the bus was retried: the writer is replaced")
            return None
        self._take_back(self._open, sent)
        if isinstance(sent.trouble, TooLargeError):
            return self._refused_commit.met(self._tenure.assignment.bus, sent.trouble, until=sent.position)
        return sent.trouble

    async def _send(self, commits: TaskGroup) -> BusError | None:
        """No commit is under way: send the open one if it must be written. Returns an error that ends the tenure."""
        commit, cursor, reader = self._open, self._tenure.cursor, self._inputs.reader
        if self._outages != reader.outages and not self._tenure.assignment.bus.local and not self._stop.requested:
            # brokers that were away may have lost the last commit's end (`kafka.producer`), and must confirm it first
            self._take_back(commit)
            return RecycledError("the bus was away: the end of the last commit must be confirmed")
        if self._stop.requested or self._builder.is_due(commit):
            checkpoint = self._builder.seal(commit, self._stop, unjudged_deaths=self._deadlines.unjudged_deaths)
            commits.start_soon(self._commit, commit, checkpoint)
            self._sent, self._open = commit, self._builder.open(commit)
            return None
        if commit.internal or commit.messages or commit.looked_ahead or commit.position != cursor.position:
            self._settle(commit)
            self._open = self._builder.open(cursor)
        if reader.trouble is not None:
            return reader.trouble
        if reader.lost is not None and not reader.messages:
            return await self._begin_again(reader.lost)
        return None

    async def _begin_again(self, lost: OffsetOutOfRangeError) -> BusError | None:
        trouble = await self._settlement.begin_again(lost)
        if trouble is None:
            self._open = self._builder.open(self._tenure.cursor)
        return trouble

    async def _wait(self) -> None:
        """Wait for something to decide or to settle, at most until the next check of deadlines."""
        self._deadlines.check_deaths()
        if self._settlement.unreported or self._deadlines.unfinished or self._more:
            for _ in range(YIELDS):
                await asyncio.sleep(0)  # anyio's own way takes some microseconds more, each time
            return
        if self._sent is None and self._stop.requested:
            return
        await self._event_queue.wakeup.wait(TICK_S)

    @property
    def _more(self) -> bool:
        """Whether something is left to decide for the open commit."""
        waits = self._inputs.reader.messages or self._event_queue.queue or self._lookahead_buffer()
        return bool(waits) and self._open.has_room(self._most_events)

    # --- deciding ---

    def _decide(self) -> None:
        """Decide one slice of the waiting events, without awaiting anything."""
        commit, event_queue, input_reader = self._open, self._event_queue, self._inputs.reader
        batch, output, most = commit.batch, commit.batch.output, self._most_events
        self._builder.start_slice(batch)
        self._deadlines.check(batch)
        until, now = batch.events + SLICE, self._clock.monotonic
        end = now() + SLICE_S
        while event_queue.queue and batch.events < until and now() < end and commit.has_room(most):
            event = event_queue.pop()
            if type(event) is m.DriverReport and event.host not in self._tenure.ledger.hosts:
                # the host was deleted while the manager asked its driver
                event_queue.set_aside(event, f"host {event.host!r} is not served any more")
                event_queue.forget(event.host)
                continue
            if not commit.decide_event(event):
                event_queue.give_back([event], but=())
        scope = self._tenure.assignment.scope
        if (lookahead_buffer := self._lookahead_buffer()) is not None:
            first = (batch.events + until + 1) // 2
            while lookahead_buffer.messages and batch.events < first and now() < end and commit.has_room(most):
                commit.decide_ahead(lookahead_buffer, scope)
        waiting = input_reader.messages
        most, full, full_history = min(until, most), batch.full, batch.rules.max_bytes
        # `has_room`, written out, because it runs for every message
        while (
            waiting
            and batch.events < most
            and output.ledger_bytes < full
            and output.history_bytes < full_history
            and not batch.is_full
            and now() < end
        ):
            if not commit.decide_in_turn(message := input_reader.pop(), scope):
                input_reader.give_back([message])
        if not input_reader.messages:
            commit.read_to(input_reader.position)

    def _lookahead_buffer(self) -> LookAheadBuffer | None:
        """The messages that may be decided before their turn; None: there are none. The input must be decided up to the
        buffer's start, because it may have earlier messages of the same hosts."""
        buffer = self._inputs.lookahead.lookahead_buffer
        return buffer if buffer and buffer.messages and self._open.position >= buffer.start else None

    # --- committing ---

    async def _commit(self, commit: PendingCommit, checkpoint: Checkpoint) -> None:
        begun, topics = self._clock.monotonic(), self._tenure.assignment.topics
        trouble: BusError | None = None
        try:
            await self._tenure.writer.commit(commit.batch.output.transaction(topics, checkpoint))
        except BusError as error:
            trouble = _frameless(error)
        commit.ended(trouble, self._clock.monotonic() - begun)
        self._event_queue.wakeup.set()

    def _settle(self, commit: PendingCommit) -> None:
        self._settlement.settle(commit, idle=not (self._event_queue.queue or self._open.internal))

    def _take_back(self, *commits: PendingCommit) -> None:
        """Take back these commits, the latest first, and open a new one."""
        self._settlement.take_back(*commits)
        self._open_anew()

    def _open_anew(self) -> None:
        self._open = self._builder.open(self._tenure.cursor, opening=not self.first_commit.is_set())


def _frameless(error: BusError) -> BusError:
    """The error without tracebacks, so that a kept error does not keep the loop and its ledger alive. Its causes lose
    their tracebacks as well, because frames know their callers from Python 3.12 on."""
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
