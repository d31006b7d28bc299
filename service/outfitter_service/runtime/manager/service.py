"""The life of one manager: build, start in order, serve, and stop in stages with deadlines.

Order of starting: drivers are built, the machine's lock is taken, the bus is reached and its topics are checked,
then the partition is taken. Nothing is answered before; /readyz says so. Order of stopping: the commit under
way is finished and the ledger says that nobody manages the host, drivers are closed, the bus is closed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta

import anyio
import structlog
from msgspec import structs

from outfitter_proto import bus as buses
from outfitter_proto import rights
from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Bus, BusAuthorizationError, BusError, BusUnavailableError, TopicInfo
from outfitter_proto.keys import host_writer, partition_writer
from outfitter_proto.names import managers_group, topics
from outfitter_proto.partitioning import partition_of
from outfitter_proto.support.backoff import Backoff
from outfitter_service.config import Settings
from outfitter_service.metrics import Metrics, StateCounts
from outfitter_service.runtime.drivers import loading
from outfitter_service.runtime.drivers.pool import close
from outfitter_service.runtime.identity import host_identity, replica_identity
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.scope import HostScope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.machine_lock import alone_on_machine
from outfitter_service.runtime.manager.cluster_member import Replica
from outfitter_service.runtime.manager.partition_server import PartitionServer
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS
from outfitter_service.runtime.processor.processor import Processor
from outfitter_service.runtime.sweeper.group_member import SweeperMember, at_work

log = structlog.get_logger("outfitter.service")

CONNECT_BACKOFF_S = (0.2, 5.0)
MAINTENANCE_S = 60.0
COMMIT_SHARE, DRIVERS_SHARE, BUS_SHARE = 0.5, 0.2, 0.2
"""What the stages of a shutdown get of `shutdown-timeout`: the last commit, closing drivers, closing the bus."""
LOCAL_PARTITIONS = 1
"""Partitions of topics that a manager makes itself, on a bus of one machine."""


class LedgerUnsafeError(RuntimeError):
    """The topics are such that what is written there would be lost or misread."""


class Service:
    """One manager. `run` serves until `stop`; `ready` and `alive` are for probes, at any time."""

    def __init__(self, settings: Settings, *, take_over: bool = False, adopt_ledger: bool = False) -> None:
        """`take_over`: accept a ledger that another machine wrote. `adopt_ledger`: accept one that was written to
        another topic, or is gone."""
        self.settings = settings
        self._take_over = take_over
        self._adopt = adopt_ledger
        self.loaded = loading.load(settings.resources, scope=settings.scope)
        self.metrics = Metrics(
            self.loaded,
            host=settings.host if settings.scope == "host" else "",
            cluster=settings.cluster,
            scope=settings.scope,
        )
        self.metrics.ready.set_function(lambda: float(self.ready))
        self._server: PartitionServer | None = None
        self._replica: Replica | None = None
        self._instruments = Instruments.of(self.metrics)
        self._stopping = anyio.Event()
        self.phase = "starting"

    @property
    def ready(self) -> bool:
        """Whether registrations are being answered."""
        if self.stopping:
            return False
        if self._replica is not None:
            return self._replica.ready
        return self._server is not None and self._server.processor.ready

    @property
    def condition(self) -> str:
        """What it does, for people: why it is not ready, if it is not."""
        if self.phase != "serving":
            return self.phase
        if self._replica is not None:
            return self._replica.condition
        return self._server.processor.condition if self._server is not None else self.phase

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Begin an orderly shutdown; `run` returns within `shutdown-timeout`."""
        self._stopping.set()
        if self._server is not None:
            self._server.processor.stop()

    def alone(self) -> AbstractContextManager[None]:
        """While this is entered no other manager of this machine serves the host. `run` needs it.

        Raises (on entry):
            ManagerExistsError: another one does.
        """
        return alone_on_machine(self.settings.host) if self.settings.scope == "host" else nullcontext()

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ForeignManagerError: another manager serves this host.
            LedgerRefusedError, LedgerUnsafeError, TopicsChangedError, BusConfigurationError, UnknownTopicError: it must
                not be served as things are; the message says what to do.
        """
        settings = self.settings
        bus = buses.connect(settings.bus, settings.login)
        self.metrics.count_refusals(lambda: bus.refusals)
        log.info(
            "starting",
            scope=settings.scope,
            host=settings.host,
            cluster=settings.cluster,
            bus=settings.bus,
            resources=list(self.loaded),
        )
        if not self.loaded:
            log.warning("no resource is configured, so none is served", key="external-resources")
        try:
            registrations = await self._reach(bus)
            if registrations is not None:
                await self._serve(bus, registrations)
        finally:
            self.phase = "stopped"
            with anyio.CancelScope(shield=True), anyio.move_on_after(settings.shutdown_timeout * BUS_SHARE):
                await bus.aclose()
        log.info("stopped", host=settings.host)

    async def _reach(self, bus: Bus) -> TopicInfo | None:
        """Connect and check the topics, for as long as it takes; what is said of the registrations' one, None when
        stopped meanwhile."""
        backoff = Backoff(*CONNECT_BACKOFF_S)
        while not self._stopping.is_set():
            self.phase = "reaching the bus"
            try:
                await bus.start()
                await self._check_rights(bus)
                await self._check_topics(bus)
                found = await bus.topic(topics(self.settings.cluster).registrations)
                self._instruments.outage.passed("reaching the bus")
                return found
            except BusUnavailableError as error:
                self._instruments.outage.met("reaching the bus", error)
                with anyio.move_on_after(backoff.next_delay()):
                    await self._stopping.wait()
        return None

    async def _check_rights(self, bus: Bus) -> None:
        """Say all that is missing at once, before anything is tried."""
        cluster = self.settings.cluster
        if self.settings.scope == "cluster":
            writers, groups = [partition_writer(0)], [managers_group(cluster)]
        else:
            writers, groups = [host_writer(self.settings.host)], []
        wanted = rights.of_manager(cluster, writers, groups, history=self.settings.history)
        missing = await bus.missing_rights(wanted)
        if missing:
            raise BusAuthorizationError(f"{bus.url}: {'; '.join(missing)}")

    async def _check_topics(self, bus: Bus) -> None:
        """Make the topics where nobody else does; refuse those on which a ledger would evaporate."""
        cluster = self.settings.cluster
        history = self.settings.history
        if bus.local:
            partitions = await wanted_topics.partition_count(bus, cluster) or LOCAL_PARTITIONS
            await wanted_topics.create(bus, cluster, partitions=partitions, history=history)
        fatal: list[str] = []
        for difference in await wanted_topics.check(bus, cluster, history=history):
            told = (
                f"topic {difference.topic}: {difference.setting} is {difference.found}, "
                f"should be {difference.wanted} ({difference.why})"
            )
            if difference.fatal:
                fatal.append(told)
            else:
                log.warning("a topic is not as it should be", topic=difference.topic, problem=told)
        if fatal:
            raise LedgerUnsafeError("; ".join(fatal) + ". See `outfitter topics check`")

    async def _serve(self, bus: Bus, registrations: TopicInfo) -> None:
        self.metrics.show(self._state_counts)
        try:
            async with anyio.create_task_group() as tasks:
                if bus.local:
                    tasks.start_soon(_maintain, bus)
                tasks.start_soon(self._bound_the_end, tasks.cancel_scope)
                server = self._server_of(bus, registrations.partitions)
                if isinstance(server, PartitionServer):
                    tasks.start_soon(self._sweep, bus, server, registrations.partitions)
                await server.run()
                self.phase = "closing drivers"
                tasks.cancel_scope.cancel()
        finally:
            await close(self.loaded.values(), self.settings.shutdown_timeout * DRIVERS_SHARE)

    def _server_of(self, bus: Bus, partitions: int) -> PartitionServer | Replica:
        """What serves this manager's scope."""
        settings = self.settings
        self.phase = "serving"
        if settings.scope == "cluster":
            self._replica = Replica(
                bus,
                settings,
                self.loaded,
                identity=replica_identity(settings.cluster),
                partitions=partitions,
                instruments=self._instruments,
                stopping=self._stopping,
                limits=structs.replace(DEFAULT_LIMITS, adopt=self._adopt),
            )
            return self._replica
        identity = host_identity(settings.cluster, settings.host)
        assignment = Assignment(
            bus=bus,
            topics=topics(settings.cluster),
            partition=partition_of(settings.host, partitions),
            partitions=partitions,
            identity=identity,
            scope=HostScope(settings.host, identity.writer),
            since=self._instruments.clock.utc(),
        )
        self._server = PartitionServer(
            assignment,
            settings,
            self.loaded,
            instruments=self._instruments,
            limits=structs.replace(DEFAULT_LIMITS, take_over=self._take_over, adopt=self._adopt),
        )
        if self.stopping:
            self._server.processor.stop()
        return self._server

    def _state_counts(self) -> StateCounts:
        return StateCounts.together(processor.state_counts() for processor in self._processors())

    def _processors(self) -> list[Processor]:
        if self._replica is not None:
            return [server.processor for server in self._replica.servers.values()]
        return [self._server.processor] if self._server is not None else []

    async def _sweep(self, bus: Bus, server: PartitionServer, partitions: int) -> None:
        """Once the own host is served, look after what is nobody's."""
        await server.processor.served.wait()
        silent = timedelta(seconds=2 * self.settings.checkpoint_interval)
        others = at_work(server.processor.neighbours, since=datetime.now(UTC) - silent)
        sweeper = SweeperMember(bus, partitions=partitions, identity=server.identity, instruments=self._instruments)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sweeper.run_by_turns, others)
            await self._stopping.wait()
            tasks.cancel_scope.cancel()

    async def _bound_the_end(self, scope: anyio.CancelScope) -> None:
        """A last commit that hangs (the bus is away) is given up at its deadline: nothing decided is lost by that."""
        await self._stopping.wait()
        share = self.settings.shutdown_timeout * COMMIT_SHARE
        await anyio.sleep(share)
        log.warning("the last commit took too long, ending as it stands", after_s=share)
        scope.cancel()


async def _maintain(bus: Bus) -> None:
    """Keep a local bus small; its trouble is logged and nothing else."""
    while True:
        await anyio.sleep(MAINTENANCE_S)
        try:
            await bus.maintain()
        except BusError as error:
            log.warning("the bus could not be compacted, will try again", error=str(error))
