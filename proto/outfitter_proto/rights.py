"""The rights that a manager needs on the bus. It checks them when it starts.

Operations and kinds of resources have Kafka's names. deploy/security.md has the commands that grant these rights and
those of other users. A bus of one machine has file modes instead. Read and Write include Describe.
"""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_proto import keys, names
from outfitter_proto.bus.port import Right


def of_manager(
    cluster: str, writers: Iterable[str], groups: Iterable[str] = (), *, history: bool = True
) -> list[Right]:
    """The rights of a manager that writes as `writers` (`host/<host>`, `partition/<n>`) and is a member of `groups`.
    `history` False: it writes none."""
    topics = names.topics(cluster)
    return [
        Right("Read", "topic", topics.registrations),
        Right("Read", "topic", topics.allocations),
        *(Right("Write", "topic", topic) for topic in topics.written(history=history)),
        *(Right("Write", "transactional-id", names.transactional_id(cluster, writer)) for writer in writers),
        *(Right("Read", "group", group) for group in groups),
    ]


def of_scope(scope: str, cluster: str, host: str, *, history: bool = True) -> list[Right]:
    """The rights of a manager of that scope: of `host`, or of partitions in cluster scope."""
    if scope == "cluster":
        return of_manager(cluster, [keys.partition_writer(0)], [names.managers_group(cluster)], history=history)
    return of_manager(cluster, [keys.host_writer(host)], history=history)


def of_sweeper(cluster: str) -> list[Right]:
    """The additional right of a manager in host scope that also sweeps. Without it, it leaves that to others."""
    return [Right("Write", "transactional-id", names.transactional_id(cluster, keys.sweeper_writer(0)))]


def of_signs_of_life(cluster: str) -> list[Right]:
    """The right by which a manager says on the bus that it lives. It works without it, and others do not see it."""
    return [Right("Write", "topic", names.managers_topic(cluster))]


def of_orders(cluster: str) -> list[Right]:
    """The right by which a manager reads operators' orders. Without it, those that it has taken stay in effect."""
    return [Right("Read", "topic", names.control_topic(cluster))]


def to_see_sweepers(cluster: str) -> list[Right]:
    """The right by which a manager sees who else sweeps. Without it, it sweeps everywhere, and others are fenced."""
    return [Right("Read", "topic", names.managers_topic(cluster))]
