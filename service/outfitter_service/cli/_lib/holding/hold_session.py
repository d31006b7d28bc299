"""The work of `outfitter hold`: register for the owner, print its record at each change, and decide how it ends.

Devices that the owner may be using are given back by the owner alone: it closes standard input, signals, or ends. All
else that may end this process leaves them to the owner.
"""

from __future__ import annotations

import asyncio
import enum
import signal
from functools import partial
from typing import Final

import anyio
from msgspec import Struct

from outfitter.errors import (
    AllocationEndedError,
    AllocationError,
    OutfitterError,
    VariableNotAllowedError,
)
from outfitter.session.late_deregistration import deregister_late
from outfitter.session.status import AllocationStatus, environment, status_of
from outfitter.session.watch import AllocationWatch, WatchSnapshot, lease_lost
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import BusError, Create
from outfitter_proto.records import Allocation, Register
from outfitter_service.cli._lib import standard_output
from outfitter_service.cli._lib.errors import exit_code_of, print_error, warn
from outfitter_service.cli._lib.holding import lines, streams
from outfitter_service.cli._lib.holding.holder import FAILED, LOST, Holder, WaitingReasons
from outfitter_service.cli._lib.holding.owner import ENDING_WITHIN, OwnerProcess
from outfitter_service.cli._lib.running.signals import Received, SignalFile
from outfitter_service.config import BusConnection
from outfitter_service.core.request_check import differences
from outfitter_service.query.errors import OutfitterCliError

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that end it."""

WRITTEN_WITHIN: Final = 1.0
"""Seconds until a write has failed whose reader has gone."""

GIVEN_BACK_WITHIN: Final = 10.0
"""Seconds for giving back what an earlier `hold` of the same incarnation has got, where this one had just begun."""


class HoldEnd(enum.Enum):
    """Why it ends in order. The value is the reason of the deregistration."""

    GIVEN_BACK = "given back by its owner"
    OWNER_ENDED = "its owner has ended"
    SIGNALLED = "ended by a signal before the grant"
    UNTOLD = "nobody takes what is printed for its owner"


class HoldRequest(Struct, frozen=True):
    """What to hold, and how."""

    where: BusConnection
    registration: Register
    owner: OwnerProcess
    named: bool
    """The caller has chosen the incarnation, so this may be a restart."""
    reads_stdin: bool
    """The end of standard input gives the devices back."""
    wait_for_manager: bool
    """It waits for a manager, however long."""
    allowed: frozenset[str]
    """The variables that a record may set besides those that select devices."""


class HoldSession:
    """One `outfitter hold`. `run` returns its exit code."""

    def __init__(self, request: HoldRequest, *, signals: SignalFile, writer: streams.LineWriter) -> None:
        self._request = request
        self._holder = Holder(request.where, waits_for_manager=request.wait_for_manager)
        self._signals = signals
        self._writer = writer
        self._end: HoldEnd | None = None
        self._working = anyio.CancelScope()
        self._giving_back_late = anyio.CancelScope()
        self._is_granted = False
        self._told_before = False
        self._printed = ""
        self._code = 0
        self._left = False

    async def run(self) -> int:
        """Do everything, and return the exit code.

        Raises:
            BusError: the bus cannot be used from the start.
            OutfitterCliError: the incarnation was registered with another request.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._signals.each, self._handle_signal)
            tasks.start_soon(self._await_owner)
            tasks.start_soon(self._await_streams)
            with self._working:
                await self._hold()
            if self._end is HoldEnd.GIVEN_BACK and self._request.named and not self._left:
                with anyio.move_on_after(GIVEN_BACK_WITHIN):
                    await self._give_back_earlier()
            tasks.cancel_scope.cancel()
        return self._code

    # --- how it ends ---------------------------------------------------------------------------------------

    def _finish(self, end: HoldEnd) -> None:
        self._end = self._end or end
        self._working.cancel()

    async def _await_owner(self) -> None:
        await self._request.owner.ended()
        self._finish(HoldEnd.OWNER_ENDED)
        self._giving_back_late.cancel()

    async def _await_streams(self) -> None:
        """Wait until the owner closes a stream. The kernel does so, too, while the owner dies."""
        closed, unread, owner = anyio.Event(), anyio.Event(), self._request.owner
        wake = asyncio.get_running_loop().call_soon_threadsafe
        streams.watch(partial(wake, closed.set), partial(wake, unread.set), stdin=self._request.reads_stdin)
        self._writer.call_when_broken(partial(wake, unread.set))
        async with anyio.create_task_group() as tasks:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, closed)
            tasks.start_soon(first, unread)
        if owner.is_ending:
            await anyio.sleep(ENDING_WITHIN)  # its end comes first, and ends this
        if owner.has_ended:
            self._finish(HoldEnd.OWNER_ENDED)
        elif closed.is_set():
            self._finish(HoldEnd.GIVEN_BACK)
        else:
            await self._finish_unread()

    async def _finish_unread(self) -> None:
        """End because standard output takes no more. Whoever has read a line and closes it gives back in order."""
        await anyio.to_thread.run_sync(self._writer.finish, WRITTEN_WITHIN)
        self._code = self._code or problem_of(self._writer)
        self._finish(HoldEnd.UNTOLD if self._code == FAILED else HoldEnd.GIVEN_BACK)

    def _handle_signal(self, received: Received) -> None:
        """Obey a signal, unless the terminal sent it to the owner as well."""
        owner = self._request.owner
        if received.by_kernel and owner.shares_group:
            return
        if self._end is not None:
            self._giving_back_late.cancel()
        self._finish(HoldEnd.GIVEN_BACK if received.by_kernel or received.sender == owner.pid else HoldEnd.SIGNALLED)

    def _gives_back(self, session: WorkerSession) -> bool:
        """Whether to deregister. Before the grant nobody uses the devices; then only the owner gives them back. Its
        death is the manager's to judge, if the manager sees it."""
        if self._end is HoldEnd.OWNER_ENDED:
            return not session.allocation_watch.lease.watched
        if self._end is HoldEnd.UNTOLD:
            return not (self._writer.taken or self._told_before)
        return self._end is HoldEnd.GIVEN_BACK or not self._is_granted

    # --- its work ------------------------------------------------------------------------------------------

    async def _hold(self) -> None:
        async with self._holder.bus(Create.FILE) as bus:
            request = self._request
            earlier = await self._holder.earlier(bus, request.registration) if request.named else None
            if earlier is not None:
                self._compare(earlier)
                if status_of(earlier) in (AllocationStatus.OVER, AllocationStatus.FAILED):
                    self._end_lost(earlier)
                    return
                if status_of(earlier) is AllocationStatus.YOURS:
                    self._told_before = True
                    self._print_record(earlier)
                    if self._code:
                        return
            session = self._holder.session(bus, request.registration, is_known=earlier is not None)
            try:
                await session.open()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(session.follow)
                    tasks.start_soon(session.keep_lease)
                    await self._report(session)
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True):
                    await self._leave(session)

    def _compare(self, earlier: Allocation) -> None:
        registration = self._request.registration
        if fields := differences(earlier, registration):
            raise OutfitterCliError(
                f"incarnation {registration.incarnation!r} of worker {registration.worker!r} was registered with other "
                f"{', '.join(fields)}"
            )

    async def _give_back_earlier(self) -> None:
        """The owner gave back before this restart had found the allocation: end it all the same."""
        registration = self._request.registration
        async with self._holder.bus() as bus:
            earlier = await self._holder.earlier(bus, registration)
            if earlier is not None and status_of(earlier) not in (AllocationStatus.OVER, AllocationStatus.FAILED):
                await self._leave(self._holder.session(bus, registration, is_known=True))

    async def _leave(self, session: WorkerSession) -> None:
        self._left = True
        stays = self._end is not HoldEnd.OWNER_ENDED and not session.allocation_watch.read().ended
        if self._gives_back(session):
            stays = not await self._give_back(session)
        if stays and not self._request.owner.has_ended:
            warn(f"{session.record.key if session.record else 'the allocation'} stays with process "
                 f"{self._request.owner.pid}")  # fmt: skip
        await session.aclose()

    async def _give_back(self, session: WorkerSession) -> bool:
        """Deregister. What the owner gives back while the bus is away is given back later, unless a signal comes or the
        owner ends. Returns whether the manager will see it."""
        reason = self._end.value if self._end is not None else "withdrawn"
        if await session.deregister(reason):
            return True
        if self._end in (HoldEnd.GIVEN_BACK, HoldEnd.UNTOLD):
            with self._giving_back_late:
                await deregister_late(partial(session.publish_deregistration, reason), session.key)
                return True
            self._code = 0 if self._request.owner.has_ended else FAILED
        return False

    async def _report(self, session: WorkerSession) -> None:
        """Print the record when it is granted and at each change, until the allocation is over."""
        async with anyio.create_task_group() as tasks:
            if not self._is_granted:
                tasks.start_soon(WaitingReasons(session.allocation_watch).run)
            try:
                await session.wait()
            except (OutfitterError, BusError) as error:
                self._end_failed(error)
                return
            finally:
                tasks.cancel_scope.cancel()
        snapshot = session.allocation_watch.read()
        while self._print(snapshot, session.allocation_watch):
            snapshot = await session.allocation_watch.changed(snapshot.version)

    def _print(self, snapshot: WatchSnapshot, allocation_watch: AllocationWatch) -> bool:
        """Print what is new. Returns whether the allocation goes on."""
        record = snapshot.record
        if record is not None and status_of(record) is not AllocationStatus.YOURS:
            self._end_lost(record)
        elif snapshot.error is not None:
            self._end_failed(snapshot.error)
        elif allocation_watch.lease.at_risk:
            self._put(lines.at_risk(self._request.registration, str(lease_lost(allocation_watch))))
        elif record is not None:
            self._print_record(record)
        return self._code == 0

    def _print_record(self, record: Allocation) -> None:
        if (problem := self._problem(record)) is not None:
            self._end_failed(problem)
            return
        self._is_granted = True
        self._put(lines.of_record(record))

    def _problem(self, record: Allocation) -> VariableNotAllowedError | None:
        """Why the owner must not be told of these devices: nobody knows what their variables select."""
        try:
            for operator in (None, *record.operators):
                environment(record, operator, self._request.allowed)
        except VariableNotAllowedError as error:
            return error
        return None

    def _end_lost(self, record: Allocation) -> None:
        """Print the last record of an allocation that is over."""
        self._put(lines.of_record(record))
        warn(f"{record.key} is over ({record.state}: {record.reason})")
        self._code = LOST

    def _end_failed(self, error: Exception) -> None:
        """Print why there are no devices: the manager's last record, or an error."""
        record = error.record if isinstance(error, AllocationError) else None
        is_verdict = record is not None and status_of(record) in (AllocationStatus.OVER, AllocationStatus.FAILED)
        self._put(lines.of_record(record) if record is not None and is_verdict else lines.of_error(error))
        print_error(error, debug=False)
        self._code = LOST if isinstance(error, AllocationEndedError) else exit_code_of(error, FAILED)

    def _put(self, line: str) -> None:
        if line != self._printed:
            self._printed = line
            self._writer.put(line)


def problem_of(writer: streams.LineWriter) -> int:
    """The exit code if the owner was not told of what it has, after a line on standard error; 0 if it was, or if a
    reader that was told has gone."""
    error = writer.error
    if error is not None and not isinstance(error, BrokenPipeError):
        print_error(error, debug=False)
        return FAILED
    return 0 if writer.taken else standard_output.CLOSED_PIPE
