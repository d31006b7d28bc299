"""The life of one manager: build, start in order, serve, and stop in stages with deadlines.

Start: build the drivers, take the machine's lock, reach the bus, check its topics, take the partition. Before that the
manager answers nothing, and /readyz says so. Stop: finish the commit under way, write into the ledger that nobody
manages the host, close the drivers, close the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import anyio
import structlog
from msgspec import structs

from outfitter_proto import bus as buses
from outfitter_proto import rights
from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Bus, BusAuthorizationError, BusError, BusUnavailableError, TooLargeError, TopicInfo
from outfitter_proto.names import topics
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
from outfitter_service.runtime.machine_lock import alone_on_machine, others
from outfitter_service.runtime.manager.cluster_member import Replica
from outfitter_service.runtime.manager.partition_server import PartitionServer
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS
from outfitter_service.runtime.processor.processor import Processor
from outfitter_service.runtime.sweeper.sweeping_manager import SweepingManager

log = structlog.get_logger("outfitter.service")

CONNECT_BACKOFF_S = (0.2, 5.0)
"""The first and the longest delay between attempts to reach the bus."""
REACHING = "reaching the bus"
"""The activity's name in log lines about outages, and behind /readyz."""
MAINTENANCE_S = 60.0
"""Seconds between two compactions of a local bus."""
COMMIT_SHARE, DRIVERS_SHARE, BUS_SHARE = 0.5, 0.2, 0.2
"""Shares of `shutdown-timeout` for the stages of a shutdown: the last commit, closing drivers, closing the bus."""
LOCAL_PARTITIONS = 1
"""Partitions of the topics that a manager creates itself, on a bus of one machine."""
HOSTS_SHOWN = 5
"""How many other hosts of this machine a log line names."""


class LedgerUnsafeError(RuntimeError):
    """The topics' settings would lose or misread records."""


