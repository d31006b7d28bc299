"""A tenure: the time for which one manager holds a partition's writer. It goes on with the ledger, and works."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

import anyio
from msgspec import UNSET

from outfitter_proto.bus import BusAccessError, BusError, Writer
from outfitter_proto.bus.reading import MARKERS_WAIT_S, fetch_what_is_left
from outfitter_proto.records import FINAL_STATES, NO_TOKEN, Allocation, Checkpoint
from outfitter_service.core import model as m
from outfitter_service.core.decide import implied
from outfitter_service.runtime.changelog.restore import Restored
from outfitter_service.runtime.changelog.topic_watch import TopicWatch
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.processor.commit_loop import CommitLoop
from outfitter_service.runtime.processor.equipment import Equipment
from outfitter_service.runtime.processor.takeover import Takeover

AHEAD_SHARE = 32
"""A checkpoint has so many hosts that are ahead as fit into this part of a decision's bytes."""
HISTORY_FETCHES = 5
"""How often a manager that starts looks for the first record of history, which markers may precede."""
GIVEN_BACK_WITHIN = timedelta(minutes=1)
"""How long a manager has for giving back what drivers have set aside for a worker that went without a grant."""
_ANSWERS = {m.Prepare: m.Prepared, m.Unprepare: m.Unprepared}
"""The event that ends each command."""


