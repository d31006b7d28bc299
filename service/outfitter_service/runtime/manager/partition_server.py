"""A processor and its drivers, put together from the settings and run together: what serves one partition's hosts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio
from msgspec import structs

from outfitter_proto.bus import Bus
from outfitter_proto.names import topics
from outfitter_service.config import Settings
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.clock import SYSTEM, Clock
from outfitter_service.runtime.drivers.pool import DriverPool
from outfitter_service.runtime.drivers.supervisor import Loaded
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.outage_log import OutageLog
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS, Limits
from outfitter_service.runtime.processor.processor import Processor


class PartitionServer:
    """Serves `scope`'s hosts from one partition."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        loaded: Mapping[str, Loaded],
        *,
        partition: int,
        partitions: int,
        identity: Identity,
        scope: Scope,
        metrics: Metrics,
        take_over: bool = False,
        adopt: bool = False,
        still_mine: Callable[[], Awaitable[bool]] | None = None,
        clock: Clock = SYSTEM,
        limits: Limits = DEFAULT_LIMITS,
        outage: OutageLog | None = None,
    ) -> None:
        """`partitions` is the number by which `partition` is the scope's. `limits` are replaced by what the settings
        say, where they do."""
        self.partition = partition
        self.identity = identity
        self._host = identity.host
        self._pool = DriverPool(loaded, metrics=metrics)
        self.processor = Processor(
            bus,
            topics=topics(settings.cluster),
            partition=partition,
            partitions=partitions,
            identity=identity,
            scope=scope,
            rules=Rules(
                writer=identity.writer,
                specs={name: each.spec for name, each in loaded.items()},
                lease_s=settings.lease,
                wait_s=settings.wait,
                retention_s=settings.ended_retention,
                forgets_hosts=identity.host is None,
            ),
            limits=structs.replace(
                limits,
                lease_grace_s=settings.lease_grace,
                checkpoint_interval_s=settings.checkpoint_interval,
                take_over=take_over,
                adopt=adopt,
                history=limits.history if settings.history else None,
            ),
            metrics=metrics,
            drivers=self._pool,
            still_mine=still_mine,
            clock=clock,
            outage=outage,
        )

    async def run(self) -> None:
        """Serve until the processor has stopped; see `Processor.run` for what it raises."""
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(lambda: self._pool.run(self.processor.event_queue.add, started=started, host=self._host))
            await started.wait()
            await self.processor.run()
            tasks.cancel_scope.cancel()
