"""One incarnation's session: register, follow the record, keep the lease, deregister.

`RuntimeContext` and the command line use it. It runs on its caller's event loop, writes to an `AllocationWatch` and
knows neither threads nor operators.

    async with connect(url) as bus, WorkerSession(bus, registration) as session:
        record = await session.wait()
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Self

import anyio

from outfitter.errors import AllocationEndedError, LeaseLostError, NoManagerError, WaitedTooLongError
from outfitter.session import choosing, status
from outfitter.session.heartbeats import RETRY_BACKOFF_S, LeaseKeeper
from outfitter.session.host_partition import HostPartition
from outfitter.session.manager_lookup import ManagerLookup
from outfitter.session.outage_log import WorkerOutageLog
from outfitter.session.record_reader import RecordReader
from outfitter.session.watch import AllocationWatch
from outfitter_proto import codec, keys, names
from outfitter_proto.bus.port import (
    Bus,
    BusError,
    BusUnavailableError,
    Entry,
    TopicLayout,
    UnknownTopicError,
)
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Deregister,
    Heartbeat,
    ManagerIdentity,
    ReasonCode,
    Register,
    Registration,
)
from outfitter_proto.support.backoff import Backoff
from outfitter_proto.support.causes import side_by_side

MANAGER_PATIENCE = 4.0
"""Seconds without an answer to the acknowledged registration after which the session concludes that no manager is
there. Seconds for which the bus holds the session back do not count here, nor below."""

LOOKUP_WITHIN = 1.5
"""The last seconds of `MANAGER_PATIENCE`, in which the session looks up the managers of other hosts."""

LOOK_AGAIN = 5.0
"""Seconds between two looks whether a manager that has not answered still lives, and time limit of the first. A look
that was too slow gets twice the time when it is repeated."""

DEREGISTER_WITHIN = 3.0
"""Time limit of deregistering in seconds. If it fails, the lease or the owner's death ends the allocation."""

VERDICT_GRACE = 10.0
"""Seconds after `wait_s`, which counts from the registration, for which the session still waits for the manager's own
verdict, whatever the manager does."""

_TOPIC_POLL = 0.2
_FOLLOWING = "following the allocation"

log = logging.getLogger("outfitter")


