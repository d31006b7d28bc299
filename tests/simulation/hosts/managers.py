"""Simulated managers: the real ones, of either scope, put together as the service does.

This is the only module that knows how a manager is put together; everything else of the runtime is left alone.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import anyio
from msgspec import Struct, structs

from outfitter_proto.bus import MemberReplacedError
from outfitter_proto.keys import host_writer
from outfitter_proto.names import Topics, topics
from outfitter_service import config
from outfitter_service.cli._lib.errors import leaves
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime.changelog.topic_layout import TopicsChangedError
from outfitter_service.runtime.clock import Clock
from outfitter_service.runtime.drivers.pool import DriverPool
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.cluster_member import Replica
from outfitter_service.runtime.processor.processor import Limits, Processor
from outfitter_service.runtime.processor.takeover import ForeignManagerError
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager
from simulation.hosts.hardware import Bench, Catalogue, Oddities, load
from simulation.hosts.owners import BOOT, PID_NS, Owners, Survivors
from simulation.loop import Loop, Process
from simulation.model.client import ModelBus
from simulation.model.network import Link
from support.managers.assignments import assignment_of, nobody_runs

CLUSTER = "outfitter"
TOPICS: Topics = topics(CLUSTER)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class MachineClock(Clock):
    """The simulation's time as one machine shows it: its wall clock is off by `skew_s`, which may change."""

    def __init__(self, loop: Loop, skew_s: float) -> None:
        self._loop = loop
        self.skew_s = skew_s
        self.asleep_s = 0.0

    def monotonic(self) -> float:
        return self._loop.time()

    def utc(self) -> datetime:
        return EPOCH + timedelta(seconds=self._loop.time() + self.skew_s)

    def suspended(self) -> float:
        return self.asleep_s


class Host(Struct, kw_only=True):
    """One machine with devices, and the partition that its name belongs to."""

    name: str
    partition: int
    bench: Bench
    owners: Owners


class Job(Struct, kw_only=True):
    """What there is to do for a manager, by whatever instance: a host's, or a share of all hosts'; and how the next
    instance is configured."""

    name: str
    hosts: Sequence[Host]
    machine: str
    prepares: bool
    limits: Limits
    lease_s: float
    retention_s: float
    chunk: int
    metrics: Metrics
    partitions: int
    skew_s: float = 0.0
    pid_ns: int = PID_NS
    begins_at: float = 0.0
    """When its first manager starts, as the loop counts."""
    catalogue: Catalogue = Catalogue()
    oddities: Oddities = Oddities()

    @property
    def benches(self) -> Mapping[str, Bench]:
        return {host.name: host.bench for host in self.hosts}


class Manager(ABC):
    """One run of a manager. `ended` is how it ended by itself, None while it runs or when it was killed."""

    def __init__(self, loop: Loop, job: Job, link: Link) -> None:
        self.job = job
        self.clock = MachineClock(loop, job.skew_s)
        self.retention_s = job.retention_s
        self.link = link
        self.process: Process = link.process
        self.ended: BaseException | None = None
        self.stopped = False

    @property
    def up(self) -> bool:
        """Whether it runs, be it frozen or cut off."""
        return self.ended is None and not self.stopped and not self.process.dead

    @property
    def gave_up(self) -> bool:
        """Somebody else does its job, and it said so."""
        return self._ended_by(ForeignManagerError, MemberReplacedError)

    @property
    def gave_up_topics(self) -> bool:
        """Its topics were made anew, and it said so."""
        return self._ended_by(TopicsChangedError)

    def _ended_by(self, *kinds: type[Exception]) -> bool:
        """Whether it ended by errors of these kinds alone: two of its tasks may meet them at the same time."""
        return self.ended is not None and all(isinstance(error, kinds) for error in leaves(self.ended))

    async def main(self) -> None:
        """Serve until told to stop, or until it cannot go on."""
        try:
            await self._serve()
            self.stopped = True
        except Exception as error:  # noqa: BLE001 - the simulation looks at it
            self.ended = error

    @abstractmethod
    def serving(self) -> list[tuple[int, Processor]]:
        """The partitions that it answers for, and what does."""

    @abstractmethod
    def stop(self) -> None:
        """Begin an orderly shutdown."""

    @abstractmethod
    async def _serve(self) -> None: ...


