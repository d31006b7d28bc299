"""The partition processor: takes a partition by fencing, replays the ledger, and runs the cycle (cycle.py) from there.

When the cycle meets trouble the partition is taken anew, unless somebody else has taken it meanwhile. The processor
decides nothing about allocations, and knows no driver.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from datetime import datetime

import anyio
from msgspec import UNSET, structs

from outfitter_proto.bus import Bus, BusAuthorizationError, BusConfigurationError, BusError, Entry, Writer
from outfitter_proto.codec import encode
from outfitter_proto.names import Topics, transactional_id
from outfitter_proto.records import AllocationState, Checkpoint, Host
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import Ledger
from outfitter_service.metrics import Metrics, StateCounts
from outfitter_service.runtime.changelog.restore import Restored, discard, restore, rivals_since, unchanged
from outfitter_service.runtime.changelog.shape import Ground
from outfitter_service.runtime.changelog.snapshots import Snapshots
from outfitter_service.runtime.changelog.topic_watch import TopicWatch
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota
from outfitter_service.runtime.drivers.pool import DriverCalls
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.input_reader import Cursor, InputReader
from outfitter_service.runtime.input.lookahead import LookAhead
from outfitter_service.runtime.input.scope import HostScope, Scope
from outfitter_service.runtime.liveness.process_watch import ProcessWatch
from outfitter_service.runtime.liveness.tracker import LivenessTracker
from outfitter_service.runtime.outage_log import OutageLog
from outfitter_service.runtime.processor.batch_limits import BatchLimits
from outfitter_service.runtime.processor.commit_loop import CommitLoop, RecycledError
from outfitter_service.runtime.processor.event_queue import EventQueue, Wakeup
from outfitter_service.runtime.processor.reporting import CommitReporter
from outfitter_service.runtime.processor.station import Limits, Station, StopRequest

__all__ = ["ForeignManagerError", "Limits", "Processor"]

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
LOOK_WITHIN_S = 20.0
"""A host's transactions are ended by the broker sooner: 5 s, and at most 10 until it looks for such."""
SEEN_S = 60.0
"""How long what was read before the fence counts after it: no longer than tombstones stay, whoever makes the topic."""
AHEAD_SHARE = 32
"""What checkpoints say of hosts that are ahead takes at most such a part of a ledger batch."""
SUPERSEDED_LEASE_S = 30.0
"""The lease that an older incarnation without any gets when a newer one registers and none is configured."""


class ForeignManagerError(RuntimeError):
    """Another manager works for this writer, or for its hosts: this one gives up instead of fencing back."""


