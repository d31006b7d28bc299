"""Simulated machines on which managers run: the real processor and the real driver pool, started again when they end.

This is the only module that knows how a manager is put together; everything else of the runtime is left alone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anyio
from msgspec import Struct

from outfitter_proto.bus import Bus
from outfitter_proto.names import Topics, host_writer
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.drivers import DriverPool
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.processor import ForeignManagerError, Limits, Processor
from simulation.hardware import RESOURCE, Bench
from simulation.loop import Loop, Process
from simulation.network import Link
from simulation.owners import BOOT, Owners

CLUSTER = "outfitter"
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class MachineClock(Clock):
    """The simulation's time as one machine shows it: its wall clock is off by `skew_s`."""

    def __init__(self, loop: Loop, skew_s: float) -> None:
        self._loop = loop
        self._skew_s = skew_s

    def monotonic(self) -> float:
        return self._loop.time()

    def utc(self) -> datetime:
        return EPOCH + timedelta(seconds=self._loop.time() + self._skew_s)

    def suspended(self) -> float:
        return 0.0


class Site(Struct, kw_only=True):
    """What the managers of one host have in common."""

    host: str
    partition: int
    bench: Bench
    owners: Owners
    limits: Limits
    lease_s: float
    retention_s: float
    chunk: int
    metrics: Metrics
    skew_s: float = 0.0


class Manager:
    """One run of a manager. `ended` is how it ended by itself, None while it runs or when it was killed."""

    def __init__(self, loop: Loop, link: Link, bus: Bus, topics: Topics, site: Site, instance: str) -> None:
        self.link = link
        self.process: Process = link.process
        self.instance = instance
        self.site = site
        self.ended: BaseException | str | None = None
        writer = host_writer(site.host)
        identity = Identity(
            cluster=CLUSTER,
            scope="host",
            host=site.host,
            writer=writer,
            instance=instance,
            machine_id=f"machine-of-{site.host}",
            boot_id=BOOT,
            pid_ns=1,
        )
        loaded = {RESOURCE: site.bench.driver()}
        self._pool = DriverPool(loaded, metrics=site.metrics)
        self.processor = Processor(
            bus,
            topics=topics,
            partition=site.partition,
            identity=identity,
            rules=Rules(
                writer=writer,
                specs={name: each.spec for name, each in loaded.items()},
                lease_s=site.lease_s,
                retention_s=site.retention_s,
                chunk=site.chunk,
            ),
            limits=site.limits,
            metrics=site.metrics,
            drivers=self._pool,
            clock=MachineClock(loop, site.skew_s),
            owner_watch=lambda **options: site.owners.watch(self.process, options["died"]),
        )

    @property
    def up(self) -> bool:
        """Whether it runs, be it stopped or cut off."""
        return self.ended is None and not self.process.dead

    @property
    def gave_up(self) -> bool:
        return isinstance(self.ended, ForeignManagerError)

    async def main(self) -> None:
        """Serve until told to stop, or until it cannot go on."""
        failure: Exception | None = None
        site_host = self.site.host
        try:
            async with anyio.create_task_group() as tasks:
                started = anyio.Event()
                tasks.start_soon(lambda: self._pool.run(self.processor.emit, started=started, host=site_host))
                await started.wait()
                try:
                    await self.processor.run()
                except Exception as error:  # noqa: BLE001 - the simulation looks at it
                    failure = error
                tasks.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - the same
            failure = error
        self.ended = failure or "stopped"