class WorkerSession:
    """One registration from start to end. Enter it to register, leave it to deregister; once only.

    Args:
        bus: started; the session does not close it.
        registration: the request; its host, worker and incarnation identify the session.
        cluster: the manager's cluster.
        allocation_watch: gets the records; by default a new one.
        attach: follow an allocation that another process registered and keeps alive. Publish nothing.
        registered: another session has registered this incarnation, so that `deregister` counts even before `open`.
        manager_patience: seconds without an answer after which `wait` raises `NoManagerError`; None: never.
        waits_on: wait for longer than that while the manager shows that it lives.
        on_lease_at_risk: called once each time the lease of granted devices gets at risk, instead of a log line. It
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
        registered: bool = False,
        manager_patience: float | None = MANAGER_PATIENCE,
        waits_on: bool = True,
        on_lease_at_risk: Callable[[LeaseLostError], object] | None = None,
    ) -> None:
        self.allocation_watch = allocation_watch or AllocationWatch()
        self.registration = registration
        self._bus = bus
        self._cluster = cluster
        self._topics = names.topics(cluster)
        self._attach = attach
        self._patience = None if attach else manager_patience
        self._waits_on = waits_on
        self._on_lease_at_risk = on_lease_at_risk
        self._leaving_reason: str | None = None
        self.key = keys.allocation_key(registration.host, registration.worker, registration.incarnation)
        """The allocation's."""
        self._outage_log = WorkerOutageLog(self.key, self.allocation_watch.lease.clock)
        self._host_partition = HostPartition(bus, self._topics, registration.host, worker=self.key)
        self._records = RecordReader(self._host_partition, self.allocation_watch, registration, attach=attach)
        self._registered = registered
        self.is_left_registered = False
        """`deregister` has failed; see `late_deregistration`."""
        self._until = math.inf
        self._running: AbstractAsyncContextManager[None] | None = None

    @property
    def record(self) -> Allocation | None:
        """The newest record of this incarnation, None before the first."""
        return self.allocation_watch.read().record

    @property
    def watcher(self) -> ManagerIdentity | Checkpoint | None:
        """Who says which processes the manager can watch; None before the first answer's commit was read."""
        return self._records.watcher

    # --- the context manager --------------------------------------------------------------------------

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
            async with side_by_side() as group:
                group.start_soon(self.follow)
                if not self._attach:
                    group.start_soon(self.keep_lease)
                try:
                    yield
                except Exception as error:  # noqa: BLE001  # carried out of the task group, which would wrap it
                    failure = error
                group.cancel_scope.cancel()
        except anyio.get_cancelled_exc_class():
            self._leaving_reason = self._leaving_reason or "cancelled"
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self.deregister()
                await self.aclose()
        if failure is not None:
            raise failure

    # --- its steps, for single use ----------------------------------------------------------------------

    async def open(self) -> None:
        """Register, or find the allocation to attach to.

        Raises:
            BusError: see the bus port. Call `deregister` afterwards: the registration may be published nevertheless.
            AllocationEndedError: there is no allocation to attach to.
            NoManagerError, WaitedTooLongError: there is no such cluster.
        ChoiceIgnoredError: the manager would grant any device.
        """
        if self.registration.wait_s is not None and not self._attach:
            self._until = anyio.current_time() + self.registration.wait_s + VERDICT_GRACE
        self._host_partition.assign(await self._ledger_layout())
        if self._attach:
            await self._host_partition.open(start=None)
            await self._attach_to_record()
            return
        await choosing.check_manager(self._bus, self._cluster, self.registration, self._host_partition.count)
        # The answer comes after the ledger's current end, so the session reads from there.
        _, end = await self._bus.offsets(self._topics.allocations, self._host_partition.number)
        await self._host_partition.open(start=end)
        self._registered = True
        self.allocation_watch.lease.begin(self.allocation_watch.lease.clock())
        await self._publish(self.registration)

    async def wait(self) -> Allocation:
        """Wait for the grant and return the record.

        A worker that was frozen or cut off may read a grant late. If the lease is at risk by then, the session waits
        until the manager has confirmed the grant.

        Raises:
            NoManagerError: no manager answered in time.
            AllocationFailedError, AllocationEndedError: the final answer; the former has subclasses.
        ChoiceIgnoredError: the granted devices are not those that the registration asks for.
            WaitedTooLongError: the manager gave no verdict in time.
        """
        with anyio.CancelScope(deadline=self._until):
            if self._patience is not None:
                await self._await_manager(self._patience)
            return await self._await_verdict()
        lookup = self._lookup()
        with anyio.move_on_after(LOOKUP_WITHIN):
            await lookup.run_own(self._host_partition.count)
        raise self._waited_too_long(lookup.end_of_manager())

    async def confirm(self) -> Allocation | None:
        """Register again, wait until the manager has decided that, and return the newest record. `follow` must run."""
        await self._publish(self.registration)
        while self.allocation_watch.lease.claimed and not self.allocation_watch.read().over:
            await self.allocation_watch.changed(self.allocation_watch.read().version)
        return self.record

    async def follow(self) -> None:
        """Post each new record of this incarnation to the watch, until one is final. Once the bus has answered, any
        trouble with the ledger is an outage: heartbeats go on, and the worker hears of it before its lease ends."""
        backoff, has_fetched = Backoff(*RETRY_BACKOFF_S), False
        while not self.allocation_watch.read().over:
            try:
                await self._records.fetch()
                if self._records.new_manager and self._registered and not self._is_answered:
                    await self._publish(self.registration)
                self._records.answer_new_manager()
                if self._records.has_answered:  # an empty fetch does not show that the bus works
                    backoff.reset()
                    has_fetched = True
                    self._outage_log.passed(_FOLLOWING)
            except BusError as error:
                if not has_fetched and not isinstance(error, BusUnavailableError):
                    self.allocation_watch.close(error)
                    return
                self._outage_log.met(_FOLLOWING, error)
                await anyio.sleep(backoff.next_delay())

    async def keep_lease(self) -> None:
        """Send heartbeats until the record is final, and report it when they do not get through."""
        beat = functools.partial(self._publish, Heartbeat(**self._identity))
        await LeaseKeeper(
            self.allocation_watch, beat, self._register_again, self._on_lease_at_risk, self._outage_log
        ).run()

    def leave_because(self, reason: str | None) -> None:
        """Set the reason that `deregister` gives; None: `finished`. Call it before leaving, from any thread."""
        self._leaving_reason = reason

    async def deregister(self, reason: str | None = None) -> bool:
        """Deregister, within `DEREGISTER_WITHIN`. An unreachable bus raises nothing.

        Returns whether the manager will see it. Otherwise the lease or the owner's death ends the allocation, or a
        deregistration that comes late.
        """
        snapshot = self.allocation_watch.read()
        self.allocation_watch.close()
        if not self._registered or (snapshot.ended and not self._records.registered_anew):
            return True
        self._registered = False
        try:
            await self.publish_deregistration(reason)
        except (BusError, TimeoutError) as error:
            self.is_left_registered = True
            why = str(error) or f"no answer within {DEREGISTER_WITHIN:g} s"
            log.warning("%s: could not deregister: %s", self.key, why)
            return False
        return True

    async def publish_deregistration(self, reason: str | None = None) -> None:
        """Publish the deregistration, within `DEREGISTER_WITHIN`.

        Raises:
            BusError: see the bus port.
            TimeoutError: the bus did not answer.
        """
        reason = (reason or self._leaving_reason or "finished")[:200]
        with anyio.fail_after(DEREGISTER_WITHIN):
            await self._publish(Deregister(**self._identity, reason=reason))

    async def aclose(self) -> None:
        """Close the reader. Repeatable."""
        await self._host_partition.aclose()

    # --- inside ------------------------------------------------------------------------------------------

    @property
    def _identity(self) -> dict[str, str]:
        registration = self.registration
        return {"host": registration.host, "worker": registration.worker, "incarnation": registration.incarnation}

    @property
    def _is_answered(self) -> bool:
        return self.allocation_watch.read().answered

    async def _ledger_layout(self) -> TopicLayout:
        """The ledger's layout. A missing topic means that there is no manager yet, so wait for it too."""
        patience = 0.0 if self._attach else self._patience
        deadline = math.inf if patience is None else self._bus.patience.now() + patience
        while True:
            try:
                info = await self._bus.topic(self._topics.allocations)
                return TopicLayout(info.id, info.partitions)
            except UnknownTopicError as error:
                why = f"there is no cluster {self._cluster!r} on {self._bus.url}"
                if self._bus.patience.now() >= deadline:
                    raise NoManagerError(
                        f"no manager answers for host {self.registration.host!r}: {why}; "
                        f"start one with `outfitter serve --host {self.registration.host}`"
                    ) from error
                if anyio.current_time() >= self._until:
                    raise self._waited_too_long(why) from error
            await anyio.sleep(_TOPIC_POLL)

    def _waited_too_long(self, why: str | None) -> WaitedTooLongError:
        clause = f": {why}" if why else ""
        return WaitedTooLongError(
            f"no verdict on {self.key} within {self.registration.wait_s:g} s{clause}",
            code=ReasonCode.WAITED_TOO_LONG,
            record=self.record,
        )

    async def _publish(self, message: Registration) -> None:
        entry = Entry(self.registration.host.encode(), codec.encode(message))
        await self._records.check_partition()
        if not isinstance(message, Register):
            await self._bus.publish(self._topics.registrations, self._host_partition.number, entry)
            return
        sent_at = self.allocation_watch.lease.clock()
        with self._records.registering():
            offset = await self._bus.publish(self._topics.registrations, self._host_partition.number, entry)
        self._records.claim(sent_at, offset)

    async def _register_again(self) -> None:
        """Register again where a heartbeat proves nothing. If the allocation stands, the manager publishes its record
        again.

        Before that, read all that was committed at the first call. An ended allocation must not be registered again,
        and the manager deletes its record some time after the end. May be cancelled and called again.
        """
        await self._records.wait_until_caught_up()
        lease = self.allocation_watch.lease
        if not self.allocation_watch.read().over and lease.unconfirmed and not lease.claimed_lately:
            await self._publish(self.registration)

    async def _attach_to_record(self) -> None:
        """Read the ledger to its current end, which has the record of the allocation to attach to."""
        await self._records.read_to(await self._host_partition.stable_end())
        if self.record is None:
            raise AllocationEndedError(
                f"there is no allocation {self.key} on {self._bus.url}: it has ended, or was never registered there"
            )

    async def _await_manager(self, patience: float) -> None:
        """Wait for the first record of any state; look up managers if none comes. While the host's manager shows that
        it lives, go on: its machine may be slow. Say so once, and once more when it gives no signs of life. While the
        ledger cannot be read, or the bus holds us back, nobody's silence means anything."""
        lookup, is_said, is_silence_said, within = self._lookup(), False, False, LOOK_AGAIN
        async with anyio.create_task_group() as group:
            with suppress(TimeoutError), self._bus.patience.limit(patience):
                with suppress(TimeoutError), self._bus.patience.limit(max(0.0, patience - LOOKUP_WITHIN)):
                    await self._first_answer()
                if not self._is_answered:
                    group.start_soon(lookup.run, self._host_partition.count)
                    await self._first_answer()
            group.cancel_scope.cancel()
        while self._waits_on and not self._is_answered:
            if not lookup.own_was_read:  # it was too slow
                await self._look(lookup.run_own, within=within)
                within *= 2
            sign = lookup.sign_of_life() if lookup.own_was_read else "the ledger cannot be read now"
            if sign is None or self._is_answered:
                break
            if not is_said:
                is_said = True
                log.warning("%s: no answer for %g s, and waits on: %s", self.key, patience, sign)
            if not is_silence_said and (end := lookup.end_of_manager()) is not None:
                is_silence_said = True
                log.warning("%s: still no answer: %s", self.key, end)
            with suppress(TimeoutError), self._bus.patience.limit(LOOK_AGAIN):
                await self._first_answer()
            lookup = self._lookup()
        if not self._is_answered:
            if is_said:  # the error names the other hosts as well
                await self._look(lookup.run, within=LOOKUP_WITHIN)
            self._leaving_reason = "no manager"
            error = lookup.error()
            if isinstance(error, NoManagerError):
                error.add_note("RuntimeContext(wait_for_manager=True) waits for one")
            raise error

    def _lookup(self) -> ManagerLookup:
        return ManagerLookup(self._bus, self._cluster, self.registration.host)

    async def _look(self, look_up: Callable[[int], Awaitable[None]], *, within: float) -> None:
        """Look managers up for so many seconds, or until there is an answer."""
        async with anyio.create_task_group() as group:

            async def end_with_answer() -> None:
                await self._first_answer()
                group.cancel_scope.cancel()

            group.start_soon(end_with_answer)
            with suppress(TimeoutError), self._bus.patience.limit(within):
                await look_up(self._host_partition.count)
            group.cancel_scope.cancel()

    async def _first_answer(self) -> None:
        while not self._is_answered:
            await self.allocation_watch.changed(self.allocation_watch.read().version)

    async def _await_verdict(self) -> Allocation:
        snapshot = self.allocation_watch.read()
        while True:
            if snapshot.error is not None:
                raise snapshot.error
            if snapshot.record is not None:
                refusal = status.refusal(snapshot.record)
                if refusal is None and not self.allocation_watch.lease.at_risk:
                    if not self._attach:
                        choosing.check_grant(self.registration, snapshot.record)
                    return snapshot.record
                if refusal is not None and status.status_of(snapshot.record) is not status.AllocationStatus.WAITING:
                    raise refusal
            snapshot = await self.allocation_watch.changed(snapshot.version)
