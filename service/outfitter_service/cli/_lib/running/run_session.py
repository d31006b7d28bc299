"""The work of `outfitter run`: get devices, run a command with them, give them back."""

from __future__ import annotations

import math
import os
import signal
from typing import Final

import anyio
import anyio.lowlevel

from outfitter.errors import AllocationEndedError, LeaseLostError, NoManagerError
from outfitter.session.heartbeats import LONGEST_SLEEP
from outfitter.session.identity import variables
from outfitter.session.lease import Lease
from outfitter.session.status import AllocationStatus, environment, status_of
from outfitter.session.watch import AllocationWatch, lease_lost
from outfitter.session.worker_session import WorkerSession
from outfitter_proto.bus import Create
from outfitter_proto.environment import ALLOWING
from outfitter_proto.records import Allocation, Register
from outfitter_service.cli._lib.errors import warn
from outfitter_service.cli._lib.holding.holder import Holder, WaitingReasons
from outfitter_service.cli._lib.running import job_control
from outfitter_service.cli._lib.running.child import Child
from outfitter_service.cli._lib.running.left_behind import LeftBehind
from outfitter_service.cli._lib.running.no_devices import hiding
from outfitter_service.cli._lib.running.signals import Received, SignalFile
from outfitter_service.config import BusConnection
from outfitter_service.query.errors import OutfitterCliError

WITHDRAWING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that withdraw the registration, before the command runs."""

PASSED_ON: Final = (*WITHDRAWING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
"""Signals that are passed on to the running command. `WITHDRAWING` end what it left behind, once it has ended."""

RECEIVED: Final = (*PASSED_ON, signal.SIGCHLD, signal.SIGCONT)
"""Signals that a session reads."""

TERM_AHEAD: Final = 1 / 3
"""SIGTERM comes before the lease's end by at most this share of the lease: the lease is at risk from then on."""
KILL_AHEAD: Final = 1 / 30
"""SIGKILL comes before the lease's end by at least this share of the lease: a process needs a moment to die."""


