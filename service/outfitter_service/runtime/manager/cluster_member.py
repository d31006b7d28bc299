"""One cluster-scope manager: a member of the managers' group, and a server for each partition that it owns.

Membership only assigns partitions. The manager serves those that stay assigned throughout a rebalance. The one writer
of a partition is the manager that fenced it last. Sources: KIP-345 (static members), and the README.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct, structs

from outfitter_proto.bus import Bus, BusError, Membership
from outfitter_proto.names import managers_group, topics
from outfitter_proto.support.causes import in_words
from outfitter_service.config import Settings
from outfitter_service.runtime.changelog.restore import LedgerRefusedError
from outfitter_service.runtime.drivers.supervisor import Loaded
from outfitter_service.runtime.identity import Identity, of_partition
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.scope import PartitionScope
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.manager.partition_server import PartitionServer
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS, Limits

log = structlog.get_logger("outfitter.replica")

HEARTBEATS = 10
"""Heartbeats that a member sends in one session time-out."""
AGAIN_S = 30.0
"""Seconds until a partition whose ledger is refused is tried again."""
REJOIN_S = 1.0
"""Seconds between attempts to join the group."""
ACTIVITY = "joining the managers' group"
"""The activity's name in log lines about outages."""


class _ServedPartition(Struct, frozen=True):
    """A partition's `server`, and the `scope` that is cancelled when the partition is lost."""

    server: PartitionServer
    scope: anyio.CancelScope


