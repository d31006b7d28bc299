"""The manager's internal events that wait for a decision: reports, deaths, timers, ends of commands.

An event stays here, or with the commit that includes it, until that commit has returned. When the manager takes the
partition again, it observes levels again (inventories, the queue). Edges happen once, and the queue keeps them (deaths,
ends of commands). The queue decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import anyio

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Note, Token
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock

RETRY_AFTER_S = 30.0
"""Seconds until an event that could not be committed is tried again."""


class DelayedEvents:
    """Events that could not be committed and are tried again later: one first, and the others once that one is
    committed. So a flood of them costs one attempt in `RETRY_AFTER_S` while the topics take too little."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: dict[object, m.Event] = {}
        self._due_at = 0.0
        self._tried: m.Event | None = None
        self._works = False

    def __iter__(self) -> Iterator[m.Event]:
        return iter(self._events.values())

    def add(self, event: m.Event) -> None:
        """Try an event again later. A lease is judged again by itself, and a later version of an order may be decided
        meanwhile. Of a driver's reports the newest is kept, and of the evaluations of one host one is enough."""
        if isinstance(event, m.LeaseExpired | m.Incoming | m.OrderRead):
            return
        if isinstance(event, m.Reschedule):
            event = m.Reschedule(host=event.host, cause=event.cause)  # whole, in the place of those that come meanwhile
        self._events[_key(event)] = event
        self._due_at = self._clock.monotonic() + RETRY_AFTER_S
        self._works = False

    def has(self, event: m.Event) -> bool:
        """Whether this event, or one that has the same effect, is tried again later."""
        return _key(event) in self._events

    def drop(self, event: m.Event) -> None:
        """This event makes an earlier one of the same effect superfluous."""
        self._events.pop(_key(event), None)

    def due(self) -> list[m.Event]:
        """Remove and return the events whose time has come. An event that fails again must be added again."""
        now = self._clock.monotonic()
        if not self._events or now < self._due_at:
            return []
        self._due_at = now + RETRY_AFTER_S
        first, *others = self._events if self._works else [next(iter(self._events))]
        self._works = False
        self._tried = self._events[first]
        return [self._events.pop(key) for key in (first, *others)]

    def committed(self, events: Iterable[m.Event]) -> None:
        """These events are committed. If the one that was tried is among them, the others are due."""
        if self._tried is not None and any(event is self._tried for event in events):
            self._tried = None
            self._works = True
            self._due_at = self._clock.monotonic()


def _key(event: m.Event) -> object:
    """What is the same for events of which one is enough."""
    match event:
        case m.DriverReport():
            return m.DriverReport, event.host, event.resource
        case m.Reschedule() | m.Tick():
            return type(event), event.host
    return event


def edges(queued: Iterable[m.Event], delayed: Iterable[m.Event]) -> deque[m.Event]:
    """The queued events that nothing observes again when the partition is taken again. Each death is there once, and
    none that is `delayed`."""
    deaths = {event.allocation for event in delayed if isinstance(event, m.OwnerDied)}
    unique: dict[object, m.Event] = {}
    for event in queued:
        if isinstance(event, m.OwnerDied):
            if event.allocation not in deaths:
                unique.setdefault((m.OwnerDied, event.allocation), event)
        elif not isinstance(
            event, m.DriverReport | m.Reschedule | m.LeaseExpired | m.OwnerUnwatched | m.OrderRead | m.Tick
        ):
            unique[event] = event
    return deque(unique.values())


