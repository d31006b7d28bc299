"""One incarnation's conversation with its manager: register, follow the record, keep the lease, deregister.

The asynchronous engine under `RuntimeContext` and the command line. It runs on the event loop of whoever
enters it and leaves everything it learns on a `AllocationWatch`; it knows neither threads nor operators.

    async with connect(url) as bus, WorkerSession(bus, registration) as session:
        record = await session.wait()
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from outfitter.errors import AllocationEndedError, LeaseLostError, NoManagerError, WaitedTooLongError
from outfitter.session import status
from outfitter.session.heartbeats import RETRY_DELAYS, LeaseKeeper
from outfitter.session.manager_lookup import ManagerLookup
from outfitter.session.outage_log import WorkerOutageLog
from outfitter.session.watch import AllocationWatch
from outfitter_proto import codec, names
from outfitter_proto.bus.port import (
    Bus,
    BusAccessError,
    BusError,
    BusUnavailableError,
    Entry,
    Message,
    OffsetOutOfRangeError,
    Reader,
    UnknownTopicError,
)
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import (
    Allocation,
    AllocationState,
    Checkpoint,
    Deregister,
    Heartbeat,
    Host,
    LedgerRecord,
    ManagerIdentity,
    Register,
    Registration,
)

MANAGER_PATIENCE = 4.0
"""Seconds from the acknowledged registration until nobody answering means that there is no manager."""

SURVEY_WITHIN = 1.5
"""The last seconds of that patience, in which the other hosts' managers are looked up."""

DEREGISTER_WITHIN = 3.0
"""Seconds that leaving may take; what cannot be said by then, the lease or the owner's death will say."""

VERDICT_GRACE = 10.0
"""Seconds after `wait_s` in which the manager's own verdict is awaited before giving up without one."""

LOOK_S = 30.0
"""How often a session that says nothing looks whether its host has another partition now. Before it says something it
looks each time: what is said in the wrong partition is heard by nobody."""

_FETCH_TIMEOUT = 5.0
_TOPIC_POLL = 0.2
_CAUGHT_UP_POLL = 0.02
_FOLLOWING = "following the allocation"

log = logging.getLogger("outfitter")


