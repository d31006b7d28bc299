"""Reads a cluster's topics into the model, and keeps on reading them.

It reads the ledger as a manager does that starts: the newest record of each key, decoded in pieces. From then on it
applies records as they come. If topics are replaced or grow, or records were compacted away before it read them, it
begins again with a new model. While the bus is away the model stays, and `as_of` says how old it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.lowlevel
import structlog
from anyio.abc import TaskGroup

from outfitter_proto import bus as buses
from outfitter_proto import codec, names
from outfitter_proto.bus import (
    Bus,
    BusAccessError,
    BusError,
    BusUnavailableError,
    Message,
    OffsetOutOfRangeError,
    Reader,
    TopicLayout,
    UnknownTopicError,
)
from outfitter_proto.bus.reading import FOLLOW_WAIT_S, MARKERS_WAIT_S
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import Note, Refresh, Transition
from outfitter_proto.signs_of_life import SignsOfLife, follow_signs
from outfitter_proto.support.backoff import Backoff
from outfitter_service.api.model.fleet import Fleet, HistoryStep
from outfitter_service.api.model.tail import Tail
from outfitter_service.query import history_reader, ledger_view
from outfitter_service.query.letters import ShownLetter
from outfitter_service.query.unanswered import UnansweredMessages

T = TypeVar("T")

log = structlog.get_logger("outfitter.api")

BACKOFF_S = (0.2, 5.0)
"""The first and the longest delay between attempts to reach the bus."""
LOOK_EVERY_S = 2.0
"""Seconds between two looks at the topics' layouts and ends."""
LATE_S = 30.0
"""A model that has been incomplete for this many seconds is an old picture, whatever the reason."""
LONGEST_GAP_S = 3600.0
"""After so many seconds that nothing was read, the model begins again: a deletion of that time may be compacted away.
Must be below delete.retention.ms, however the topic was made."""
CLOSE_WITHIN_S = 2.0
"""Time limit for closing the bus."""
AT_ONCE = 8
"""Partitions that are restored at the same time."""
SLICE = 100
"""Records between two pauses: some 2 ms."""
FETCHED = 10_000
"""Most records of one fetch."""
TAILS_WITHIN_S = 30.0
"""How long a start waits for history and dead letters."""
_REFUSALS = (UnknownTopicError, BusAccessError)
"""Why history or dead letters cannot be read although the bus answers."""
NEWEST = 2_000
"""How many messages of each partition of the history and of the dead letters are read at the start: the last ones."""


class _Look(NamedTuple):
    """The ends of the ledger's partitions at a moment, or later."""

    moment: datetime
    ends: Mapping[int, int]


class _Tail(ABC, Generic[T]):
    """One partition of a topic that only grows. Calls are in the order of offsets."""

    def __init__(self, fleet: Fleet, kept: Tail[T]) -> None:
        self.fleet = fleet
        self.kept = kept
        """The items of all partitions."""
        self.next_offset: int | None = None
        """The offset after the last added message; None: before the first one."""
        self.live_from: int | None = None
        """Messages from this offset on came after the start, so they are events."""
        self.caught_up = anyio.Event()
        """Everything before it is added, or it is known that nothing can be."""
        self.has_gap = False
        """Messages before the next one are left out."""

    def add(self, message: Message) -> None:
        self.next_offset = message.offset + 1
        at = self._add(message, announce=self.live_from is not None and message.offset >= self.live_from)
        if self.has_gap and at is not None:
            self.kept.leave_out_before(at)
            self.has_gap = False

    @abstractmethod
    def _add(self, message: Message, *, announce: bool) -> datetime | None:
        """Add a message to the model, and with `announce` the event of it. Returns its time; None: it is no item."""


class _Steps(_Tail[HistoryStep]):
    """Adds steps of history. Other records of the history are left out."""

    def _add(self, message: Message, *, announce: bool) -> datetime | None:
        record = history_reader.decoded(message, codec.decode_history)
        if not isinstance(record, Transition | Refresh | Note):
            return None
        self.fleet.add_step(message, record, announce=announce)
        return record.at


class _Letters(_Tail[ShownLetter]):
    """Adds dead letters."""

    def _add(self, message: Message, *, announce: bool) -> datetime | None:
        letter = history_reader.decoded(message, codec.decode_dead_letter)
        if letter is None:
            return None
        self.fleet.add_letter(message, letter, announce=announce)
        return letter.at


