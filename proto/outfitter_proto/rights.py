"""What each of a cluster's parts must be allowed on the bus, and no more: the least rights by role.

Kafka's names of operations and kinds of resources. deploy/security.md has the same as commands; a bus of one machine
has file modes instead. Read and Write bring Describe with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_proto import names
from outfitter_proto.bus.port import Right


def of_manager(cluster: str, writers: Iterable[str], groups: Iterable[str] = ()) -> list[Right]:
    """Of a manager that writes as `writers` (`host/<host>`, `partition/<n>`) and is a member of `groups`."""
    topics = names.topics(cluster)
    return [
        Right("Read", "topic", topics.registrations),
        Right("Read", "topic", topics.allocations),
        Right("Write", "topic", topics.allocations),
        Right("Write", "topic", topics.history),
        Right("Write", "topic", topics.dead_letters),
        *(Right("Write", "transactional-id", names.transactional_id(cluster, writer)) for writer in writers),
        *(Right("Read", "group", group) for group in groups),
    ]


def of_worker(cluster: str) -> list[Right]:
    """Of whoever registers, in whatever language."""
    return [Right("Write", "topic", names.topics(cluster).registrations)]


def of_operator(cluster: str) -> list[Right]:
    """Of whoever reads what a worker has been given. A `RuntimeContext` is worker and operator."""
    return [Right("Read", "topic", names.topics(cluster).allocations)]


def of_monitor(cluster: str) -> list[Right]:
    """Of whoever looks on: `outfitter status`, `watch`, `topics check`, and tools that read all four topics."""
    return [
        Right(operation, "topic", topic) for topic in names.topics(cluster) for operation in ("Read", "DescribeConfigs")
    ]