class RunSession:
    """One `outfitter run`. `run` returns its exit code, or minus the signal of which it must die."""

    def __init__(
        self,
        where: BusConnection,
        message: Register,
        child: Child,
        left_behind: LeftBehind,
        *,
        signals: SignalFile,
        wait_for_manager: bool,
        kill_after: float,
        allowed: frozenset[str],
    ) -> None:
        """`allowed`: the variables that a record may set besides those that select devices."""
        self._where = where
        self._message = message
        self._child = child
        self._left_behind = left_behind
        self._signals = signals
        self._holder = Holder(where, waits_for_manager=wait_for_manager)
        self._kill_after = kill_after
        self._allowed = allowed
        self._withdrawn_by: int | None = None
        self._waiting = anyio.CancelScope()

    async def run(self) -> int:
        """Get devices, run the command, give them back; return the exit code, or minus the signal that ended it.

        Raises:
            NoManagerError, AllocationFailedError, AllocationEndedError, BusError: why there are no devices.
            VariableNotAllowedError: the devices set variables that this worker does not allow.
            WaitedTooLongError: it took too long.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._signals.each, self._handle_signal)
            code = 0
            with self._waiting:
                code = await self._hold_allocation()
            tasks.cancel_scope.cancel()
        return code if self._withdrawn_by is None else -self._withdrawn_by

    def _handle_signal(self, received: Received) -> None:
        """Pass a signal on to the command. Before it runs, some of them end the waiting."""
        if received.number == signal.SIGCHLD:
            self._left_behind.reap()
            self._stop_with_command()
        elif received.number == signal.SIGCONT:
            if self._child.stopped:
                job_control.continue_command(self._child.pid)
        elif self._child.ended:
            if received.number in WITHDRAWING:
                self._left_behind.end()
        elif self._child.started:
            if not received.by_kernel or self._child.apart:  # else the terminal has sent it to the command, too
                self._child.send(received.number)
        elif received.number in WITHDRAWING and self._withdrawn_by is None:
            self._withdrawn_by = received.number
            self._waiting.cancel()

    def _stop_with_command(self) -> None:
        """Stop with a command that does job control: it has a process group of its own, has stopped, and the terminal's
        foreground is ours or a descendant's.

        A command in our group stops with us at Ctrl-Z. If it has stopped alone, it was sent the signal by its pid. Then
        its sender continues it, too, and a stopped `outfitter run` would send no heartbeats and miss its end.
        """
        group = job_control.foreground() if self._child.stopped and self._child.apart else None
        if group is not None and (group == os.getpgrp() or self._left_behind.includes(group)):
            job_control.stop()

    async def _hold_allocation(self) -> int:
        code = 0
        async with self._holder.bus(Create.FILE) as bus:

            def warn_at_risk(error: LeaseLostError) -> None:
                if self._until_term(session.allocation_watch.lease) > 0:  # else `_guard` warns
                    warn(str(error))

            session = self._holder.session(bus, self._message, on_lease_at_risk=warn_at_risk)
            session.leave_because("withdrawn")  # unless a later step sets another reason
            async with session:
                code = await self._execute(session, await self._obtain(session))
        return code

    async def _obtain(self, session: WorkerSession) -> Allocation:
        reasons = WaitingReasons(session.allocation_watch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reasons.run)
            try:
                record = await session.wait()
            except NoManagerError as error:
                raise OutfitterCliError(f"{error}; --wait-for-manager waits for one") from error
            tasks.cancel_scope.cancel()
        reasons.say_granted(record)
        return record

    async def _execute(self, session: WorkerSession, record: Allocation) -> int:
        variables_of_command = self._environment(record)
        for name, missing in record.unavailable.items():
            warn(f"continues without infos of {name}: {missing.reason}")
        self._child.take_foreground()
        while (received := self._signals.read()) is not None:
            self._handle_signal(received)  # the terminal did not send it to the command
        if self._withdrawn_by is not None:
            await anyio.lowlevel.checkpoint()  # withdrawn at the moment of the grant
        session.leave_because(None)
        self._child.start(variables_of_command)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._left_behind.send_signals)
            tasks.start_soon(self._guard, session.allocation_watch)
            code = await self._child.wait()
            await self._left_behind.wait(self._child.command[0])
            tasks.cancel_scope.cancel()
        return code

    def _environment(self, record: Allocation) -> dict[str, str]:
        return {
            **os.environ,
            **hiding(record, os.environ),
            **environment(record, None, self._allowed),
            **({ALLOWING: ",".join(sorted(self._allowed))} if self._allowed else {}),
            **{f"OUTFITTER_KAFKA_{name.replace('-', '_').upper()}": value for name, value in self._where.login.items()},
            **variables(self._where.bus, self._where.cluster, self._message),
        }

    # --- while the command runs --------------------------------------------------------------------------

    async def _guard(self, allocation_watch: AllocationWatch) -> None:
        """End the command and all descendants when the allocation is over, or its lease is about to end."""
        while True:
            snapshot = allocation_watch.read()
            lost = _lost(snapshot.record, snapshot.error)
            seconds_left = self._until_term(allocation_watch.lease)
            if lost is None and seconds_left <= 0:
                lost = str(lease_lost(allocation_watch))
            if lost is not None:
                warn(f"the allocation is lost ({lost}): ending {self._child.command[0]}")
                self._left_behind.end()
                break
            # ask the lease's clock often: an event loop's timer stands still while the machine is suspended
            with anyio.move_on_after(min(seconds_left, LONGEST_SLEEP) if seconds_left < math.inf else None):
                await allocation_watch.changed(snapshot.version)
        while (seconds_left := _until_kill(allocation_watch.lease)) > 0:  # noqa: ASYNC110 - nothing tells
            await anyio.sleep(min(seconds_left, LONGEST_SLEEP))
        self._left_behind.kill()

    def _until_term(self, lease: Lease) -> float:
        """Seconds until all processes must get SIGTERM, so that they have time to end before the lease."""
        longest = (lease.seconds or math.inf) * (TERM_AHEAD - KILL_AHEAD)
        return _until_kill(lease) - min(self._kill_after, longest)


def _until_kill(lease: Lease) -> float:
    """Seconds until all processes must get SIGKILL: the next worker gets the devices when the lease ends."""
    seconds, remaining = lease.seconds, lease.remaining
    return math.inf if seconds is None or remaining is None else remaining - seconds * KILL_AHEAD


def _lost(record: Allocation | None, error: Exception | None) -> str | None:
    """Why the devices are no longer this worker's; None while they are."""
    if isinstance(error, AllocationEndedError):
        return str(error)
    if record is None or status_of(record) is AllocationStatus.YOURS:
        return None
    return f"{record.state}: {record.reason}" if record.reason else record.state