class Wakeup:
    """Wakes up one task. Any task may set it. If it is set while nobody waits, the next wait ends at once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, at_most: float) -> None:
        """Wait until it was set since the last wait, for at most `at_most` seconds."""
        with anyio.move_on_after(at_most):
            await self._event.wait()
        self._event = anyio.Event()


class StopRequest:
    """A request to stop after one last commit. `mark_stopped`: that commit writes that nobody manages the hosts."""

    def __init__(self) -> None:
        self.mark_stopped = True
        self._requested = anyio.Event()

    def request(self, *, mark_stopped: bool) -> None:
        """Stop after one last commit. `mark_stopped` is as in the class."""
        self.mark_stopped = mark_stopped
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    async def wait(self) -> None:
        """Wait for the request."""
        await self._requested.wait()


class EventQueue:
    """The events of one processor. `wakeup` is set when there is something to decide or to act on."""

    def __init__(self, clock: Clock, wakeup: Wakeup) -> None:
        self.queue: deque[m.Event] = deque()
        """In the order of decision."""
        self.notes: list[Note] = []
        """For the history of the next commit."""
        self.ended_boot_id: str | None = None
        """The ended boot in which the last manager worked, until all deaths by that end are committed."""
        self._retries = DelayedEvents(clock)
        self._reports: dict[tuple[str, str], m.DriverReport] = {}
        self._delays: dict[AllocationKey, m.ReleaseDelayed] = {}
        self.wakeup = wakeup

    def add(self, event: m.Event) -> None:
        """Queue an event, and wake the commit loop up. A new inventory replaces one that still waits, and so does the
        reason of a delayed release. So repeated reports during an outage need no memory."""
        before = self._replaced(event)
        if before is not None:
            for index, queued in enumerate(self.queue):
                if queued is before:
                    self.queue[index] = event
                    return
        self.queue.append(event)
        self.wakeup.set()

    def add_orders(self, events: Sequence[m.OrderRead]) -> None:
        """Queue orders before all other events but earlier orders, and wake the commit loop up."""
        waiting = [event for event in self.queue if type(event) is m.OrderRead]
        others = [event for event in self.queue if type(event) is not m.OrderRead] if waiting else self.queue
        self.queue = deque([*waiting, *events, *others])
        self.wakeup.set()

    @property
    def has_orders(self) -> bool:
        """Whether an order waits for its decision."""
        return any(type(event) is m.OrderRead for event in self.queue)

    def _replaced(self, event: m.Event) -> m.Event | None:
        """The earlier event that this one replaces, if it may still be queued."""
        before: m.Event | None = None
        match event:
            case m.DriverReport():
                before = self._reports.get((event.host, event.resource))
                self._reports[event.host, event.resource] = event
                self._retries.drop(event)
                return None if event.asked else before
            case m.ReleaseDelayed():
                before = self._delays.get(event.allocation)
                self._delays[event.allocation] = event
            case m.Unprepared():
                self._delays.pop(event.allocation, None)
        return before

    def extend(self, events: Iterable[m.Event]) -> None:
        """Queue events from the commit loop itself, which needs no wake-up. If a host's evaluation was set aside, the
        host is not evaluated before its time: it would begin with what could not be committed."""
        retries = self._retries
        self.queue.extend(
            event for event in events if type(event) not in (m.Reschedule, m.Tick) or not retries.has(event)
        )

    def pop(self) -> m.Event:
        """Remove and return the next event. It comes back only by `put_back`."""
        event = self.queue.popleft()
        if type(event) is m.ReleaseDelayed and self._delays.get(event.allocation) is event:
            del self._delays[event.allocation]  # else each later report would look for this one in the whole queue
        return event

    def note(self, note: Note) -> None:
        """Write a note into the history of the next commit."""
        self.notes.append(note)

    def committed(self, events: Iterable[m.Event], *, notes: int, boot_judged: bool) -> None:
        """The commit of these events and of the first so many `notes` has returned, or nothing of it had to be written.
        `boot_judged`: all deaths by the end of the ended boot are committed."""
        self._retries.committed(events)
        del self.notes[:notes]
        if boot_judged:
            self.ended_boot_id = None

    def set_aside(self, event: m.Event) -> None:
        """An event cannot be committed now. Try it again later."""
        self._retries.add(event)

    def queue_due_retries(self) -> None:
        """Queue the events that were set aside and are due again, without reports of hosts that are not served now."""
        for event in self._retries.due():
            if not isinstance(event, m.DriverReport) or self._reports.get((event.host, event.resource)) is event:
                self.queue.append(event)

    def put_back(self, events: Iterable[m.Event], *, but: Iterable[m.Event]) -> None:
        """The commit that included `events` failed: put them first again, and remove its follow-ups (`but`)."""
        removed = {id(event) for event in but}
        if removed:
            self.queue = deque(event for event in self.queue if id(event) not in removed)
        # only now, because an unfinished event is its own follow-up
        self.queue.extendleft(reversed([*events]))

    def restart(self, hosts: Iterable[str], *, ended_boot_id: str | None = None) -> None:
        """The partition was taken again: observe levels again, for each of its `hosts`. `ended_boot_id`: the last
        manager worked in this boot, which has ended; None: nothing new is known. What was set aside waits for its time.
        """
        self.ended_boot_id = ended_boot_id or self.ended_boot_id
        hosts = dict.fromkeys(hosts)
        self._reports = {key: report for key, report in self._reports.items() if key[0] in hosts}
        self.queue = edges(self.queue, self._retries)
        self.queue.extendleft(report for report in self._reports.values() if not self._retries.has(report))
        self.extend(m.Reschedule(host=host) for host in hosts)

    def answered(self) -> set[tuple[type[m.Event], AllocationKey, Token]]:
        """The commands whose end is queued: kind, allocation and token."""
        return {
            (type(event), event.allocation, event.token)
            for event in chain(self.queue, self._retries)
            if isinstance(event, m.Prepared | m.Unprepared)
        }

    def deaths(self) -> set[AllocationKey]:
        """The allocations whose owner's death is queued."""
        return {event.allocation for event in chain(self.queue, self._retries) if isinstance(event, m.OwnerDied)}

    def forget(self, host: str) -> None:
        """A host is not served any more: drop its drivers' last reports."""
        self._reports = {key: report for key, report in self._reports.items() if key[0] != host}
