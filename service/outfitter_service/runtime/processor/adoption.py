"""Adopts a restored ledger as a processor's state, and continues the commands of the last tenure."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from msgspec import UNSET, Struct

from outfitter_proto.bus import BusAccessError
from outfitter_proto.bus.reading import MARKERS_WAIT_S, fetch_what_is_left
from outfitter_proto.records import FINAL_STATES, NO_TOKEN, Allocation, Checkpoint
from outfitter_service.core import model as m
from outfitter_service.core.decide import implied
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.processor.event_queue import EventQueue
from outfitter_service.runtime.processor.reporting.reporter import CommitReporter
from outfitter_service.runtime.processor.settlement import InputLoss

HISTORY_FETCHES = 5
"""How often a manager that starts looks for the first record of history, which markers may precede."""
GIVEN_BACK_WITHIN = timedelta(minutes=1)
"""How long a manager has for giving back what drivers have set aside for a worker that went without a grant."""
_ANSWERS = {m.Prepare: m.Prepared, m.Unprepare: m.Unprepared}
"""The event that ends each command."""


class Adoption(Struct, frozen=True):
    """Begins the tenures of one processor. `take_over`: the machine that wrote the ledger before is gone for good."""

    assignment: Assignment
    event_queue: EventQueue
    liveness: LivenessTracker
    drivers: DriverCalls
    reporter: CommitReporter
    snapshots: Snapshots
    input_loss: InputLoss
    take_over: bool

    async def restart(self, restored: Restored) -> None:
        """Observe levels again (inventories, liveness, offers), and issue the command of each unfinished record.

        Raises:
            BusError: the bus did not answer.
        """
        ledger, event_queue = restored.ledger, self.event_queue
        self.reporter.replayed(restored)
        self.snapshots.adopt(restored.checkpoint)
        await self._check_history()
        self.assignment.scope.note_growth(UNSET)
        own = self.assignment.identity.host
        hosts = [own] if own is not None else list(ledger.hosts)
        event_queue.restart(hosts, ended_boot_id=self._ended_boot(restored.checkpoint))
        await self.liveness.restart(ledger, event_queue.ended_boot_id, handed_out=event_queue.deaths())
        self.drivers.stop_hosts_except(hosts)
        for host in hosts:
            self.drivers.start_host(host)
        answered = event_queue.answered()
        for record in ledger.allocations.values():
            command = implied(record)
            if command is not None and (_ANSWERS[type(command)], record.key, record.token or NO_TOKEN) not in answered:
                self.drivers.perform(command, record)
            if not (record.state in FINAL_STATES and was_long_ended(record, restored.checkpoint)):
                self.drivers.see_restored(record)
        self.drivers.warn_of_other_drivers(ledger.allocations.values())

    async def _check_history(self) -> None:
        """Begin a snapshot if history has nothing: the topic was recreated while nobody served.

        If that cannot be seen at once, because a transaction is open or a right on history is missing (managers need
        none to read it), the next snapshot comes when it is due.
        """
        with suppress(BusAccessError):
            if self.snapshots.expected and await self._history_is_empty():
                self.snapshots.restart()

    async def _history_is_empty(self) -> bool:
        """Whether history certainly has no record. A topic that has only markers looks empty to readers alone."""
        bus, topic, partition = self.assignment.bus, self.assignment.topics.history, self.assignment.partition
        start, end = await bus.offsets(topic, partition)
        if start == end:
            return True
        async with await bus.open_reader(topic, partition, start=None, committed=True) as reader:
            for _ in range(HISTORY_FETCHES):
                if await fetch_what_is_left(reader, max_records=1, timeout=MARKERS_WAIT_S):
                    return False
                if reader.position >= end:
                    return True
        return False

    async def cursor(self, restored: Restored) -> Cursor:
        """The position at which the input continues.

        Raises:
            BusError: the bus did not answer.
        """
        assignment, last = self.assignment, restored.checkpoint
        bus, registrations = assignment.bus, assignment.topics.registrations
        topic_id = (await bus.topic(registrations)).id
        base = (last.input.base or 0) if last is not None else 0
        if last is not None and last.input.topic_id == topic_id:
            read = last.input
            assignment.scope.note_growth(last.grown)
            ahead = {host.encode(): offset for host, offset in (read.ahead or {}).items()}
            return Cursor(topic_id=topic_id, position=read.to, base=base, begin=read.begin or 0, ahead=ahead)
        if last is not None:
            base += last.input.reach
            self.input_loss.accept(f"the registrations topic was replaced (its id was {last.input.topic_id})")
        earliest, _ = await assignment.input_bounds()
        is_new = last is None and assignment.identity.host is not None
        swept = restored.swept if is_new else None
        ledger_id = (await bus.topic(assignment.topics.allocations)).id if swept is not None else ""
        if swept is not None and swept.input.topic_id == topic_id and swept.ledger_id in (UNSET, ledger_id):
            # no manager served earlier messages, and the sweeper answers them
            earliest = max(earliest, swept.input.claimed or swept.input.to)
            return Cursor(topic_id=topic_id, position=earliest, base=base, begin=earliest)
        return Cursor(topic_id=topic_id, position=earliest, base=base)

    def _ended_boot(self, last: Checkpoint | None) -> str | None:
        """The boot in which the last manager worked, if it has certainly ended. It was an earlier boot of this machine,
        or a boot of a machine that is gone for good. Else None."""
        identity = self.assignment.identity
        if last is None or last.boot_id == identity.boot_id or identity.boot_id is None:
            return None
        same = identity.machine_id is not None and last.machine_id == identity.machine_id
        return last.boot_id if same or self.take_over else None


def was_long_ended(record: Allocation, last: Checkpoint | None) -> bool:
    """Whether the last manager had time to give back what drivers had set aside for an ended worker. Else each start
    would ask the drivers about all ended workers that the ledger still has."""
    return last is not None and record.since < last.at - GIVEN_BACK_WITHIN