class Replica:
    """A member of the managers' group. `run` serves the assigned partitions until `stopping` is set."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        loaded: Mapping[str, Loaded],
        *,
        identity: Identity,
        partitions: int,
        instruments: Instruments,
        stopping: anyio.Event,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        """`loaded`: the drivers, by resource. `identity`: this manager's, without a partition. `partitions`: how many
        partitions the topics have. `stopping`: the service sets it to stop this member. `limits`: of each partition;
        the settings override them."""
        self._bus = bus
        self._settings = settings
        self._loaded = loaded
        self._identity = identity
        self._partitions = partitions
        self._instruments = instruments
        self._stopping = stopping
        self._limits = limits
        self._served: dict[int, _ServedPartition] = {}
        self._membership: Membership | None = None
        self._emptied = anyio.Event()
        self._joining: str | None = ACTIVITY
        """What this member waits for until partitions are assigned to it, and why."""

    @property
    def servers(self) -> dict[int, PartitionServer]:
        """The servers of this member's partitions."""
        return {partition: served.server for partition, served in self._served.items()}

    @property
    def ready(self) -> bool:
        """Whether this manager is a member, and answers the registrations of every partition that it owns."""
        return (
            self._joining is None
            and self._membership is not None
            and all(server.processor.ready for server in self.servers.values())
        )

    @property
    def condition(self) -> str:
        """What the manager does, for people: if it is not ready, why."""
        if self._membership is None or self._joining is not None:
            return self._joining or ACTIVITY
        waiting = [
            f"partition {number}: {server.processor.condition}"
            for number, server in sorted(self.servers.items())
            if not server.processor.ready
        ]
        return "; ".join(waiting) or "serving"

    async def run(self) -> None:
        """Serve until stopped. Then leave the group, unless `on-stop` is `stay`. Serve on until other managers have
        taken over or `shutdown-timeout` is near. At last write which hosts nobody manages now.

        Raises:
            ForeignManagerError: managers of host scope write to the same topics.
            MemberReplacedError: another process is a member under this replica's name.
            BusConfigurationError: the group cannot be joined, for example because a right is missing.
            TopicsChangedError: the ledger was written for other topics.
        """
        settings = self._settings
        async with anyio.create_task_group() as tasks:
            membership = await self._join()
            if membership is None:
                return
            self._membership = membership
            membership.on_trouble(self._note_trouble)
            try:
                async with anyio.create_task_group() as following:
                    following.start_soon(self._serve_assignments, membership, tasks)
                    await self._stopping.wait()
                    following.cancel_scope.cancel()
                if settings.on_stop == "leave":
                    await membership.leave()
                    self._membership = None
                    with anyio.move_on_after(settings.shutdown_timeout / 4):
                        await self._until_nothing_is_served()
                for server in self.servers.values():
                    server.processor.stop(mark_stopped=settings.on_stop == "leave")
                await self._until_nothing_is_served()
            finally:
                self._membership = None
                self._instruments.outage.drop(ACTIVITY)
                with anyio.CancelScope(shield=True), anyio.move_on_after(settings.shutdown_timeout / 4):
                    await membership.aclose()

    async def _join(self) -> Membership | None:
        """Become a member, however long it takes. Returns None if the manager was stopped meanwhile."""
        settings = self._settings
        while not self._stopping.is_set():
            try:
                membership = await self._bus.join(
                    managers_group(settings.cluster),
                    topics(settings.cluster).registrations,
                    replica=settings.replica,
                    session_timeout=settings.session_timeout,
                    heartbeat_interval=settings.session_timeout / HEARTBEATS,
                )
            except BusError as error:
                self._note_trouble(error)
                with anyio.move_on_after(REJOIN_S):
                    await self._stopping.wait()
            else:
                self._note_trouble(None)
                return membership
        self._instruments.outage.drop(ACTIVITY)
        return None

    def _note_trouble(self, trouble: BusError | None) -> None:
        if self._joining is not None:
            self._joining = ACTIVITY if trouble is None else f"{ACTIVITY}: {trouble}"
        if trouble is None:
            self._instruments.outage.passed(ACTIVITY)
        elif not self._stopping.is_set():
            self._instruments.outage.met(ACTIVITY, trouble)

    async def _serve_assignments(self, membership: Membership, tasks: TaskGroup) -> None:
        """Serve exactly the assigned partitions, for ever."""
        while True:
            assigned = await membership.changed()
            self._joining = None
            log.info("partitions assigned", partitions=sorted(assigned))
            for partition in self._served.keys() - assigned:
                # the new owner fences the commit under way here
                self._served[partition].scope.cancel()
            for partition in sorted(assigned - self._served.keys()):
                self._begin(partition, tasks)

    def _begin(self, partition: int, tasks: TaskGroup) -> None:
        scope = anyio.CancelScope()
        self._served[partition] = _ServedPartition(self._server(partition), scope)
        self._emptied = anyio.Event()
        tasks.start_soon(self._serve, partition, scope, tasks)

    def _server(self, partition: int) -> PartitionServer:
        identity = of_partition(self._identity, partition)
        assignment = Assignment(
            bus=self._bus,
            topics=topics(identity.cluster),
            partition=partition,
            partitions=self._partitions,
            identity=identity,
            scope=PartitionScope(partition, self._partitions, identity.writer),
            since=self._instruments.clock.utc(),
        )
        return PartitionServer(
            assignment,
            self._settings,
            self._loaded,
            instruments=self._instruments,
            owns_partition=lambda: self._owns_partition(partition),
            limits=self._limits,
        )

    async def _serve(self, partition: int, scope: anyio.CancelScope, tasks: TaskGroup) -> None:
        """Serve one partition until it is lost or its processor has stopped."""
        try:
            with scope:
                await self._serve_with_retries(partition)
        finally:
            processor = self._served.pop(partition).server.processor
            if not self._served:
                self._emptied.set()
        # the partition was lost, and assigned again while its server was ending
        membership = self._membership
        is_lost = scope.cancelled_caught and not self._stopping.is_set()
        if is_lost and membership is not None and partition in membership.partitions:
            self._begin(partition, tasks)
        await processor.release_memory()

    async def _serve_with_retries(self, partition: int) -> None:
        """Serve one partition. While its ledger is refused, try again repeatedly. The other partitions are served
        meanwhile."""
        while True:
            try:
                await self._served[partition].server.run()
            except* LedgerRefusedError as refused:
                log.critical(
                    "a partition is not served: its ledger is refused",
                    partition=partition,
                    error=in_words(refused),
                    again_s=AGAIN_S,
                )
            else:
                return
            with anyio.move_on_after(AGAIN_S):
                await self._stopping.wait()
            if self._stopping.is_set():
                return
            self._served[partition] = structs.replace(self._served[partition], server=self._server(partition))

    async def _owns_partition(self, partition: int) -> bool:
        """Whether a partition is still assigned to this member, before the processor takes it again. The group's
        coordinator knows; this member's own assignment may be out of date."""
        if self._stopping.is_set():
            self._served[partition].server.processor.stop(mark_stopped=False)
            return False
        membership = self._membership
        return membership is not None and await membership.confirmed(partition)

    async def _until_nothing_is_served(self) -> None:
        while self._served:
            await self._emptied.wait()
