"""The manager's internal events that wait for a decision: reports, deaths, timers, ends of commands.

An event stays here, or with the commit that includes it, until that commit has returned. When the partition is taken
again, levels are observed again (inventories, the queue). Edges, which happen once, are kept (deaths, commands' ends).
The queue decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

import anyio
from msgspec import Struct

from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Note, Token
from outfitter_service.core import model as m
from outfitter_service.runtime.clock import Clock

RETRY_AFTER_S = 30.0


class DelayedEvents:
    """Events that are tried again later, each once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_at: dict[m.Event, float] = {}

    def __iter__(self) -> Iterator[m.Event]:
        return iter(self._due_at)

    def add_if_edge(self, event: m.Event) -> None:
        """Keep an event if it is an edge, which nothing repeats."""
        if isinstance(event, m.OwnerDied | m.OwnerUnwatched | m.Prepared | m.Unprepared | m.DriverRetry):
            self._due_at[event] = self._clock.monotonic() + RETRY_AFTER_S

    def due(self) -> list[m.Event]:
        """Remove and return the events whose time has come. An event that fails again must be kept again."""
        now = self._clock.monotonic()
        events = [event for event, at in self._due_at.items() if at <= now]
        for event in events:
            del self._due_at[event]
        return events


def edges(queued: Iterable[m.Event], delayed: Iterable[m.Event]) -> deque[m.Event]:
    """The queued events that nothing observes again when the partition is taken again. Each death once, and none that
    is `delayed`."""
    deaths = {event.allocation for event in delayed if isinstance(event, m.OwnerDied)}
    unique: dict[object, m.Event] = {}
    for event in queued:
        if isinstance(event, m.OwnerDied):
            if event.allocation not in deaths:
                unique.setdefault((m.OwnerDied, event.allocation), event)
        elif not isinstance(event, m.DriverReport | m.Reschedule | m.LeaseExpired | m.OwnerUnwatched | m.Tick):
            unique[event] = event
    return deque(unique.values())


class Wakeup:
    """One task waits for it, and everybody may set it. If it is set while nobody waits, the next wait ends at once."""

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
    """A request to stop after one last commit. `mark_stopped`: that commit says that nobody manages the hosts."""

    def __init__(self) -> None:
        self.mark_stopped = True
        self._requested = anyio.Event()

    def request(self, *, mark_stopped: bool) -> None:
        self.mark_stopped = mark_stopped
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    async def wait(self) -> None:
        await self._requested.wait()


class NotCommittedError(Exception):
    """A submitted event is in no commit, and the manager does not try it again for the submitter."""


class Submission(Struct, gc=False):
    """A submitted event. `ended` is set once its commit has returned, or it was given up (`problem` says why)."""

    event: m.Event
    ended: anyio.Event
    problem: str | None = None


class Submissions:
    """Who waits for the commits of which events. Events are told apart by identity: two equal ones are two."""

    def __init__(self) -> None:
        self._waiting: dict[int, Submission] = {}
        self._closed: str | None = None

    def __iter__(self) -> Iterator[m.Event]:
        """The events that are in no commit yet."""
        return (submission.event for submission in self._waiting.values())

    async def wait(self, event: m.Event) -> None:
        """Wait for the commit of a queued event.

        Raises:
            NotCommittedError: it was given up.
        """
        submission = Submission(event, anyio.Event())
        self._waiting[id(event)] = submission
        try:
            if self._closed is not None:
                raise NotCommittedError(self._closed)
            await submission.ended.wait()
        finally:
            self._waiting.pop(id(event), None)
        if submission.problem is not None:
            raise NotCommittedError(submission.problem)

    def end(self, events: Iterable[m.Event], *, problem: str | None = None) -> None:
        """The commit of these events has returned, or they were given up because of `problem`."""
        for event in events if self._waiting else ():
            submission = self._waiting.get(id(event))
            if submission is not None and not submission.ended.is_set():
                submission.problem = problem
                submission.ended.set()

    def close(self, problem: str) -> None:
        """Nothing more is decided: give up whatever waits, and whatever is submitted later."""
        self._closed = problem
        self.end([*self], problem=problem)