class Tenure:
    """One tenure of a processor."""

    def __init__(self, equipment: Equipment, takeover: Takeover, writer: Writer, restored: Restored) -> None:
        """`writer`: has fenced its earlier holder. `restored`: the ledger as it was after that."""
        self._equipment = equipment
        self._assignment = equipment.assignment
        self._takeover = takeover
        self._writer = writer
        self._restored = restored
        self._ledger = restored.ledger
        self._checkpoint = restored.checkpoint

    # --- resuming the work ---

    async def resume(self) -> CommitLoop:
        """Make the ledger the state, and continue the work of the last tenure. Returns the loop, for `run`.

        Raises:
            BusError: the bus did not answer.
        """
        equipment, ledger = self._equipment, self._ledger
        await self._observe_again()
        equipment.log(
            "ledger replayed",
            records=self._restored.records,
            allocations=len(ledger.allocations),
            seconds=round(self._restored.seconds, 3),
            commit=ledger.commits,
        )
        await self._takeover.warn_of_other_names(self._restored)
        cursor = await self._cursor()
        equipment.signs_of_life.begin()
        equipment.orders.begin()
        orders = self._checkpoint.orders if self._checkpoint is not None else UNSET
        return CommitLoop(equipment, self._writer, ledger, cursor, equipment.topic_check.layout, orders=orders)

    async def _observe_again(self) -> None:
        """Observe levels again (inventories, liveness, offers), and issue the command of each unfinished record."""
        equipment, ledger = self._equipment, self._ledger
        event_queue, drivers = equipment.event_queue, equipment.drivers
        equipment.reporter.replayed(self._restored)
        equipment.snapshots.resume(self._checkpoint)
        await self._check_history()
        own = self._assignment.identity.host
        hosts = [own] if own is not None else list(ledger.hosts)
        event_queue.restart(hosts, ended_boot_id=self._ended_boot())
        await equipment.liveness.restart(ledger, event_queue.ended_boot_id, handed_out=event_queue.deaths())
        drivers.stop_hosts_except(hosts)
        for host in hosts:
            drivers.start_host(host)
        answered = event_queue.answered()
        for record in ledger.allocations.values():
            command = implied(record)
            if command is not None and (_ANSWERS[type(command)], record.key, record.token or NO_TOKEN) not in answered:
                drivers.perform(command, record)
        drivers.see_restored(
            record
            for record in ledger.allocations.values()
            if not (record.state in FINAL_STATES and was_long_ended(record, self._checkpoint, self._last_start(record)))
        )
        drivers.see_ledger(ledger.allocations.values())
        drivers.warn_of_other_drivers(ledger.allocations.values())

    def _last_start(self, record: Allocation) -> datetime | None:
        """When the last manager of a record's host started."""
        host = self._ledger.hosts[record.host].record
        return host.manager.since if host is not None else None

    async def _check_history(self) -> None:
        """Begin a snapshot if history has nothing: the topic was recreated while nobody served.

        If that cannot be seen at once, because a transaction is open or a right on history is missing (managers need
        none to read it), the next snapshot comes when it is due.
        """
        snapshots = self._equipment.snapshots
        with suppress(BusAccessError):
            if snapshots.expected and await self._history_is_empty():
                snapshots.restart()

    async def _history_is_empty(self) -> bool:
        """Whether history certainly has no record. A topic that has only markers looks empty to readers alone."""
        bus, topic, partition = self._assignment.bus, self._assignment.topics.history, self._assignment.partition
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

    def _ended_boot(self) -> str | None:
        """The boot in which the last manager worked, if it has certainly ended. It was an earlier boot of this machine,
        or a boot of a machine that is gone for good. Else None."""
        identity, last = self._assignment.identity, self._checkpoint
        if last is None or last.boot_id == identity.boot_id or identity.boot_id is None:
            return None
        same = identity.machine_id is not None and last.machine_id == identity.machine_id
        return last.boot_id if same or self._equipment.limits.take_over else None

    async def _cursor(self) -> Cursor:
        """The position at which the input continues."""
        assignment, last = self._assignment, self._checkpoint
        bus, registrations = assignment.bus, assignment.topics.registrations
        topic_id = (await bus.topic(registrations)).id
        base = (last.input.base or 0) if last is not None else 0
        if last is not None and last.input.topic_id == topic_id:
            read = last.input
            ahead = {host.encode(): offset for host, offset in (read.ahead or {}).items()}
            return Cursor(topic_id=topic_id, position=read.to, base=base, begin=read.begin or 0, ahead=ahead)
        if last is not None:
            base += last.input.reach
            self._equipment.lose_input(f"the registrations topic was replaced (its id was {last.input.topic_id})")
        earliest, _ = await assignment.input_bounds()
        is_new = last is None and assignment.identity.host is not None
        swept = self._restored.swept if is_new else None
        ledger_id = (await bus.topic(assignment.topics.allocations)).id if swept is not None else ""
        if swept is not None and swept.input.topic_id == topic_id and swept.ledger_id in (UNSET, ledger_id):
            # no manager served earlier messages, and the sweeper answers them
            earliest = max(earliest, swept.input.claimed or swept.input.to)
            return Cursor(topic_id=topic_id, position=earliest, base=base, begin=earliest)
        return Cursor(topic_id=topic_id, position=earliest, base=base)

    # --- working ---

    async def work(self, loop: CommitLoop, ready: Callable[[bool], None]) -> BusError | None:
        """Work until something fails or the manager has stopped in order. Returns the error, or None. `ready` is as in
        `CommitLoop.run`."""
        equipment, cursor = self._equipment, loop.cursor
        inputs, liveness = equipment.inputs, equipment.liveness
        watch = TopicWatch(
            self._assignment,
            equipment.topic_check,
            inputs.reader,
            equipment.snapshots,
            every_s=equipment.limits.look_s,
        )
        async with anyio.create_task_group() as tasks:
            inputs.reset(cursor, room=equipment.rules.max_bytes // AHEAD_SHARE)
            tasks.start_soon(inputs.reader.run)
            tasks.start_soon(inputs.end.run)
            if self._assignment.scope.host is None:
                tasks.start_soon(inputs.lookahead.run)
            tasks.start_soon(liveness.listen)
            tasks.start_soon(liveness.poll_owners)
            tasks.start_soon(self._takeover.check_for_rivals, loop.first_commit, self._restored.end)
            tasks.start_soon(watch.run, cursor, equipment.topic_check.layout)
            tasks.start_soon(equipment.signs_of_life.run)
            tasks.start_soon(equipment.orders.run)
            await equipment.orders.first_look()
            trouble = await loop.run(ready)
            tasks.cancel_scope.cancel()
        if trouble is None and equipment.stop.mark_stopped:
            await equipment.signs_of_life.end(equipment.instruments.clock.utc())
        return trouble


def was_long_ended(record: Allocation, last: Checkpoint | None, started: datetime | None) -> bool:
    """Whether the last manager, which `started` then, had time to give back what drivers had set aside for an ended
    worker. Else each start would ask the drivers about all ended workers that the ledger still has."""
    begun = record.since if started is None else max(record.since, started)
    return last is not None and begun < last.at - GIVEN_BACK_WITHIN
