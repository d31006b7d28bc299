"""All drivers of one manager: a supervisor a resource, run side by side, and what the processor asks of them.

One driver's failure is its own (supervisor.py); here the core's commands about a whole allocation become calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from outfitter_drivers import api
from outfitter_proto.records import Allocation
from outfitter_service.core import model as m
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.supervisor import Emit, Loaded, Supervisor

CLOSE_WITHIN_S = 2.0
"""How long each driver may take to close; all close at the same time."""


log = structlog.get_logger("outfitter.drivers")


class DriverCalls(Protocol):
    """What the processor asks of the drivers."""

    def perform(self, command: m.Command, record: Allocation | None) -> None: ...


class DriverPool:
    """All supervisors of one manager on one host. `async with pool:` runs them."""

    def __init__(
        self,
        loaded: Mapping[str, Loaded],
        *,
        host: str,
        emit: Emit,
        metrics: Metrics,
        close_within_s: float = CLOSE_WITHIN_S,
    ) -> None:
        self.loaded = loaded
        self._close_within_s = close_within_s
        self._supervisors = {
            name: Supervisor(resource, host=host, emit=emit, metrics=metrics)
            for name, resource in loaded.items()
            if resource.driver is not None
        }
        self._emit = emit
        self._tasks: TaskGroup | None = None
        self._busy: dict[str, anyio.Lock] = {}
        self._under_way: set[m.Command] = set()

    async def run(self, *, started: anyio.Event) -> None:
        """Run until cancelled; then close every driver, bounded."""
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for supervisor in self._supervisors.values():
                    if isinstance(supervisor.driver, api.Inventory):
                        tasks.start_soon(supervisor.keep_inventory, supervisor.driver)
                started.set()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for supervisor in self._supervisors.values():
                        closing.start_soon(supervisor.close, self._close_within_s)

    def perform(self, command: m.Command, record: Allocation | None) -> None:
        """Begin to carry out a committed command; its end comes back as an event. One that is under way already
        (the partition was taken anew meanwhile) is not begun again: its end is the answer to both."""
        if self._tasks is None or command in self._under_way:
            return
        match command:
            case m.Discover():
                self._tasks.start_soon(self._supervisors[command.resource].discover, command, record)
            case m.Prepare() if record is not None:
                self._under_way.add(command)
                self._tasks.start_soon(self._prepare, command, record)
            case m.Unprepare() if record is not None:
                self._under_way.add(command)
                self._tasks.start_soon(self._unprepare, command, record)

    def _concerned(self, record: Allocation) -> Iterator[tuple[Supervisor, api.Grant]]:
        for resource, infos in record.resources.items():
            supervisor = self._supervisors.get(resource)
            if supervisor is not None:
                yield supervisor, supervisor.grant(record, infos)

    def _alone(self, key: str) -> anyio.Lock:
        """Calls about one allocation are serial; its devices are no other allocation's meanwhile."""
        return self._busy.setdefault(key, anyio.Lock())

    def _absent(self, record: Allocation) -> list[str]:
        """The record's resources whose driver has a say in it, and is not here (any more)."""
        return [resource for resource in record.prepared or () if resource not in self._supervisors]

    async def _prepare(self, command: m.Prepare, record: Allocation) -> None:
        absent = self._absent(record)
        error = f"the driver of {', '.join(absent)} is not configured any more" if absent else None
        async with self._alone(command.allocation):
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
            return
        checked: list[bool] = []
        async with self._alone(command.allocation):
            for supervisor, grant in self._concerned(record):
                await supervisor.unprepare(grant)
                checked.append(await supervisor.wait_until_unused(grant))
        self._busy.pop(command.allocation, None)
        confirmed = bool(checked) and all(checked)
        self._under_way.discard(command)
        self._emit(m.Unprepared(allocation=command.allocation, token=command.token, confirmed=confirmed))
