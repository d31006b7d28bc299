"""Carries out the core's commands: a command for an allocation becomes a call of each of its drivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

import structlog
from anyio.abc import TaskGroup

from outfitter_drivers import api
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import Allocation
from outfitter_service.core import delays
from outfitter_service.core import model as m
from outfitter_service.runtime.drivers.supervisor import NO_CHECK, Emit, Supervisor
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch

log = structlog.get_logger("outfitter.drivers")


class CommandRunner:
    """Runs commands: serially for one allocation, concurrently for different ones."""

    def __init__(
        self,
        tasks: TaskGroup,
        configured: Collection[str],
        supervisors: Callable[[str], Mapping[str, Supervisor]],
        emit: Emit,
        survivors: SurvivorWatch | None = None,
    ) -> None:
        """`tasks`: where commands run. `configured`: the resources that have a driver. `supervisors`: returns the
        supervisors of a host by resource, none if the host is not served. `emit`: called with each result as an event.
        `survivors`: finds the processes that workers leave behind; None: nobody looks for them.
        """
        self._tasks = tasks
        self._configured = configured
        self._supervisors = supervisors
        self._emit = emit
        self._survivors = survivors
        self._calls: dict[AllocationKey, deque[Callable[[], Awaitable[None]]]] = {}
        self._under_way: set[m.Command] = set()

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Start a committed command, whose result comes back as an event. `record`: its allocation. A command that is
        under way already is not started again: the manager has taken the partition again, and one result answers both.
        """
        if command in self._under_way:
            return
        match command:
            case m.Discover():
                supervisor = self._supervisors(command.host)[command.resource]
                # Begun before the task: the same commit may end the allocation, and tasks could begin in any order.
                question = supervisor.offers.question(command.allocation)
                self._tasks.start_soon(supervisor.discover, command, record, question)
            case m.Prepare() if record is not None:
                self._under_way.add(command)
                self._in_turn(command.allocation, lambda: self._prepare(command, record))
            case m.Unprepare() if record is not None:
                self._under_way.add(command)
                self._in_turn(command.allocation, lambda: self._unprepare(command, record))

    def _grants(self, record: Allocation) -> Iterator[tuple[Supervisor, api.Grant]]:
        """The grant of each exclusive resource of the record that has a driver, with its supervisor. What is shared was
        prepared for nobody, and others may go on using it."""
        supervisors = self._supervisors(record.host)
        for resource, infos in record.resources.items():
            supervisor = supervisors.get(resource)
            if supervisor is not None and resource not in record.shared:
                yield supervisor, supervisor.grant(record, infos)

    def _in_turn(self, key: AllocationKey, call: Callable[[], Awaitable[None]]) -> None:
        """Make the calls for one allocation serially, in order: one commit may grant and release. Separate tasks could
        begin in any order. No other allocation has its devices meanwhile."""
        calls = self._calls.get(key)
        if calls is not None:
            calls.append(call)
        else:
            calls = self._calls[key] = deque([call])
            self._tasks.start_soon(self._make_calls, key, calls)

    async def _make_calls(self, key: AllocationKey, calls: deque[Callable[[], Awaitable[None]]]) -> None:
        try:
            while calls:
                await calls.popleft()()
        finally:
            del self._calls[key]

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
        unseen = None if self._survivors is None else self._survivors.out_of_sight(record)
        if unseen is not None:
            # whatever ends the wait is decided, and leads to this command again
            self._under_way.discard(command)
            self._delay(command, unseen)
            return
        survivors = await self._until_survivors_are_gone(command, record)
        absent = self._absent(record)
        if absent:
            # a manager that starts with this driver configured asks the driver to take the devices back
            log.error(
                "devices stay held: their driver must take them back, but is not configured; configure it and restart",
                host=record.host,
                worker=record.worker,
                incarnation=record.incarnation,
                resources=absent,
            )
            words = "must take them back, but is not configured: configure it and restart"
            self._delay(command, delays.of_driver(", ".join(absent), words))
            return
        untold: list[str | None] = []
        for supervisor, grant in self._grants(record):
            await supervisor.unprepare(grant)
            untold.append(await supervisor.wait_until_unused(grant))
        why = next(filter(None, untold), None) if untold else NO_CHECK
        self._under_way.discard(command)
        self._emit(
            m.Unprepared(
                allocation=command.allocation,
                token=command.token,
                confirmed=why is None,
                untold=why,
                survivors=survivors,
            )
        )

    async def _until_survivors_are_gone(self, command: m.Unprepare, record: Allocation) -> str | None:
        """Wait for the processes that the worker left behind, before a driver touches their devices. Returns what came
        of the search, for history."""
        if self._survivors is None:
            return None
        return await self._survivors.wait_until_gone(record, lambda reason: self._delay(command, reason))

    def _delay(self, command: m.Unprepare, reason: str) -> None:
        self._emit(m.ReleaseDelayed(allocation=command.allocation, token=command.token, reason=reason))
