"""Builds a processor and its drivers from the settings, and runs them together to serve one partition's hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio
from msgspec import structs

from outfitter_service.config import Settings
from outfitter_service.core.decide import Rules
from outfitter_service.runtime.drivers.pool import DriverPool
from outfitter_service.runtime.drivers.supervisor import Loaded
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS, Limits
from outfitter_service.runtime.processor.processor import Processor
from outfitter_service.runtime.survivors.survivor_watch import SurvivorWatch


class PartitionServer:
    """Serves a scope's hosts from one partition. `processor`: what decides and commits; `identity`: the manager's."""

    def __init__(
        self,
        assignment: Assignment,
        settings: Settings,
        loaded: Mapping[str, Loaded],
        *,
        instruments: Instruments,
        owns_partition: Callable[[], Awaitable[bool]] | None = None,
        limits: Limits = DEFAULT_LIMITS,
        sweeps: Callable[[], bool] = lambda: False,
    ) -> None:
        """`loaded`: the drivers, by resource. `owns_partition` and `sweeps`: as in `Processor`. The settings override
        `limits`."""
        identity = self.identity = assignment.identity
        self._pool = DriverPool(
            loaded, metrics=instruments.metrics, survivors=SurvivorWatch(identity), identity=identity
        )
        self.processor = Processor(
            assignment,
            rules=Rules(
                writer=identity.writer,
                specs={name: each.spec for name, each in loaded.items()},
                lease_s=settings.lease,
                wait_s=settings.wait,
                retention_s=settings.ended_retention,
                max_bytes=limits.max_bytes,
                forgets_hosts=identity.host is None,
                sees=identity.sees,
            ),
            limits=structs.replace(
                limits,
                lease_grace_s=settings.lease_grace,
                checkpoint_interval_s=settings.checkpoint_interval,
                beat_s=limits.beat_s and settings.beat_interval,
                history=limits.history if settings.history else None,
            ),
            instruments=instruments,
            drivers=self._pool,
            owns_partition=owns_partition,
            sweeps=sweeps,
        )

    async def run(self) -> None:
        """Serve until the processor has stopped. Raises the errors of `Processor.run`."""
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(
                lambda: self._pool.run(self.processor.event_queue.add, started=started, host=self.identity.host)
            )
            await started.wait()
            await self.processor.run()
            tasks.cancel_scope.cancel()
