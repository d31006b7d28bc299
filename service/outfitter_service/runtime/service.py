"""The life of one host-scope manager: build, start in order, serve, and stop in stages with deadlines.

Order of starting: drivers are built, the machine's lock is taken, the bus is reached and its topics are checked,
then the partition is taken. Nothing is answered before; /readyz says so. Order of stopping: the commit under
way is finished and the ledger says that nobody manages the host, drivers are closed, the bus is closed.
"""

from __future__ import annotations

import anyio
import structlog

from outfitter_proto import bus as buses
from outfitter_proto import rights
from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Bus, BusAuthorizationError, BusError, BusUnavailableError, TopicInfo
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.config import Settings
from outfitter_service.core.decide import Rules
from outfitter_service.metrics import Metrics
from outfitter_service.runtime import loading
from outfitter_service.runtime.drivers import DriverPool, close
from outfitter_service.runtime.identity import alone_on_machine, host_identity
from outfitter_service.runtime.processor import Limits, Processor
from outfitter_service.runtime.snapshots import Pace

log = structlog.get_logger("outfitter.service")

CONNECT_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
MAINTENANCE_S = 60.0
COMMIT_SHARE, DRIVERS_SHARE, BUS_SHARE = 0.5, 0.2, 0.2
"""What the stages of a shutdown get of `shutdown-timeout`: the last commit, closing drivers, closing the bus."""
LOCAL_PARTITIONS = 1
"""Partitions of topics that a manager makes itself, on a bus of one machine."""


class LedgerUnsafeError(RuntimeError):
    """The topics are such that what is written there would be lost or misread."""


class Service:
    """One manager. `run` serves until `stop`; `ready` and `alive` are for probes, at any time."""

    def __init__(self, settings: Settings, *, take_over: bool = False) -> None:
        self.settings = settings
        self._take_over = take_over
        self.loaded = loading.load(settings.resources)
        self.metrics = Metrics(name for name in self.loaded)
        self._identity = host_identity(settings.cluster, settings.host)
        self._processor: Processor | None = None
        self._stopping = anyio.Event()
        self.phase = "starting"

    @property
    def ready(self) -> bool:
        """Whether registrations are being answered."""
        return self._processor is not None and self._processor.ready and not self.stopping

    @property
    def condition(self) -> str:
        """What it does, for people: why it is not ready, if it is not."""
        if self._processor is not None and self.phase == "serving":
            return self._processor.condition
        return self.phase

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Begin an orderly shutdown; `run` returns within `shutdown-timeout`."""
        self._stopping.set()
        if self._processor is not None:
            self._processor.stop()

    async def run(self) -> None:
        """Serve until stopped.

        Raises:
            ManagerExistsError, ForeignManagerError: another manager serves this host.
            LedgerRefusedError, LedgerUnsafeError, BusConfigurationError, UnknownTopicError: it must not be served
                as things are; the message says what to do.
        """
        settings = self.settings
        with alone_on_machine(settings.host):
            bus = buses.connect(settings.bus)
            self.metrics.count_refusals(lambda: bus.refusals)
            log.info(
                "starting", host=settings.host, cluster=settings.cluster, bus=settings.bus, resources=list(self.loaded)
            )
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
        attempt = 0
        while not self._stopping.is_set():
            self.phase = "reaching the bus"
            try:
                await bus.start()
                await self._check_rights(bus)
                await self._check_topics(bus)
                return await bus.topic(topics(self.settings.cluster).registrations)
            except BusUnavailableError as error:
                delay = CONNECT_DELAYS_S[min(attempt, len(CONNECT_DELAYS_S) - 1)]
                attempt += 1
                log.warning("the bus cannot be reached, will try again", error=str(error), delay_s=delay)
                with anyio.move_on_after(delay):
                    await self._stopping.wait()
        return None

    async def _check_rights(self, bus: Bus) -> None:
        """Say all that is missing at once, before anything is tried."""
        wanted = rights.of_manager(self.settings.cluster, [self._identity.writer])
        missing = await bus.missing_rights(wanted)
        if missing:
            raise BusAuthorizationError(f"{bus.url}: {'; '.join(missing)}")

    async def _check_topics(self, bus: Bus) -> None:
        """Make the topics where nobody else does; refuse those on which a ledger would evaporate."""
        cluster = self.settings.cluster
        history = self.settings.history
        if bus.local:
            await wanted_topics.create(bus, cluster, partitions=LOCAL_PARTITIONS, history=history)
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
        settings = self.settings
        names = topics(settings.cluster)
        pool = DriverPool(self.loaded, metrics=self.metrics)
        processor = Processor(
            bus,
            topics=names,
            partition=partition_of(settings.host, registrations.partitions),
            identity=self._identity,
            rules=Rules(
                writer=self._identity.writer,
                specs={name: loaded.spec for name, loaded in self.loaded.items()},
                lease_s=settings.lease,
                wait_s=settings.wait,
                retention_s=settings.ended_retention,
            ),
            limits=Limits(
                lease_grace_s=settings.lease_grace,
                checkpoint_interval_s=settings.checkpoint_interval,
                take_over=self._take_over,
                history=Pace() if settings.history else None,
            ),
            metrics=self.metrics,
            drivers=pool,
        )
        self.metrics.show(processor.standing)
        self._processor = processor
        self.phase = "serving"
        try:
            async with anyio.create_task_group() as tasks:
                started = anyio.Event()
                tasks.start_soon(lambda: pool.run(processor.emit, started=started, host=settings.host))
                await started.wait()
                if bus.local:
                    tasks.start_soon(_maintain, bus)
                tasks.start_soon(self._bound_the_end, tasks.cancel_scope)
                if self._stopping.is_set():
                    processor.stop()
                await processor.run()
                self.phase = "closing drivers"
                tasks.cancel_scope.cancel()
        finally:
            await close(self.loaded.values(), settings.shutdown_timeout * DRIVERS_SHARE)

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