class EventQueue:
    """`queue` is in order. `retries` are tried again later. `notes` go into history with the next commit.
    `ended_boot_id`: the boot in which the last manager worked, until all deaths by its end are decided. `wakeup` is set
    when there is something to decide or to settle. `submissions`: who waits for an event's commit."""

    def __init__(self, clock: Clock, wakeup: Wakeup) -> None:
        self.queue: deque[m.Event] = deque()
        self.submissions = Submissions()
        self.retries = DelayedEvents(clock)
        self.notes: list[Note] = []
        self.ended_boot_id: str | None = None
        self._reports: dict[tuple[str, str], m.DriverReport] = {}
        self._delays: dict[AllocationKey, m.ReleaseDelayed] = {}
        self.wakeup = wakeup

    def add(self, event: m.Event) -> None:
        """Queue an event, and wake the loop up. A new inventory replaces one that still waits, and so does the reason
        of a delayed release: so repeated reports during an outage need no memory."""
        before = self._replaced(event)
        if before is not None:
            for index, queued in enumerate(self.queue):
                if queued is before:
                    self.queue[index] = event
                    return
        self.queue.append(event)
        self.wakeup.set()

    async def submit(self, event: m.Event) -> None:
        """Queue an event, and wait for the commit that includes it. It is for callers that may answer only once their
        change is committed, such as an HTTP route. It waits through failed commits and while the partition is taken
        again. If the caller is cancelled, the event stays queued.

        Raises:
            NotCommittedError: the manager has stopped, or could not commit this event.
        """
        self.queue.append(event)
        self.wakeup.set()
        await self.submissions.wait(event)

    def _replaced(self, event: m.Event) -> m.Event | None:
        """The earlier event that this one replaces, if it may still be queued."""
        before: m.Event | None = None
        match event:
            case m.DriverReport():
                before = self._reports.get((event.host, event.resource))
                self._reports[event.host, event.resource] = event
                return None if event.asked else before
            case m.ReleaseDelayed():
                before = self._delays.get(event.allocation)
                self._delays[event.allocation] = event
            case m.Unprepared():
                self._delays.pop(event.allocation, None)
        return before

    def extend(self, events: Iterable[m.Event]) -> None:
        """Queue events from the commit loop itself, which needs no wake-up."""
        self.queue.extend(events)

    def pop(self) -> m.Event:
        """Remove and return the next event. It comes back only by `give_back`."""
        return self.queue.popleft()

    def note(self, note: Note) -> None:
        """Keep a note for the history of the next commit."""
        self.notes.append(note)

    def notes_written(self, count: int) -> None:
        """The first `count` notes are committed."""
        del self.notes[:count]

    def boot_ended(self, boot_id: str | None) -> None:
        """The last manager worked in this boot, which has ended. None: nothing new is known."""
        self.ended_boot_id = boot_id or self.ended_boot_id

    def boot_judged(self) -> None:
        """All deaths by the end of that boot are committed."""
        self.ended_boot_id = None

    def give_back(self, events: Iterable[m.Event], *, but: Iterable[m.Event]) -> None:
        """The commit that included `events` failed: put them first again, and remove its follow-ups (`but`)."""
        removed = {id(event) for event in but}
        if removed:
            self.queue = deque(event for event in self.queue if id(event) not in removed)
        # only now, because an unfinished event is its own follow-up
        self.queue.extendleft(reversed([*events]))

    def restart(self, hosts: Iterable[str]) -> None:
        """The partition was taken again: observe levels again, for each of its hosts."""
        hosts = dict.fromkeys(hosts)
        self._reports = {key: report for key, report in self._reports.items() if key[0] in hosts}
        self.queue = edges(self.queue, self.retries)
        kept = {id(event) for event in self.queue}
        self.queue.extend(event for event in self.submissions if id(event) not in kept)
        self.queue.extendleft(self._reports.values())
        self.queue.extend(m.Reschedule(host=host) for host in hosts)

    def answered(self) -> set[tuple[type[m.Event], AllocationKey, Token]]:
        """The commands whose end is queued: kind, allocation and token."""
        return {
            (type(event), event.allocation, event.token)
            for event in chain(self.queue, self.retries)
            if isinstance(event, m.Prepared | m.Unprepared)
        }

    def deaths(self) -> set[AllocationKey]:
        """The allocations whose owner's death is queued."""
        return {event.allocation for event in chain(self.queue, self.retries) if isinstance(event, m.OwnerDied)}

    def forget(self, host: str) -> None:
        """A host is not served any more."""
        self._reports = {key: report for key, report in self._reports.items() if key[0] != host}