class WorkerSession:
    """A registration and what follows from it. Enter it to start, leave it to deregister; once only.

    Args:
        bus: started, and left open.
        registration: what is asked for; its host, worker and incarnation say who asks.
        attach: follow the allocation that somebody else registered and keeps alive; nothing is ever published.
        manager_patience: seconds after which a missing answer raises `NoManagerError` in `wait`; None: never.
        heartbeats: keep the lease alive.
        on_lease_at_risk: called once each time the lease of this worker's devices gets at risk, instead of the log;
            must not block.
    """

    def __init__(
        self,
        bus: Bus,
        registration: Register,
        *,
        cluster: str = names.DEFAULT_CLUSTER,
        allocation_watch: AllocationWatch | None = None,
        attach: bool = False,
        manager_patience: float | None = MANAGER_PATIENCE,
        heartbeats: bool = True,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None = None,
    ) -> None:
        self.allocation_watch = allocation_watch or AllocationWatch()
        self.registration = registration
        self.leaving_reason: str | None = None
        """What `deregister` will say (default: `finished`); set it before leaving."""
        self._bus = bus
        self._cluster = cluster
        self._topics = names.topics(cluster)
        self._attach = attach
        self._patience = None if attach else manager_patience
        self._heartbeats = heartbeats and not attach
        self._on_lease_at_risk = on_lease_at_risk
        self._key = names.allocation_key(registration.host, registration.worker, registration.incarnation).encode()
        self._host_key = names.host_key(registration.host).encode()
        self._greeted: set[str] = set()
        self._owed = False
        self._catch_up_to: int | None = None
        self._registering = False
        self._reached = 0
        self._fetching_since = self._fetched_before = 0.0
        self._watcher: ManagerIdentity | Checkpoint | None = None
        self._left_out: set[str] = set()
        self._forgotten = False
        self._trouble = WorkerOutageLog(self._key.decode(), self.allocation_watch.lease.clock)
        self._partitions = 0
        self._partition = 0
        self._checkpoint_keys: frozenset[bytes] = frozenset()
        self._read_partition = 0
        self._looked_at = 0.0
        self._reader: Reader | None = None
        self._registered = False
        self._running: AbstractAsyncContextManager[None] | None = None

    @property
    def record(self) -> Allocation | None:
        """The newest record of this incarnation, None before the first."""
        return self.allocation_watch.read().record

    # --- the whole, as a context manager --------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._running = self._run()
        await self._running.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._running is None:
            raise RuntimeError("the session was never entered")
        return await self._running.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def _run(self) -> AsyncIterator[None]:
        failure: Exception | None = None
        try:
            await self.open()
            async with anyio.create_task_group() as group:
                group.start_soon(self.follow)
                if self._heartbeats:
                    group.start_soon(self.keep_lease)
                try:
                    yield
                except Exception as error:  # noqa: BLE001  # carried out of the task group, which would wrap it
                    failure = error
                group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self.leaving_reason = self.leaving_reason or "cancelled"
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self.deregister()
                await self.aclose()
        if failure is not None:
            raise failure

    # --- the parts, for whoever needs them one by one ---------------------------------------------------

    async def open(self) -> None:
        """Register, or find the allocation to attach to.

        Raises:
            BusError: see the bus port; the registration may be out nevertheless, so `deregister` after it.
            AllocationEndedError: nothing to attach to.
        """
        topic = self._topics.allocations
        self._partitions = await self._partition_count()
        self._find_place()
        self._read_partition = self._partition
        self._looked_at = anyio.current_time()
        if self._attach:
            self._reader = await self._bus.open_reader(topic, self._partition, start=None, committed=True)
            await self._catch_up(await self._bus.stable_end(topic, self._partition))
            return
        # The answer cannot stand before where the ledger ends now: nothing else has to be read.
        _, end = await self._bus.offsets(topic, self._partition)
        self._reader = await self._bus.open_reader(topic, self._partition, start=end, committed=True)
        self._registered = True
        self.allocation_watch.lease.begin(self.allocation_watch.lease.clock())
        await self._publish(self.registration)

    async def wait(self) -> Allocation:
        """Wait until the devices are this worker's, and return the record.

        A grant that may be over already is not believed before the manager has confirmed it: one that was read late,
        by a worker that was frozen or cut off since it was heard last.

        Raises:
            NoManagerError: nobody answered in time.
            AllocationFailedError, AllocationEndedError: the final answer; see the kinds of the former.
            WaitedTooLongError: the manager did not say so itself in time.
        """
        if self._patience is not None:
            await self._await_manager(self._patience)
        limit = self.registration.wait_s
        with anyio.move_on_after(None if limit is None else limit + VERDICT_GRACE):
            return await self._await_verdict()
        raise WaitedTooLongError(f"no verdict on {self._key.decode()} within {limit:g} s", record=self.record)

    async def follow(self) -> None:
        """Put each new record of this incarnation on the board, until it is final."""
        attempt, heard = 0, False
        while not self._over:
            try:
                await self._fetch()
                if self._owed and self._registered and not self._answered:
                    await self._publish(self.registration)
                self._owed = False
                attempt, heard = 0, True
                self._trouble.passed(_FOLLOWING)
            except (BusUnavailableError, BusAccessError) as error:
                if isinstance(error, BusAccessError) and not heard:  # never was allowed to: nothing will come
                    self.allocation_watch.close(error)
                    return
                self._trouble.met(_FOLLOWING, error)
                await anyio.sleep(RETRY_DELAYS[min(attempt, len(RETRY_DELAYS) - 1)])
                attempt += 1
            except BusError as error:
                self.allocation_watch.close(error)
                return

    async def keep_lease(self) -> None:
        """Send heartbeats until the record is final, and say so when they do not get through."""
        beat = functools.partial(self._publish, Heartbeat(**self._identity))
        await LeaseKeeper(self.allocation_watch, beat, self._ask, self._on_lease_at_risk, self._trouble).run()

    async def deregister(self, reason: str | None = None) -> bool:
        """Give everything back; never raises for a bus that is away, and takes at most `DEREGISTER_WITHIN`.

        Returns whether the manager will hear of it; without, the lease or the owner's death ends the allocation.
        """
        snapshot = self.allocation_watch.read()
        self.allocation_watch.close()
        if not self._registered or (snapshot.ended and not self._forgotten):
            return True
        self._registered = False
        try:
            with anyio.fail_after(DEREGISTER_WITHIN):
                await self._publish(
                    Deregister(**self._identity, reason=(reason or self.leaving_reason or "finished")[:200])
                )
        except (BusError, TimeoutError) as error:
            why = str(error) or f"no answer within {DEREGISTER_WITHIN:g} s"
            log.warning("%s: could not deregister: %s", self._key.decode(), why)
            return False
        return True

    async def aclose(self) -> None:
        """Let go of the reader. Repeatable."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.aclose()

    # --- inside ------------------------------------------------------------------------------------------

    @property
    def _identity(self) -> dict[str, str]:
        asked = self.registration
        return {"host": asked.host, "worker": asked.worker, "incarnation": asked.incarnation}

    @property
    def _over(self) -> bool:
        return self.allocation_watch.read().over

    @property
    def _answered(self) -> bool:
        snapshot = self.allocation_watch.read()
        return snapshot.record is not None or snapshot.error is not None

    async def _partition_count(self) -> int:
        """How many partitions there are. No topic yet means no manager yet: that, too, is waited for."""
        patience = 0.0 if self._attach else self._patience
        deadline = math.inf if patience is None else anyio.current_time() + patience
        while True:
            try:
                return (await self._bus.topic(self._topics.allocations)).partitions
            except UnknownTopicError as error:
                if anyio.current_time() >= deadline:
                    raise NoManagerError(
                        f"no manager answers for host {self.registration.host!r}: there is no cluster "
                        f"{self._cluster!r} on {self._bus.url}; "
                        f"start one with `outfitter serve --host {self.registration.host}`"
                    ) from error
            await anyio.sleep(_TOPIC_POLL)

    async def _publish(self, message: Registration) -> None:
        entry = Entry(self.registration.host.encode(), codec.encode(message))
        await self._look_at_partitions()
        if not isinstance(message, Register):
            await self._bus.publish(self._topics.registrations, self._partition, entry)
            return
        sent_at, self._reached, self._registering = self.allocation_watch.lease.clock(), 0, True
        try:
            offset = await self._bus.publish(self._topics.registrations, self._partition, entry)
        finally:
            self._registering = False
        self.allocation_watch.lease.claim(sent_at, offset)
        self._hear(self._reached)  # the answer may have overtaken the acknowledgement

    async def _ask(self) -> None:
        """Register again, for the lease is over: the manager publishes the record once more if the allocation stands.

        Not before all is read that was committed when this was called first. What has ended must not be registered
        anew, and the manager forgets it some time after its end. May be cancelled, and called again.
        """
        end = self._catch_up_to
        if end is None:
            end = self._catch_up_to = await self._bus.stable_end(self._topics.allocations, self._partition)
        while self._is_behind(end) and not self._over:  # noqa: ASYNC110  (told by nobody)
            await anyio.sleep(_CAUGHT_UP_POLL)
        if not self._over and not self.allocation_watch.lease.claimed_lately:
            await self._publish(self.registration)

    async def _look_at_partitions(self) -> None:
        """Find the host's partition anew: there may be more of them by now (`outfitter topics grow`)."""
        topic = self._topics.allocations
        shape = (await self._bus.shapes([topic])).get(topic)
        self._looked_at = anyio.current_time()
        if shape is not None and shape.partitions != self._partitions:
            log.info("%s: there are %d partitions now", self._key.decode(), shape.partitions)
            self._partitions = shape.partitions
            self._find_place()
            # what was said in another partition is not answered by what is read in this one
            self.allocation_watch.lease.withdraw_claims()
            self._catch_up_to = None

    def _find_place(self) -> None:
        self._partition = partition_of(self.registration.host, self._partitions)
        writers = names.host_writer(self.registration.host), names.partition_writer(self._partition)
        self._checkpoint_keys = frozenset(names.checkpoint_key(writer).encode() for writer in writers)

    async def _follow_to_partition(self) -> None:
        """Read on where the host's records are now, from the beginning."""
        reader = await self._bus.open_reader(self._topics.allocations, self._partition, start=None, committed=True)
        former, self._reader, self._read_partition = self._reader, reader, self._partition
        if former is not None:
            await former.aclose()

    async def _catch_up(self, end: int) -> None:
        while self._reader is not None and self._reader.position < end:
            await self._fetch()
        if self.record is None:
            raise AllocationEndedError(
                f"there is no allocation {self._key.decode()} on {self._bus.url}: "
                "it has ended, or was never registered there"
            )

    def _is_behind(self, end: int) -> bool:
        reader = self._reader
        return reader is not None and (self._read_partition != self._partition or reader.position < end)

    async def _fetch(self) -> None:
        if self._reader is None:
            raise RuntimeError("the session is not open")
        if anyio.current_time() - self._looked_at > LOOK_S:
            await self._look_at_partitions()
        if self._read_partition != self._partition:
            await self._follow_to_partition()
        self._fetched_before, self._fetching_since = self._fetching_since, self.allocation_watch.lease.clock()
        try:
            messages = await self._reader.fetch(timeout=_FETCH_TIMEOUT)
        except OffsetOutOfRangeError as error:
            # Compaction has passed us by; the first record there is for our key is newer than what we have.
            await self._reader.seek(error.start)
            self._catch_up_to = None
            return
        for message in messages:
            if message.key == self._key:
                if message.value is None:
                    await self._look_at_partitions()
                    if self._read_partition != self._partition:
                        return  # it is not deleted, but elsewhere
                self._take(message.value)
            elif message.key == self._host_key:
                self._take_host(_decoded(message))
            elif message.key in self._checkpoint_keys and self._listens:
                self._take_checkpoint(_decoded(message))

    def _take_host(self, record: LedgerRecord | None) -> None:
        """A manager that names itself before anybody has answered is told again: what was said when the host had no
        manager yet may have gone to the dead letters. Later on it may be one that sees other processes."""
        if not isinstance(record, Host):
            return
        manager = record.manager
        if self._answered:
            self._watcher = manager
            self._look_who_watches()
        elif manager.stopped_at is None:
            self._owed = self._owed or manager.instance not in self._greeted
            self._greeted.add(manager.instance)

    @property
    def _listens(self) -> bool:
        """Whether a checkpoint has something to tell. There is one in each commit, so most are passed over."""
        waits = self._registering or self.allocation_watch.lease.claimed or self._watcher is None
        return self._heartbeats and self.record is not None and waits

    def _take_checkpoint(self, record: LedgerRecord | None) -> None:
        """The end of a commit: who watches this process, and how far the manager had read when the record stood."""
        if not isinstance(record, Checkpoint):
            return
        if self._watcher is None:
            self._watcher = record
            self._look_who_watches()
        if record.input.partition == self._partition:
            self._reached = max(record.input.to, (record.input.ahead or {}).get(self.registration.host, 0))
            self._hear(self._reached)

    def _hear(self, reached: int) -> None:
        """The manager has read all before `reached`, and the record on the board stood."""
        if self.allocation_watch.lease.answer(reached):
            self._catch_up_to = None
            self.allocation_watch.touch()

    def _look_who_watches(self) -> None:
        """Whether the manager watches this process, as far as is known by now."""
        owner, record, lease = self.registration.owner, self.record, self.allocation_watch.lease
        if not self._heartbeats or owner is None or self._watcher is None:
            return
        watched = self._watcher.watches(owner) and not (record is not None and record.unwatched)
        if watched != lease.watched:
            lease.watched = watched
            self.allocation_watch.touch()

    def _take(self, value: bytes | None) -> None:
        if value is None:
            self.allocation_watch.close(
                AllocationEndedError(f"allocation {self._key.decode()} has ended", record=self.record)
            )
            return
        try:
            record = codec.decode_ledger(value, key=self._key)
        except codec.WireError as error:
            log.warning("skipped a record that cannot be read: %s", error)
            return
        if isinstance(record, Allocation):
            if self.record is not None and record.source != self.record.source:
                # the first life has ended so long ago that the manager has forgotten it
                self._forgotten = True
                why = f"allocation {record.key} had ended, and was registered anew"
                self.allocation_watch.close(AllocationEndedError(why, record=self.record))
                return
            if self._heartbeats:  # else it is somebody else's to keep, and silence of ours says nothing
                self._take_lease(record.request.lease_s)
            if record.warnings and self.record is None:
                log.warning("%s: %s", record.key, "; ".join(record.warnings))
            if record.state == AllocationState.PENDING:
                log.info("%s waits: %s", record.key, record.reason)
            self._say_left_out(record)
            self.allocation_watch.post(record)
            self._look_who_watches()

    def _say_left_out(self, record: Allocation) -> None:
        left_out = status.left_out(record)
        for name in left_out.keys() - self._left_out:
            log.warning("%s: variable %r of its record is not set: %s", record.key, name, left_out[name])
        self._left_out |= left_out.keys()

    def _take_lease(self, seconds: float | None) -> None:
        """How long the lease is. The manager may give one later on to a worker that asked for none: where it cannot
        watch the owner any more."""
        lease = self.allocation_watch.lease
        if seconds is not None and lease.seconds is None and self.record is not None:
            lease.begin(self._fetched_before)  # it was not there then, whatever the reader has fetched ahead
        lease.grant(seconds)

    async def _await_manager(self, patience: float) -> None:
        """Wait for the first record of any state; look around when it stays out."""
        survey = ManagerLookup(self._bus, self._cluster, self.registration.host)
        async with anyio.create_task_group() as group:
            with anyio.move_on_after(patience):
                with anyio.move_on_after(max(0.0, patience - SURVEY_WITHIN)):
                    await self._first_news()
                if not self._answered:
                    group.start_soon(survey.run, self._partitions)
                    await self._first_news()
            group.cancel_scope.cancel()
        if not self._answered:
            self.leaving_reason = "no manager"
            error = NoManagerError(f"no manager answers for host {self.registration.host!r}: {survey.describe()}")
            error.add_note("RuntimeContext(wait_for_manager=True) waits for one")
            raise error

    async def _first_news(self) -> None:
        while not self._answered:
            await self.allocation_watch.changed(self.allocation_watch.read().version)

    async def _await_verdict(self) -> Allocation:
        snapshot = self.allocation_watch.read()
        while True:
            if snapshot.error is not None:
                raise snapshot.error
            if snapshot.record is not None:
                refusal = status.refusal(snapshot.record)
                if refusal is None and not self.allocation_watch.lease.at_risk:
                    return snapshot.record
                if refusal is not None and status.standing(snapshot.record) is not status.AllocationStatus.WAITING:
                    raise refusal
            snapshot = await self.allocation_watch.changed(snapshot.version)


def _decoded(message: Message) -> LedgerRecord | None:
    """The record of a message that is not this worker's own; None where it was deleted or cannot be read."""
    try:
        return codec.decode_ledger(message.value, key=message.key) if message.value is not None else None
    except codec.WireError:
        return None


__all__ = ["MANAGER_PATIENCE", "WorkerSession"]
