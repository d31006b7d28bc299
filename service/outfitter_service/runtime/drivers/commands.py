"""Carries out the core's commands: a command for an allocation becomes a call of each of its drivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

import structlog
from anyio.abc import TaskGroup

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers.supervisor import Emit, Supervisor

log = structlog.get_logger("outfitter.drivers")


class CommandRunner:
    """The commands under way: serial for one allocation, concurrent for different ones."""

    def __init__(
        self,
        tasks: TaskGroup,
        configured: Collection[str],
        supervisors: Callable[[str], Mapping[str, Supervisor]],
        emit: Emit,
    ) -> None:
        """Commands run in `tasks`, and `emit` gets their results. `configured`: the resources that have a driver.
        `supervisors` returns those of a host by resource; none if the host is not served."""
        self._tasks = tasks
        self._configured = configured
        self._supervisors = supervisors
        self._emit = emit
        self._lines: dict[AllocationKey, deque[Callable[[], Awaitable[None]]]] = {}
        self._under_way: set[m.Command] = set()

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Start a committed command, whose result comes back as an event. A command that is under way already (the
        partition was taken again meanwhile) is not started again: its result answers both."""
        if command in self._under_way:
            return
        match command:
            case m.Discover():
                self._tasks.start_soon(self._supervisors(command.host)[command.resource].discover, command, record)
            case m.Prepare() if record is not None:
                self._under_way.add(command)
                self._in_turn(command.allocation, lambda: self._prepare(command, record))
            case m.Unprepare() if record is not None:
                self._under_way.add(command)
                self._in_turn(command.allocation, lambda: self._unprepare(command, record))

    def _grants(self, record: Allocation) -> Iterator[tuple[Supervisor, api.Grant]]:
        supervisors = self._supervisors(record.host)
        for resource, infos in record.resources.items():
            supervisor = supervisors.get(resource)
            if supervisor is not None:
                yield supervisor, supervisor.grant(record, infos)

    def _in_turn(self, key: AllocationKey, call: Callable[[], Awaitable[None]]) -> None:
        """Make the calls for one allocation serially, in order (one commit may grant and release). Separate tasks could
        begin in any order. No other allocation has its devices meanwhile."""
        line = self._lines.get(key)
        if line is not None:
            line.append(call)
        else:
            line = self._lines[key] = deque([call])
            self._tasks.start_soon(self._work_off, key, line)

    async def _work_off(self, key: AllocationKey, line: deque[Callable[[], Awaitable[None]]]) -> None:
        try:
            while line:
                await line.popleft()()
        finally:
            del self._lines[key]

    def _absent(self, record: Allocation) -> list[str]:
        """The record's resources that a driver has prepared or must take back, and whose driver is not configured."""
        return [resource for resource in record.prepared or () if resource not in self._configured]

    async def _prepare(self, command: m.Prepare, record: Allocation) -> None:
        absent = self._absent(record)
        error = f"the driver of {', '.join(absent)} is not configured any more" if absent else None
        for supervisor, grant in self._grants(record):
            error = error or await supervisor.prepare(grant)
        self._under_way.discard(command)
        self._emit(m.Prepared(allocation=command.allocation, token=command.token, error=error))

    async def _unprepare(self, command: m.Unprepare, record: Allocation) -> None:
        absent = self._absent(record)
        if absent:
            # their driver must take them back: a manager with that driver will ask it when it starts
            log.error(
                "devices stay held: their driver must take them back, but is not configured; configure it and restart",
                host=record.host,
                worker=record.worker,
                incarnation=record.incarnation,
                resources=absent,
            )
            drivers = f"the driver of {', '.join(absent)}"
            reason = f"{drivers} must take them back, but is not configured: configure it and restart"
            self._emit(m.ReleaseDelayed(allocation=command.allocation, token=command.token, reason=reason))
            return
        checked: list[bool] = []
        for supervisor, grant in self._grants(record):
            await supervisor.unprepare(grant)
            checked.append(await supervisor.wait_until_unused(grant))
        confirmed = bool(checked) and all(checked)
        self._under_way.discard(command)
        self._emit(m.Unprepared(allocation=command.allocation, token=command.token, confirmed=confirmed))