class Processor:
    """Serves the hosts of one remit from one partition of the bus."""

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
        drivers: DriverCalls,
        partitions: int | None = None,
        scope: Scope | None = None,
        still_mine: Callable[[], Awaitable[bool]] | None = None,
        clock: Clock = SYSTEM,
        owner_watch: Callable[..., ProcessWatch] = ProcessWatch,
        outage: OutageLog | None = None,
    ) -> None:
        """`partitions` is the number by which `partition` is the remit's; left out: whatever it is at the start.
        `scope` left out: that of the identity's host. `still_mine` is asked before the partition is taken anew; left
        out, the ledger is: whoever wrote to it since then works here now. `outage` says what the manager's
        log has of its bus; left out: this processor's own."""
        if scope is None:
            if identity.host is None:
                raise ValueError("an identity without a host needs a remit")
            scope = HostScope(identity.host, identity.writer)
        place: dict[str, str | int] = {"host": identity.host} if identity.host else {"partition": partition}
        self._identity = transactional_id(identity.cluster, identity.writer)
        self._since = clock.utc()
        self._still_mine = still_mine
        self._outage = outage or OutageLog(clock)
        self._activity = f"answering registrations of partition {partition}"
        self._stop = StopRequest()
        self._wakeup = Wakeup()
        self._ground = Ground(
            bus,
            topics,
            partition,
            identity=identity,
            scope=scope,
            partitions=partitions,
            history=limits.history is not None,
            adopt=limits.adopt,
        )
        self._cycle: CommitLoop | None = None
        self._seen: tuple[Restored, float, datetime] | None = None
        self._seen_commit: int | None = None
        self._tenure: str | None = None
        self._doing = "taking the partition"
        self.ledger = Ledger()
        self.ready = False
        self.served = anyio.Event()
        """Set once registrations have been answered."""
        self.neighbours: dict[bytes, bytes] = {}
        """The records of the partition's other hosts, as they were when it was taken."""
        self.event_queue = EventQueue(clock, self._wakeup)
        self.liveness = LivenessTracker(
            bus,
            topics.registrations,
            partition,
            identity=identity,
            grace_s=limits.lease_grace_s,
            default_lease_s=rules.lease_s or SUPERSEDED_LEASE_S,
            wake=self._wakeup.set,
            clock=clock,
            owner_watch=owner_watch,
        )
        self.input_reader = InputReader(
            bus,
            topics.registrations,
            partition,
            wake=self._wakeup.set,
            healed=self.liveness.renew_all,
            outage=self._outage,
            most=limits.read_ahead,
        )
        self.lookahead = LookAhead(
            bus,
            topics.registrations,
            partition,
            scope,
            self.input_reader,
            wake=self._wakeup.set,
            quiet_limit=limits.quiet_limit,
        )
        self._station = Station(
            bus=bus,
            topics=topics,
            partition=partition,
            identity=identity,
            scope=scope,
            rules=rules,
            limits=limits,
            metrics=metrics,
            clock=clock,
            drivers=drivers,
            wakeup=self._wakeup,
            event_queue=self.event_queue,
            liveness=self.liveness,
            input_reader=self.input_reader,
            lookahead=self.lookahead,
            batch_limits=BatchLimits(records=limits.batch_records, max_bytes=rules.max_bytes),
            dead_letter_quota=DeadLetterQuota(clock.monotonic),
            naming=DeadLetterQuota(clock.monotonic),
            snapshots=Snapshots(identity.writer, identity.instance, limits.history),
            reporter=CommitReporter(metrics, **place),
        )
        self._topic_watch = TopicWatch(self._ground, self.input_reader, self._station.snapshots, every_s=limits.look_s)
        self._log = self._station.reporter.log

    # --- from outside ---

    @property
    def instance(self) -> str:
        """The manager that this is, as in checkpoints."""
        return self._station.identity.instance

    @property
    def position(self) -> int:
        """The input's next offset after all that is committed."""
        return self._cycle.place.position if self._cycle is not None else 0

    @property
    def condition(self) -> str:
        """What it does, for people: why registrations are not answered, if they are not."""
        if self.ready:
            return "serving"
        if self._cycle is not None and self.input_reader.obstacle is not None:
            return f"cannot read registrations: {self.input_reader.obstacle}"
        return self._doing

    def standing(self) -> StateCounts:
        """What the gauges of state show now."""
        liveness, station = self.liveness, self._station
        oldest = self._cycle.oldest() if self._cycle is not None else None
        waits = station.clock.utc().timestamp() - oldest.timestamp_ms / 1000 if oldest is not None else 0.0
        return structs.replace(
            station.reporter.state_gauges.standing(self.ledger),
            watched_owners=liveness.watched,
            polled_owners=liveness.polled,
            unwatched_owners=liveness.unwatched,
            leases=len(liveness.leases),
            lag=self.input_reader.lag(self.position),
            oldest_unanswered_s=max(0.0, waits),
        )

    def stop(self, *, parting: bool = True) -> None:
        """Finish the commit under way, say in the ledger that nobody manages the hosts now (unless not `parting`: a
        successor is expected), and return from `run`."""
        self._stop.ask(parting=parting)
        self._wakeup.set()

    async def let_go(self) -> None:
        """Hold nothing large any more, once `run` has ended. What is cancelled stays in tracebacks, and the collector
        would come to those, with all that has lived for long, after days."""
        self._seen = None
        self.input_reader.clear()
        self.lookahead.reset(Cursor(topic_id="", position=0))
        self.liveness.leases.clear()
        self._station.reporter.state_gauges.replay({})
        await discard(self.ledger)

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ForeignManagerError: another manager works for this writer or for its hosts.
            LedgerRefusedError: the ledger cannot be worked on by this version.
            TopicsChangedError: the topics are other ones than those that the ledger was written for.
            BusConfigurationError: the file of a bus on this machine is another one than before.
        """
        delay = FIRST_DELAY_S
        clock = self._station.clock
        try:
            await self._look_before_fencing()
            if self._still_mine is not None:
                # the ledger may be long, and this process may have slept over it
                await self._wait_while_not_mine()
            while not self._stop.asked:
                served_since = clock.monotonic()
                trouble = await self._serve()
                recycled = isinstance(trouble, RecycledError)
                # the file of a local bus was removed or replaced: what comes next would be another ledger
                final = self._station.bus.local and isinstance(trouble, BusConfigurationError)
                if trouble is not None and not recycled and not final:
                    self._outage.met(self._activity, trouble)
                self._set_ready(False)
                if trouble is None:
                    return
                self._doing = f"taking the partition anew, since {trouble}"
                if final:
                    raise trouble
                if recycled or clock.monotonic() - served_since > LONGEST_DELAY_S:
                    delay = FIRST_DELAY_S
                if recycled:
                    self._say("taking the partition anew", reason=str(trouble))
                del trouble  # its traceback holds all that the tenure worked with
                await self._pause(delay)
                delay = min(delay * 2, LONGEST_DELAY_S)
                await self._wait_while_not_mine()
        finally:
            self._set_ready(False)
            self._outage.drop(self._activity)
            self.liveness.close()

    async def _pause(self, delay: float) -> None:
        with anyio.move_on_after(delay * random.uniform(0.5, 1.5)):  # noqa: S311 - jitter, not a secret
            await self._stop.wait()

    async def _wait_while_not_mine(self) -> None:
        """After having served: look before fencing back."""
        if self._still_mine is None:
            await self._refuse_if_replaced()
            return
        while not self._stop.asked and not await self._still_mine():
            await self._pause(FIRST_DELAY_S)

    # --- taking the partition ---

    async def _look_before_fencing(self) -> None:
        """A machine that must not serve these hosts does not disturb the one that does."""
        clock = self._station.clock
        at, at_utc = clock.monotonic(), clock.utc()
        try:
            await self._ground.look()
            seen = await self._look(taking=self._identity)
            if seen is not None:
                self._refuse_foreign(seen)
                await self._ground.judge(seen, taken=False)
                self._seen = seen, at, at_utc
        except BusError as error:
            # taking the partition meets that again
            self._log.debug("cannot look before the partition is taken", error=str(error))

    async def _look(self, *, taking: str | None = None) -> Restored | None:
        """What the ledger says, before anybody is fenced; None where it cannot be read: taking the partition meets that
        again, and says so. A transaction of this very writer is no reason to wait for long: taking the partition ends
        it. With `taking` it is none at all: a crash leaves one open, and whoever comes next begins at once."""
        station = self._station
        ledger = station.topics.allocations
        end = 0
        try:
            with anyio.move_on_after(LOOK_WITHIN_S) as waiting:
                end = await station.bus.stable_end(ledger, station.partition, taking=taking)
            if waiting.cancelled_caught:
                self._log.warning("the ledger's end stays undecided, taking the partition", after_s=LOOK_WITHIN_S)
                return None
            return await restore(station.bus, ledger, station.partition, station.scope, end=end)
        except BusError:
            return None

    async def _serve(self) -> BusError | None:
        """Take the partition and work until something fails (returned) or it is over (None)."""
        station = self._station
        written = station.topics.written(history=station.limits.history is not None)
        try:
            await self._ground.look()
            writer = await station.bus.open_writer(self._identity, station.partition, topics=written)
        except BusError as error:
            self._seen = None  # who knows what becomes of the topic meanwhile
            return error
        self._tenure = writer.tenure
        async with writer:
            try:
                restored = await self._restore_what_was_seen() or await self._restore()
                self._refuse_foreign(restored)
                await self._ground.judge(restored, taken=True)
                if self._still_mine is None:
                    self._refuse_successor(restored)
                if restored.checkpoint is None:
                    restored = await self._announce(writer) or restored
                place = await self._adopt(restored)
                most = await self._batch_bytes(writer)
            except BusError as error:
                return error
            cycle = self._cycle = CommitLoop(
                station,
                writer,
                self.ledger,
                place,
                shape=self._ground.shape,
                since=self._since,
                stop=self._stop,
                batch_bytes=most,
            )
            try:
                async with anyio.create_task_group() as tasks:
                    self.input_reader.reset(place.position)
                    self.lookahead.reset(place, room=most // AHEAD_SHARE)
                    tasks.start_soon(self.input_reader.run)
                    tasks.start_soon(self.input_reader.measure)
                    if station.scope.host is None:
                        tasks.start_soon(self.lookahead.run)
                    tasks.start_soon(self.liveness.listen)
                    tasks.start_soon(self.liveness.look)
                    tasks.start_soon(self._look_for_rivals, cycle.first_commit, restored.end)
                    tasks.start_soon(self._topic_watch.run, place, self._ground.shape)
                    trouble = await cycle.run(self._set_ready)
                    tasks.cancel_scope.cancel()
            finally:
                if cycle.opened:
                    self._seen_commit = self.ledger.commits
            return trouble

    async def _batch_bytes(self, writer: Writer) -> int:
        """What one commit may write: as the writer says, and no more than is taken by the topics that it writes to."""
        station = self._station
        most = writer.max_batch_bytes
        for name in station.topics.written(history=station.limits.history is not None):
            try:
                limit = (await station.bus.topic(name)).config.get("max.message.bytes")
            except BusAuthorizationError:
                continue  # the commit says which right is missing: who may write may look
            if limit is not None and name != station.topics.dead_letters:
                # a batch has headers, and a step in history is more than its record
                most = min(most, int(limit) * 15 // 16)
        return most

    async def _restore_what_was_seen(self) -> Restored | None:
        """What the look before the fence has read, if nothing was written since: a long ledger is replayed once."""
        if self._seen is None:
            return None
        (seen, at, at_utc), self._seen = self._seen, None
        station = self._station
        # both clocks: one stands still while the machine is suspended, the other may be set
        if station.clock.monotonic() - at > SEEN_S or abs((station.clock.utc() - at_utc).total_seconds()) > SEEN_S:
            return None
        return await unchanged(station.bus, station.topics.allocations, station.partition, station.scope, seen)

    async def _restore(self) -> Restored:
        station = self._station
        return await restore(station.bus, station.topics.allocations, station.partition, station.scope)

    async def _look_for_rivals(self, opened: anyio.Event, end: int) -> None:
        """Two managers of different scopes that start at the same moment do not see each other before they have
        written: look once more after the first commit, from the `end` of what was read before it."""
        station = self._station
        await opened.wait()
        try:
            found = await rivals_since(station.bus, station.topics.allocations, station.partition, station.scope, end)
        except BusError as error:
            self._log.debug("cannot look for managers of the other scope", error=str(error))
            return
        self._refuse_rivals(found)

    async def _announce(self, writer: Writer) -> Restored | None:
        """A host that is new to the ledger is named there before the ledger is read for where its input begins: so the
        sweeper knows of it, or it knows of what the sweeper has claimed (roll.py)."""
        host = self._station.identity.host
        if host is None:
            return None
        now = self._station.clock.utc()
        named = Host(host=host, manager=self._station.identity.manager(self._since), since=now)
        await writer.commit([(self._station.topics.allocations, [Entry(named.key.encode(), encode(named))])])
        if writer.tainted:
            raise RecycledError("a request to the bus was retried: the writer is replaced")
        restored = await self._restore()
        self._refuse_foreign(restored)
        return restored

    async def _refuse_if_replaced(self) -> None:
        """Look before fencing back, unless nobody can have taken over: the ledger may be long, and a transaction that
        failed is open in it until it has timed out. What cannot be read now is looked at again once the partition is
        taken."""
        if self._seen_commit is None or await self._is_held():
            return
        seen = await self._look()
        if seen is not None:
            self._refuse_successor(seen)

    async def _is_held(self) -> bool:
        """Whether the bus says that nobody has taken the writer identity since this one did."""
        try:
            return self._tenure is not None and await self._station.bus.tenure(self._identity) == self._tenure
        except BusError:
            return False

    def _refuse_successor(self, restored: Restored) -> None:
        """Somebody who wrote since this one did works here now, and goes on when it finds itself fenced by mistake."""
        identity, found = self._station.identity, restored.checkpoint
        if self._seen_commit is None or found is None or found.instance == identity.instance:
            return
        if found.commit > self._seen_commit:
            raise ForeignManagerError(
                f"another manager (instance {found.instance}, machine {found.machine_id or 'unknown'}) has taken over "
                f"host {identity.host!r} at {found.at:%Y-%m-%dT%H:%M:%SZ}; this one gives up"
            )

    def _refuse_foreign(self, restored: Restored) -> None:
        identity = self._station.identity
        self._refuse_rivals(restored.rivals)
        found = restored.checkpoint
        mine = identity.machine_id
        if identity.host is None or found is None or self._station.limits.take_over:
            return
        if not (mine and found.machine_id) or found.machine_id == mine:
            return
        raise ForeignManagerError(
            f"the ledger of host {identity.host!r} was written by machine {found.machine_id}, this is {mine}: "
            "two machines must not serve one host's name. If that machine is gone for good, start with --take-over; "
            "else give this one another --host"
        )

    def _refuse_rivals(self, rivals: list[str]) -> None:
        identity = self._station.identity
        if rivals:
            raise ForeignManagerError(
                f"the ledger in {self._station.topics.allocations}/{self._station.partition} is written by "
                f"{', '.join(rivals[:3])} as well: managers of host scope and of cluster scope must not share topics. "
                f"This one ({identity.writer}, {identity.scope} scope) gives up; give it another --cluster, or stop "
                "the others and make the topics anew"
            )

    async def _adopt(self, restored: Restored) -> Cursor:
        """Make a replayed ledger the state; return where the input goes on."""
        station, event_queue = self._station, self.event_queue
        # emptied, and not only let go of: an error of the last tenure may be kept, whose traceback has it
        await discard(self.ledger)
        self.neighbours.clear()
        self.ledger, self.neighbours = restored.ledger, restored.neighbours
        found = restored.checkpoint
        self._seen_commit = self.ledger.commits
        station.reporter.replayed(self.ledger)
        station.metrics.restore_seconds.set(restored.seconds)
        station.metrics.restored_records.set(restored.records)
        station.snapshots.adopt(found)
        station.scope.note_growth(UNSET)
        event_queue.boot_ended(self._ended_boot(found))
        # levels are observed anew: the last inventories, and the command that each unfinished record implies
        own = station.identity.host
        hosts = [own] if own is not None else list(self.ledger.hosts)
        event_queue.restart(hosts)
        await self.liveness.restart(self.ledger, event_queue.ended_boot_id, told=event_queue.deaths())
        station.drivers.leave_all_but(hosts)
        for host in hosts:
            station.drivers.serve(host)
        answered = event_queue.answered()
        for record in self.ledger.allocations.values():
            token = record.token or 0
            if record.state == AllocationState.PREPARING and (m.Prepared, record.key, token) not in answered:
                station.drivers.perform(m.Prepare(allocation=record.key, token=token), record)
            elif record.state == AllocationState.RELEASING and (m.Unprepared, record.key, token) not in answered:
                station.drivers.perform(m.Unprepare(allocation=record.key, token=token), record)
        self._say(
            "ledger replayed",
            records=restored.records,
            allocations=len(self.ledger.allocations),
            seconds=round(restored.seconds, 3),
            commit=self.ledger.commits,
        )
        topic_id = (await station.bus.topic(station.topics.registrations)).id
        base = (found.input.base or 0) if found is not None else 0
        if found is not None and found.input.topic_id == topic_id:
            here = found.input
            station.scope.note_growth(found.grown)
            ahead = {host.encode(): offset for host, offset in (here.ahead or {}).items()}
            return Cursor(topic_id=topic_id, position=here.to, base=base, begin=here.begin or 0, ahead=ahead)
        if found is not None:
            base += found.input.reach
            station.input_lost(f"the registrations topic is another one than before (it was {found.input.topic_id})")
        earliest, _ = await station.bus.offsets(station.topics.registrations, station.partition)
        swept = restored.swept.input if found is None and own is not None and restored.swept is not None else None
        if swept is not None and swept.topic_id == topic_id:
            # what comes before had no manager, and is the sweeper's to answer
            earliest = max(earliest, swept.claimed or swept.to)
            return Cursor(topic_id=topic_id, position=earliest, base=base, begin=earliest)
        return Cursor(topic_id=topic_id, position=earliest, base=base)

    def _ended_boot(self, found: Checkpoint | None) -> str | None:
        """The boot in which the last manager worked, if it was another one and is known to be over: of this very
        machine, or of one that is gone for good."""
        identity = self._station.identity
        if found is None or found.boot_id == identity.boot_id or identity.boot_id is None:
            return None
        same = identity.machine_id is not None and found.machine_id == identity.machine_id
        return found.boot_id if same or self._station.limits.take_over else None

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            if ready:
                self.served.set()
            self._station.metrics.partition_ready.labels(str(self._station.partition)).set(ready)
            if not ready and self._outage.on and not self._stop.asked:
                self._outage.met(self._activity, self.condition)
            self._say("ready" if ready else "not ready")
        if ready:
            self._outage.passed(self._activity)

    def _say(self, event: str, **details: object) -> None:
        """A line, unless it is part of an outage, of which there is one already."""
        (self._log.debug if self._outage.on else self._log.info)(event, **details)
