"""Carries out the core's commands: a command about a whole allocation becomes a call of each of its drivers."""

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
    """Commands under way. Those about one allocation are serial, those about different ones run side by side."""

    def __init__(
        self,
        tasks: TaskGroup,
        configured: Collection[str],
        supervisors: Callable[[str], Mapping[str, Supervisor]],
        emit: Emit,
    ) -> None:
        """Commands run in `tasks`, and their ends go to `emit`. `configured`: the resources that have a driver.
        `supervisors` gives those of a host by resource; none if the host is not served."""
        self._tasks = tasks
        self._configured = configured
        self._supervisors = supervisors
        self._emit = emit
        self._lines: dict[AllocationKey, deque[Callable[[], Awaitable[None]]]] = {}
        self._under_way: set[m.Command] = set()

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Begin to carry out a committed command; its end comes back as an event. One that is under way already
        (the partition was taken anew meanwhile) is not begun again: its end is the answer to both."""
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

    def _concerned(self, record: Allocation) -> Iterator[tuple[Supervisor, api.Grant]]:
        supervisors = self._supervisors(record.host)
        for resource, infos in record.resources.items():
            supervisor = supervisors.get(resource)
            if supervisor is not None:
                yield supervisor, supervisor.grant(record, infos)

    def _in_turn(self, key: AllocationKey, call: Callable[[], Awaitable[None]]) -> None:
        """Calls about one allocation are serial, in the order in which they were asked for (one commit may grant and
        release): tasks that were started one after the other may begin in any order. Its devices are no other
        allocation's meanwhile."""
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
        """The record's resources whose driver has a say in it, and is not here (any more)."""
        return [resource for resource in record.prepared or () if resource not in self._configured]

    async def _prepare(self, command: m.Prepare, record: Allocation) -> None:
        absent = self._absent(record)
        error = f"the driver of {', '.join(absent)} is not configured any more" if absent else None
        for supervisor, grant in self._concerned(record):
            error = error or await supervisor.prepare(grant)
        self._under_way.discard(command)
        self._emit(m.Prepared(allocation=command.allocation, token=command.token, error=error))

    async def _unprepare(self, command: m.Unprepare, record: Allocation) -> None:
        absent = self._absent(record)
        if absent:
            # lent again only after their driver let go: a manager that has it again will ask it when it starts
            log.error(
                "devices stay held: their driver must let go first, and is not configured; configure it and restart",
                host=record.host,
                worker=record.worker,
                incarnation=record.incarnation,
                resources=absent,
            )
            words = (
                f"the driver of {', '.join(absent)} must let go first, and is not configured: configure it and restart"
            )
            self._emit(m.ReleaseDelayed(allocation=command.allocation, token=command.token, reason=words))
            return
        checked: list[bool] = []
        for supervisor, grant in self._concerned(record):
            await supervisor.unprepare(grant)
            checked.append(await supervisor.wait_until_unused(grant))
        confirmed = bool(checked) and all(checked)
        self._under_way.discard(command)
        self._emit(m.Unprepared(allocation=command.allocation, token=command.token, confirmed=confirmed))