class Follower:
    """Follows the topics of `cluster`, or what they say of `host` only. `fleet`: the model; None until it is
    complete."""

    def __init__(self, bus: Bus, cluster: str, *, host: str | None = None) -> None:
        self.cluster = cluster
        self._fleet: Fleet | None = None
        self.condition = "starting"
        """Why the model is not complete, for people."""
        self.behind: int | None = None
        """The records of the ledger that the bus has and the model has not, as of the last look."""
        self.as_of: datetime | None = None
        """The moment up to which the model is known to have everything."""
        self.outage: str | None = None
        """Why the bus cannot be read now, or why the model stays behind; None: there is no such reason."""
        self._bus = bus
        self._topics = names.topics(cluster)
        self._host = host
        self._readers: dict[int, Reader] = {}
        """The readers of the ledger by partition."""
        self._positions: dict[int, int] = {}
        """Up to where the model has each partition of the ledger. A reader's position may be beyond."""
        self._failures: dict[tuple[str, int], str] = {}
        """Why a partition of a topic cannot be read now."""
        self._signs = SignsOfLife()
        self._unanswered = UnansweredMessages(bus, cluster)

    @property
    def fleet(self) -> Fleet | None:
        return self._fleet

    @fleet.setter
    def fleet(self, fleet: Fleet | None) -> None:
        before, self._fleet = self._fleet, fleet
        if before is not None and before is not fleet:
            before.events.close()  # whoever follows it would be silent about the new one

    async def reach(self) -> None:
        """Connect once.

        Raises:
            BusConfigurationError: it cannot be used as configured, or there is no embedded bus. An unreachable broker
                raises nothing.
        """
        try:
            await self._bus.start()
        except BusUnavailableError as error:
            self._say(f"reaching the bus: {error}")

    async def run(self) -> None:
        """Follow until cancelled. Errors of the bus are conditions, and are tried again."""
        backoff = Backoff(*BACKOFF_S)
        while True:
            try:
                await self._bus.start()
                await self._follow()
                backoff.reset()
            except BusError as error:
                self._say(f"reaching the bus: {error}")
            self._forget()
            await anyio.sleep(backoff.next_delay())

    def _forget(self) -> None:
        """Show nothing more of a model that nobody keeps current."""
        self.fleet = self.as_of = self.behind = None

    def _say(self, condition: str) -> None:
        if condition != self.condition:
            self.condition = condition
            log.info("the API has no data yet", condition=condition)

    async def _follow(self) -> None:
        """Restore a model and follow the topics, until they are replaced.

        Raises:
            BusError: the ledger cannot be read.
        """
        layouts = await self._bus.layouts([self._topics.allocations, self._topics.registrations])
        count = (await self._bus.topic(self._topics.allocations)).partitions
        partitions = range(count) if self._host is None else [partition_of(self._host, count)]
        self._failures = {}
        fleet = Fleet(count, self._host)
        failure: BusError | None = None
        async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
            tails = self._start_tails(tasks, fleet, partitions)
            signs_read = self._start_signs(tasks, partitions)
            try:
                look = await self._restore(stack, fleet, partitions)
            except BusError as error:
                failure = error
                tasks.cancel_scope.cancel()
            else:
                stack.callback(self._forget)  # before the readers are closed, which may take long
                for partition in partitions:
                    tasks.start_soon(self._follow_ledger, partition, fleet, tasks.cancel_scope)
                tasks.start_soon(self._look, look, layouts, fleet, tasks.cancel_scope)
            with anyio.move_on_after(TAILS_WITHIN_S):
                for caught_up in (*(tail.caught_up for tail in tails), *signs_read):
                    await caught_up.wait()
            if failure is None:
                fleet.judge(self._signs, {}, announce=False)
                self.fleet, self.condition = fleet, "serving"
                log.info("the API has caught up", hosts=len(fleet.hosts), partitions=len(partitions))
        if failure is not None:
            raise failure
        self._say("restoring: the topics have changed")

    def _start_tails(self, tasks: TaskGroup, fleet: Fleet, partitions: Sequence[int]) -> list[_Tail[Any]]:
        tails: list[_Tail[Any]] = []
        for partition in partitions:
            steps, letters = _Steps(fleet, fleet.steps), _Letters(fleet, fleet.letters)
            tails += [steps, letters]
            scope = tasks.cancel_scope
            tasks.start_soon(self._follow_tail, self._topics.history, partition, steps, scope)
            tasks.start_soon(self._follow_tail, self._topics.dead_letters, partition, letters, scope)
        return tails

    def _start_signs(self, tasks: TaskGroup, partitions: Sequence[int]) -> list[anyio.Event]:
        """Follow the managers' signs of life. The events are set once those of now are read."""
        events: list[anyio.Event] = []
        for partition in partitions:
            caught_up = anyio.Event()
            events.append(caught_up)
            follow = partial(follow_signs, self._bus, self.cluster, partition, self._signs, caught_up=caught_up.set)
            tasks.start_soon(follow)
        return events

    async def _restore(self, stack: AsyncExitStack, fleet: Fleet, partitions: Sequence[int]) -> _Look:
        """Read the ledger up to its committed end, which is returned. The readers go on from there."""
        limiter = anyio.CapacityLimiter(AT_ONCE)
        look = await self._look_at(partitions)
        ends = look.ends
        readers: dict[int, Reader] = {}
        newest: dict[int, dict[bytes | None, Message]] = {partition: {} for partition in partitions}
        errors: list[BusError] = []

        async def restore_one(partition: int, scope: anyio.CancelScope) -> None:
            reader, messages = readers[partition], newest[partition]
            try:
                async with limiter:
                    while reader.position < ends[partition]:
                        for message in await reader.fetch(max_records=FETCHED, timeout=MARKERS_WAIT_S):
                            messages.pop(message.key, None)
                            messages[message.key] = message
                        self.condition = f"restoring: {_progress(readers, ends)}"
            except BusError as error:
                errors.append(error)
                scope.cancel()

        for partition in partitions:
            reader = await self._bus.open_reader(self._topics.allocations, partition, start=None, committed=True)
            readers[partition] = await stack.enter_async_context(reader)
        async with anyio.create_task_group() as group:
            for partition in partitions:
                group.start_soon(restore_one, partition, group.cancel_scope)
        if errors:
            raise errors[0]
        for partition in partitions:
            await _decode_into(fleet, newest.pop(partition))
        for host in fleet.hosts:
            fleet.prepare(host)
            await anyio.lowlevel.checkpoint()
        self._readers, self.as_of = readers, look.moment
        self._positions = {partition: reader.position for partition, reader in readers.items()}
        return look

    async def _follow_ledger(self, partition: int, fleet: Fleet, scope: anyio.CancelScope) -> None:
        reader = self._readers[partition]
        async for messages in _messages(reader, note=self._noting(self._topics.allocations, partition)):
            if messages is None:  # a deletion may have been compacted away
                scope.cancel()
                return
            for number, message in enumerate(messages, start=1):
                fleet.change(ledger_view.decode(message))
                if number % SLICE == 0:
                    await anyio.lowlevel.checkpoint()
            self._positions[partition] = reader.position

    def _noting(self, topic: str, partition: int) -> Callable[[BusError | None], None]:
        """A function that notes why a partition cannot be read, or None when it can."""

        def note(failure: BusError | None) -> None:
            if failure is None:
                self._failures.pop((topic, partition), None)
            else:
                self._failures[topic, partition] = str(failure)

        return note

    async def _follow_tail(self, topic: str, partition: int, tail: _Tail[T], scope: anyio.CancelScope) -> None:
        """Read the last messages of a partition, and those that come."""
        backoff, note = Backoff(*BACKOFF_S), self._noting(topic, partition)
        while True:
            try:
                async with await self._open_tail(topic, partition, tail) as reader:
                    tail.kept.unavailable = None
                    await _read_tail(reader, tail, note)
            except _REFUSALS as error:
                note(None)
                tail.kept.unavailable = str(error)
                tail.caught_up.set()
            except BusError as error:
                note(error)
            else:
                tail.has_gap = True
                if tail.caught_up.is_set():  # retention was faster than we: events are missing
                    scope.cancel()
            await anyio.sleep(backoff.next_delay())

    async def _open_tail(self, topic: str, partition: int, tail: _Tail[T]) -> Reader:
        first, _ = await self._bus.offsets(topic, partition)
        if tail.live_from is None:
            tail.live_from = await self._bus.stable_end(topic, partition)
        start = max(first, tail.live_from - NEWEST if tail.next_offset is None else tail.next_offset)
        tail.has_gap = tail.has_gap or (tail.next_offset is None and start > first)
        return await self._bus.open_reader(topic, partition, start=start, committed=True, lenient=True)

    async def _look(
        self, earlier: _Look, before: dict[str, TopicLayout], fleet: Fleet, scope: anyio.CancelScope
    ) -> None:
        """Look at the topics now and then: whether they are the same, and how far the model is behind. While records
        come without a pause, it is only ever known to have reached an `earlier` look."""
        while True:
            try:
                if await self._bus.layouts(list(before)) != before:
                    scope.cancel()
                    return
                look = await self._look_at(self._readers)
                for partition in self._readers:
                    _, fleet.input_ends[partition] = await self._bus.offsets(self._topics.registrations, partition)
                self.behind = self._behind(look)
                reached = earlier if self.behind else look
                if not self._behind(reached) and not self._failures:
                    if self.as_of is not None and (reached.moment - self.as_of).total_seconds() > LONGEST_GAP_S:
                        scope.cancel()
                        return
                    self.as_of, earlier = reached.moment, look
                self.outage = next(iter(self._failures.values()), None) or self._lateness(look.moment)
                await self._unanswered.look(fleet.unserved())
                fleet.judge(self._signs, self._unanswered.counts, announce=True)
            except BusError as error:
                self.outage = str(error)
            await anyio.sleep(LOOK_EVERY_S)

    async def _look_at(self, partitions: Iterable[int]) -> _Look:
        moment = datetime.now(UTC)
        ledger = self._topics.allocations
        return _Look(moment, {partition: await self._bus.stable_end(ledger, partition) for partition in partitions})

    def _behind(self, look: _Look) -> int:
        """How many offsets before these ends have not been read."""
        return sum(max(0, end - self._positions[partition]) for partition, end in look.ends.items())

    def _lateness(self, moment: datetime) -> str | None:
        """Why the model is an old picture although nothing fails; None: it is not."""
        if self.as_of is None or (late_s := (moment - self.as_of).total_seconds()) < LATE_S:
            return None
        return f"{self.behind} records of the ledger have not been read for {late_s:.0f} s"


