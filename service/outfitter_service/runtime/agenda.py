"""What happened inside a manager and is to be decided: reports, deaths, timers, ends of commands.

An event stays here, or with the commit that includes it, until that commit has returned. When the partition is taken
anew, levels are observed again (inventories, the queue) and edges that nobody says twice are kept (deaths, commands'
ends). It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from outfitter_proto.records import Note
from outfitter_service.core import model as m
from outfitter_service.runtime.bell import Bell
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.retries import Retries, edges


class Agenda:
    """`queue` is in order. `retries` are tried again later, `notes` are for the history with the next commit.
    `ended_boot_id` is the boot in which the last manager worked, as long as deaths by its end may be undecided."""

    def __init__(self, clock: Clock, bell: Bell) -> None:
        self.queue: deque[m.Event] = deque()
        self.retries = Retries(clock)
        self.notes: list[Note] = []
        self.ended_boot_id: str | None = None
        self._reports: dict[tuple[str, str], m.DriverReport] = {}
        self._delays: dict[str, m.ReleaseDelayed] = {}
        self._bell = bell

    def add(self, event: m.Event) -> None:
        """Queue an event, and ring for it. An inventory that nobody has looked at yet is replaced by the next one, and
        so are a driver's words: drivers that report again and again while the bus is away pile up nothing."""
        before = self._replaced(event)
        if before is not None:
            for place, queued in enumerate(self.queue):
                if queued is before:
                    self.queue[place] = event
                    return
        self.queue.append(event)
        self._bell.ring()

    def _replaced(self, event: m.Event) -> m.Event | None:
        """What an event says anew, if that may still be in the queue."""
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

    def give_back(self, events: Iterable[m.Event], *, but: Iterable[m.Event]) -> None:
        """The commits that included `events` failed: they come first again, without what those commits led to."""
        self.queue.extendleft(reversed([*events]))
        gone = {id(event) for event in but}
        if gone:
            self.queue = deque(event for event in self.queue if id(event) not in gone)

    def restart(self, hosts: Iterable[str]) -> None:
        """The partition was taken anew: levels are observed anew, for each of its hosts."""
        hosts = dict.fromkeys(hosts)
        self._reports = {place: report for place, report in self._reports.items() if place[0] in hosts}
        self.queue = edges(self.queue, self.retries)
        self.queue.extendleft(self._reports.values())
        self.queue.extend(m.Reschedule(host=host) for host in hosts)

    def answered(self) -> set[tuple[type[m.Event], str, int]]:
        """The commands whose ends are here: kind, allocation and token."""
        return {
            (type(event), event.allocation, event.token)
            for event in chain(self.queue, self.retries)
            if isinstance(event, m.Prepared | m.Unprepared)
        }

    def deaths(self) -> set[str]:
        """The allocations whose owners' deaths are here."""
        return {event.allocation for event in chain(self.queue, self.retries) if isinstance(event, m.OwnerDied)}

    def forget(self, host: str) -> None:
        """A host is not served any more."""
        self._reports = {key: report for key, report in self._reports.items() if key[0] != host}