class HostManager(Manager):
    """A manager of one host (host scope)."""

    def __init__(self, loop: Loop, job: Job, link: Link, bus: ModelBus, instance: str, *, sweeps: bool = False) -> None:
        """`sweeps`: it looks after what is nobody's, too."""
        super().__init__(loop, job, link)
        [host] = job.hosts
        writer = host_writer(host.name)
        identity = Identity(
            cluster=CLUSTER,
            scope="host",
            host=host.name,
            writer=writer,
            instance=instance,
            machine_id=job.machine,
            boot_id=BOOT,
            pid_ns=job.pid_ns,
        )
        loaded = load(job.benches, prepares=job.prepares, catalogue=job.catalogue, oddities=job.oddities)
        self._host = host
        survivors = Survivors(host.owners, identity, self.clock)
        self._pool = DriverPool(loaded, metrics=job.metrics, survivors=survivors)
        instruments = Instruments.of(job.metrics, self.clock)
        sweeper = self._sweeper = (
            SweepingManager(
                bus,
                partitions=job.partitions,
                identity=identity,
                instruments=instruments,
                beat_s=job.limits.beat_s,
            )
            if sweeps
            else None
        )
        self.processor = Processor(
            assignment_of(bus, identity, partition=host.partition, clock=self.clock),
            rules=Rules(
                writer=writer,
                specs={name: each.spec for name, each in loaded.items()},
                lease_s=job.lease_s,
                retention_s=job.retention_s,
                chunk=job.chunk,
                sees=identity.sees,
                max_bytes=job.limits.max_bytes,
            ),
            limits=job.limits,
            instruments=instruments,
            drivers=self._pool,
            make_process_watch=lambda **options: host.owners.watch(self.process, options["died"], pid_ns=job.pid_ns),
            search_processes=nobody_runs,
            sweeps=lambda: sweeper is not None and sweeper.sweeps,
        )

    def serving(self) -> list[tuple[int, Processor]]:
        return [(self._host.partition, self.processor)] if self.processor.ready else []

    def stop(self) -> None:
        self.processor.stop()

    async def _serve(self) -> None:
        async with anyio.create_task_group() as tasks:
            started = anyio.Event()
            tasks.start_soon(
                lambda: self._pool.run(self.processor.event_queue.add, started=started, host=self._host.name)
            )
            await started.wait()
            if self._sweeper is not None:
                tasks.start_soon(self._sweep, self._sweeper)
            await self.processor.run()
            tasks.cancel_scope.cancel()

    async def _sweep(self, sweeper: SweepingManager) -> None:
        await self.processor.served.wait()
        await sweeper.run()


SETTINGS = config.load(os.devnull, {"scope": "cluster", "host": "here"}, {})


class ReplicaManager(Manager):
    """A replica (cluster scope). A static one has the job's name."""

    def __init__(
        self, loop: Loop, job: Job, link: Link, bus: ModelBus, instance: str, *, static: bool, session_s: float
    ) -> None:
        super().__init__(loop, job, link)
        self._stopping = anyio.Event()
        self.replica = Replica(
            bus,
            structs.replace(
                SETTINGS,
                replica=job.name if static else None,
                session_timeout=session_s,
                on_stop="stay" if static else "leave",
                lease=job.lease_s,
                lease_grace=job.limits.lease_grace_s,
                ended_retention=job.retention_s,
                checkpoint_interval=job.limits.checkpoint_interval_s,
                beat_interval=job.limits.beat_s or 20.0,
                history=job.limits.history is not None,
            ),
            load(job.benches, prepares=job.prepares, catalogue=job.catalogue, oddities=job.oddities),
            identity=Identity(
                cluster=CLUSTER,
                scope="cluster",
                host=None,
                writer="",
                instance=instance,
                machine_id=job.machine,
                boot_id=None,
                pid_ns=None,
            ),
            partitions=job.partitions,
            instruments=Instruments.of(job.metrics, self.clock),
            stopping=self._stopping,
            limits=job.limits,
        )

    def serving(self) -> list[tuple[int, Processor]]:
        return [
            (partition, server.processor)
            for partition, server in self.replica.servers.items()
            if server.processor.ready
        ]

    def stop(self) -> None:
        self._stopping.set()

    async def _serve(self) -> None:
        await self.replica.run()