@asynccontextmanager
async def opened(
    url: str, login: Mapping[str, str], cluster: str, *, host: str | None = None
) -> AsyncIterator[Follower]:
    """A follower with a bus of its own, which is closed after the block. The caller starts `run`."""
    bus = buses.connect(url, login, create=buses.Create.NOTHING, client=f"{buses.CLIENT}-api")
    try:
        yield Follower(bus, cluster, host=host)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_WITHIN_S):
            await bus.aclose()


def _progress(readers: Mapping[int, Reader], ends: Mapping[int, int]) -> str:
    read = sum(min(reader.position, ends[partition]) for partition, reader in readers.items())
    return f"{read} of {sum(ends.values())} offsets of the ledger are read"


async def _decode_into(fleet: Fleet, newest: dict[bytes | None, Message]) -> None:
    """Decode the newest messages, in pieces."""
    for number, message in enumerate(newest.values(), start=1):
        if message.value is not None:
            fleet.restore([ledger_view.decode(message)])
        if number % SLICE == 0:
            await anyio.lowlevel.checkpoint()


async def _read_tail(reader: Reader, tail: _Tail[T], note: Callable[[BusError | None], object]) -> None:
    """Add what comes, until the reader's position is gone.

    Raises:
        UnknownTopicError, BusAccessError: it cannot be read any more.
    """

    def note_or_raise(failure: BusError | None) -> None:
        if isinstance(failure, _REFUSALS):
            raise failure
        note(failure)

    live_from = tail.live_from or 0
    if reader.position >= live_from:
        tail.caught_up.set()
    async for messages in _messages(reader, live_from, note=note_or_raise):
        if messages is None:
            return
        for number, message in enumerate(messages, start=1):
            tail.add(message)
            if number % SLICE == 0:
                await anyio.lowlevel.checkpoint()
        if reader.position >= live_from:
            tail.caught_up.set()


async def _messages(
    reader: Reader, end: int = 0, *, note: Callable[[BusError | None], object]
) -> AsyncIterator[list[Message] | None]:
    """The messages as they come; a list may be empty. None, and the end: the reader's position is gone. Before the
    offset `end` it does not wait long, because only markers may be left. `note` is told why reading fails, and None
    when it works."""
    backoff = Backoff(*BACKOFF_S)
    while True:
        timeout = MARKERS_WAIT_S if reader.position < end else FOLLOW_WAIT_S
        try:
            messages = await reader.fetch(max_records=FETCHED, timeout=timeout)
        except OffsetOutOfRangeError:
            yield None
            return
        except BusError as error:
            note(error)
            await anyio.sleep(backoff.next_delay())
            continue
        note(None)
        backoff.reset()
        yield messages
        await anyio.lowlevel.checkpoint()