class Service:
    """One manager. `run` serves until `stop`. Probes may read `ready` and `condition` at any time."""

    def __init__(self, settings: Settings, *, take_over: bool = False, adopt_ledger: bool = False) -> None:
        """`take_over`: accept a ledger that another machine wrote. `adopt_ledger`: accept a ledger that was written to
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
        self._sweeper: SweepingManager | None = None
        self._instruments = Instruments.of(self.metrics)
        self._stopping = anyio.Event()
        self.phase = "starting"
        self._held_back: Callable[[], str | None] = lambda: None

    @property
    def ready(self) -> bool:
        """Whether the manager answers registrations."""
        if self.stopping:
            return False
        if self._replica is not None:
            return self._replica.ready
        return self._server is not None and self._server.processor.ready

    @property
    def condition(self) -> str:
        """What the manager does, for people: if it is not ready, why."""
        condition = self.phase
        if self.phase == "serving" and self._replica is not None:
            condition = self._replica.condition
        elif self.phase == "serving" and self._server is not None:
            condition = self._server.processor.condition
        return "; ".join(filter(None, (condition, self._held_back())))

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Begin an orderly shutdown; `run` returns within `shutdown-timeout`."""
        self._stopping.set()
        if self._server is not None:
            self._server.processor.stop()

    def alone(self) -> AbstractContextManager[None]:
        """A context in which no other manager of this machine serves the host. `run` needs it.

        Raises (on entry):
            ManagerExistsError: another manager serves it.
        """
        return _alone_on_machine(self.settings.host) if self.settings.scope == "host" else nullcontext()

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ForeignManagerError: another manager serves this host.
            LedgerRefusedError, LedgerUnsafeError, TopicsChangedError, UnrecordedWorkersError, BusConfigurationError,
                UnknownTopicError: the host must not be served now; the message says what to do.
        """
        settings = self.settings
        bus = buses.connect(settings.bus, settings.login, client=f"{buses.CLIENT}-manager-{settings.host}")
        self.metrics.count_refusals(lambda: bus.refusals)
        self._held_back = lambda: bus.patience.sentence
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
        """Connect and check the topics, however long it takes. Returns the registrations topic, or None if the manager
        was stopped meanwhile."""
        backoff = Backoff(*CONNECT_BACKOFF_S)
        self.phase = REACHING
        while not self._stopping.is_set():
            try:
                await bus.start()
                await self._check_rights(bus)
                await self._check_topics(bus)
                registrations = await bus.topic(topics(self.settings.cluster).registrations)
                self._instruments.outage.passed(REACHING)
                return registrations
            except (BusUnavailableError, TooLargeError) as error:
                self.phase = f"{REACHING}: {error}"
                self._instruments.outage.met(REACHING, error)
                with anyio.move_on_after(backoff.next_delay()):
                    await self._stopping.wait()
        return None

    async def _check_rights(self, bus: Bus) -> None:
        """Check all rights at once, before anything else is tried.

        Raises:
            BusAuthorizationError: rights are missing; the message names them all.
        """
        settings = self.settings
        needed = rights.of_scope(settings.scope, settings.cluster, settings.host, history=settings.history)
        missing = await bus.missing_rights(needed)
        if missing:
            raise BusAuthorizationError(f"{bus.url}: {'; '.join(missing)}")

    async def _check_topics(self, bus: Bus) -> None:
        """Create the topics on a local bus, and check them.

        Raises:
            LedgerUnsafeError: the topics' settings would lose or misread records.
            TooLargeError: a topic takes less than a commit may have.
        """
        cluster = self.settings.cluster
        history = self.settings.history
        if bus.local:
            partitions = await wanted_topics.partition_count(bus, cluster) or LOCAL_PARTITIONS
            await wanted_topics.create(bus, cluster, partitions=partitions, history=history)
        fatal: list[str] = []
        too_small: list[str] = []
        for difference in await wanted_topics.check(bus, cluster, history=history):
            problem = (
                f"topic {difference.topic}: {difference.setting} is {difference.found}, "
                f"should be {difference.wanted} ({difference.why})"
            )
            if difference.fatal and difference.waits:
                too_small.append(f"{problem}: {difference.remedy}")
            elif difference.fatal:
                fatal.append(problem)
            else:
                log.warning("a topic is not as it should be", topic=difference.topic, problem=problem)
        if fatal:
            raise LedgerUnsafeError("; ".join(fatal) + ". See `outfitter topics check`")
        if too_small:
            raise TooLargeError("; ".join(too_small))

    async def _serve(self, bus: Bus, registrations: TopicInfo) -> None:
        self.metrics.show(self._state_counts)
        try:
            async with anyio.create_task_group() as tasks:
                if bus.local:
                    tasks.start_soon(_maintain, bus)
                tasks.start_soon(self._limit_shutdown, tasks.cancel_scope)
                server = self._server_of(bus, registrations.partitions)
                if isinstance(server, PartitionServer):
                    tasks.start_soon(self._sweep, bus, server, registrations.partitions)
                await server.run()
                self.phase = "closing drivers"
                tasks.cancel_scope.cancel()
        finally:
            await close(self.loaded.values(), self.settings.shutdown_timeout * DRIVERS_SHARE)

    def _server_of(self, bus: Bus, partitions: int) -> PartitionServer | Replica:
        """The server of this manager's scope."""
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
            sweeps=lambda: self._sweeper is None or self._sweeper.sweeps,
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
        """Take part in sweeping unroutable messages, once the manager's own host is served."""
        await server.processor.served.wait()
        sweeper = self._sweeper = SweepingManager(
            bus,
            partitions=partitions,
            identity=server.identity,
            instruments=self._instruments,
            beat_s=self.settings.beat_interval,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sweeper.run)
            await self._stopping.wait()
            tasks.cancel_scope.cancel()

    async def _limit_shutdown(self, scope: anyio.CancelScope) -> None:
        """Give up a last commit that hangs (the bus is away) at its deadline. The next start decides its events
        again."""
        await self._stopping.wait()
        share = self.settings.shutdown_timeout * COMMIT_SHARE
        await anyio.sleep(share)
        log.warning("the last commit took too long, ending without waiting for it", after_s=share)
        scope.cancel()


async def _maintain(bus: Bus) -> None:
    """Keep a local bus small. Errors are only logged."""
    while True:
        await anyio.sleep(MAINTENANCE_S)
        try:
            await bus.maintain()
        except BusError as error:
            log.warning("the bus could not be compacted, will try again", error=str(error))


@contextmanager
def _alone_on_machine(host: str) -> Iterator[None]:
    """Hold the machine's lock for `host`, and say which other hosts managers serve here."""
    with alone_on_machine(host):
        hosts = others(host)
        if hosts:
            log.warning(
                "other managers serve this machine as other hosts, and may lend the same devices",
                hosts=hosts[:HOSTS_SHOWN],
                managers=len(hosts),
                remedy="let one manager serve all workers of a machine, unless they lend different devices",
            )
        yield
