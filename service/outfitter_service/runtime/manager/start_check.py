"""Whether a manager would start on a ledger. It reads what a manager reads before it fences, and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from outfitter_proto.bus import Bus
from outfitter_proto.names import topics
from outfitter_proto.partitioning import partition_of
from outfitter_service.config import Settings
from outfitter_service.runtime.changelog.restore import LedgerRefusedError, restore
from outfitter_service.runtime.changelog.topic_layout import TopicCheck, TopicsChangedError
from outfitter_service.runtime.identity import host_identity, of_partition, replica_identity
from outfitter_service.runtime.input.assignment import Assignment
from outfitter_service.runtime.input.scope import HostScope, PartitionScope
from outfitter_service.runtime.processor.takeover import ForeignManagerError, refuse_foreign


async def refusals(bus: Bus, settings: Settings) -> list[str]:
    """Why a manager with these settings would refuse this ledger, or hosts of it. Empty: it would start.

    Raises:
        BusError: the bus did not answer, or a topic is missing.
    """
    partitions = (await bus.topic(topics(settings.cluster).allocations)).partitions
    hosts: list[str] = []
    for assignment in _assignments(bus, settings, partitions):
        check = TopicCheck(assignment, history=settings.history, adopt=False)
        try:
            await check.check()
            restored = await restore(bus, assignment.topics.allocations, assignment.partition, assignment.scope)
            refuse_foreign(assignment, restored, take_over=False)
            await check.check_restored(restored, taken=False)
        except (LedgerRefusedError, TopicsChangedError, ForeignManagerError) as error:
            return [str(error)]
        hosts += assignment.scope.refused.values()
    return hosts


def _assignments(bus: Bus, settings: Settings, partitions: int) -> Iterator[Assignment]:
    """What managers of the settings' scope would serve: one host, or all partitions."""
    named, now = topics(settings.cluster), datetime.now(UTC)
    if settings.scope == "host":
        identity = host_identity(settings.cluster, settings.host)
        partition = partition_of(settings.host, partitions)
        scope = HostScope(settings.host, identity.writer)
        yield Assignment(bus=bus, topics=named, partition=partition, identity=identity, scope=scope, since=now)
        return
    replica = replica_identity(settings.cluster)
    for partition in range(partitions):
        identity = of_partition(replica, partition)
        shared = PartitionScope(partition, partitions, identity.writer)
        yield Assignment(bus=bus, topics=named, partition=partition, identity=identity, scope=shared, since=now)
