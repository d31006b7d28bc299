"""The work of `outfitter-lease`: devices for the calling process, which it keeps without anybody's heartbeats.

The manager watches the caller, so its lease does not run and its end frees the devices. Where the manager cannot watch
it, nothing is leased.

Worker and incarnation are computed from the caller. If a call is killed before it can print, the next call of the same
process gets the same devices instead of further ones. Calls at the same time take turns.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable

import anyio
from msgspec import UNSET, Struct

from outfitter.errors import AllocationEndedError, AllocationFailedError
from outfitter.session.lease import boot_time
from outfitter.session.status import AllocationStatus, infos, refusal, status_of
from outfitter.session.worker_session import WorkerSession
from outfitter_drivers.api import ExternalResourceInfo
from outfitter_proto.records import FINAL_STATES, Allocation, Owner, ReasonCode, Register, ResourceRequest, Unwatched
from outfitter_proto.support.processes import start_ticks
from outfitter_service.cli._lib.holding.holder import Holder
from outfitter_service.cli._lib.holding.owner import OwnerProcess
from outfitter_service.cli._lib.holding.turns import turn
from outfitter_service.cli._lib.running.signals import Received, SignalFile
from outfitter_service.config import BusConnection
from outfitter_service.query import ledger_view
from outfitter_service.query.errors import OutfitterCliError

LEAVING_S = 1.0
"""Seconds of the caller's patience that are kept for deregistering."""
CONFIRMATIONS = 2
"""Answers after the grant by which the record says whether the owner is watched. The manager begins to watch after the
grant's commit, and the next commit may be under way by then."""

_UNANSWERED = "nobody has answered"
_OF_EARLIER_CALLS = frozenset({ReasonCode.WITHDRAWN, ReasonCode.DEREGISTERED, ReasonCode.WAITED_TOO_LONG})
"""Ends that an earlier call has caused while this one waited. This one gives up by itself, and before its deadline."""


class LeaseRequest(Struct, frozen=True):
    """What to lease: `amount` devices of `resource` for `owner`, waiting `wait_s` seconds since this process began."""

    where: BusConnection
    owner: OwnerProcess
    resource: str
    amount: int
    wait_s: float

    def registration(self, call: int) -> Register:
        """The registration of the owner's `call`-th request for this."""
        return Register(
            host=self.where.host,
            worker=worker_name(self.owner.identity, self.resource, self.amount),
            incarnation=f"call-{call}",
            resources={self.resource: ResourceRequest(amount=self.amount)},
            owner=self.owner.identity,
            wait_s=self.wait_s,
            heartbeats=False,
        )


def worker_name(owner: Owner, resource: str, amount: int) -> str:
    """A name that no other process has on any machine, in any boot and namespace, and the same in each call."""
    identity = (owner.boot_id, owner.pid_ns, owner.pid, owner.start_ticks, resource, amount)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:12]
    return f"{resource[:100]}-{owner.pid}-{digest}"


def missing(record: Allocation, *, is_kept: bool) -> str:
    """What was missing when the time was over. `is_kept`: an earlier call has got the devices."""
    if status_of(record) is not AllocationStatus.YOURS:
        return ledger_view.waiting_in_words(record)
    if is_kept:
        return "the caller has them from an earlier call, but the manager does not confirm it: see whether it runs"
    return "they were granted at the last moment, and are given back: raise --wait, or start this again"


def seconds_running() -> float:
    """How long ago this process was started, the interpreter's own start included."""
    started = start_ticks()
    if started is None:
        return 0.0
    return max(0.0, boot_time() - started / os.sysconf("SC_CLK_TCK"))


class Leasing:
    """One `outfitter-lease`. `deliver` prints the devices; if it raises an error, they are given back."""

    def __init__(self, request: LeaseRequest, deliver: Callable[[list[ExternalResourceInfo]], object]) -> None:
        self._request = request
        self._deliver = deliver
        self._is_delivered = False
        self._is_kept = False  # the owner may be using what an earlier call got: no failure of this one gives it back
        self._waits_for = _UNANSWERED

    async def run(self, signals: SignalFile) -> int:
        """Get the devices, deliver them, and leave them to the owner. Returns the exit code.

        Raises:
            AllocationError, NoManagerError, BusError: why there are none, perhaps in a group.
            OutfitterCliError: they did not come in time, or the manager cannot watch the owner.
        """
        code = 0
        async with anyio.create_task_group() as tasks:

            def obey(received: Received) -> None:
                nonlocal code
                code = code or 128 + received.number
                tasks.cancel_scope.cancel()

            tasks.start_soon(signals.each, obey)
            await self._lease()
            tasks.cancel_scope.cancel()
        return 0 if self._is_delivered else code

    async def _lease(self) -> None:
        request, holder = self._request, Holder(self._request.where)
        left = request.wait_s - seconds_running()
        with anyio.move_on_after(left - min(LEAVING_S, request.wait_s / 4)):
            async with turn(request.owner.pid, self._say_its_turn), holder.bus() as bus:
                self._waits_for = _UNANSWERED
                for call in itertools.count(1):
                    registration = request.registration(call)
                    earlier = await holder.earlier(bus, registration)
                    if earlier is not None and earlier.state in FINAL_STATES:
                        continue
                    self._is_kept = earlier is not None and status_of(earlier) is AllocationStatus.YOURS
                    if await self._call(holder.session(bus, registration)):
                        break
        if not self._is_delivered:
            raise OutfitterCliError(f"no {request.resource} within {request.wait_s:g} s: {self._waits_for}")

    async def _call(self, session: WorkerSession) -> bool:
        """Make one registration. Returns False if an earlier call of the same owner has ended it."""
        try:
            await session.open()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.follow)
                try:
                    await session.wait()
                    record = await self._watched(session)
                    self._deliver(list(infos(record, self._request.resource, None)))
                    self._is_delivered = self._is_kept = True
                except (AllocationFailedError, AllocationEndedError) as error:
                    if error.code in _OF_EARLIER_CALLS:
                        return False
                    raise
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            if session.record is not None:
                self._waits_for = missing(session.record, is_kept=self._is_kept)
            with anyio.move_on_after(LEAVING_S, shield=True):
                if not self._is_kept:
                    await session.deregister("not leased")
                await session.aclose()
        return True

    def _say_its_turn(self) -> None:
        self._waits_for = f"another outfitter-lease for process {self._request.owner.pid} has not ended"

    async def _watched(self, session: WorkerSession) -> Allocation:
        """The granted record, once it is certain that the manager watches the owner.

        Raises:
            OutfitterCliError: it does not.
        """
        for _ in range(CONFIRMATIONS):
            await session.confirm()
        record, problem = session.record, _unwatched(session, self._request.owner.identity)
        if record is None or problem is not None:
            raise OutfitterCliError(
                f"the manager of host {self._request.where.host} cannot watch process {self._request.owner.pid} "
                f"({problem}), so the devices would be lost or held for ever: use `outfitter hold`"
            )
        refused = refusal(record)
        if refused is not None:
            raise refused
        return record


def _unwatched(session: WorkerSession, owner: Owner) -> str | None:
    """Why the manager cannot watch the owner; None if it does."""
    record, watcher = session.record, session.watcher
    if record is not None and record.unwatched is not UNSET:
        return record.unwatched
    if watcher is None or watcher.boot_id is None:
        return Unwatched.SCOPE
    if watcher.boot_id != owner.boot_id:
        return Unwatched.MACHINE
    if watcher.pid_ns != owner.pid_ns:
        return Unwatched.PID_NAMESPACE
    return None if watcher.watches(owner) else Unwatched.TIME_NAMESPACE
