"""What a manager must be allowed on the bus, and no more; it looks for these rights when it starts.

Kafka's names of operations and kinds of resources. deploy/security.md has the same as commands, and those of everybody
else; a bus of one machine has file modes instead. Read and Write bring Describe with them.
"""

from __future__ import annotations

from collections.abc import Iterable

from outfitter_proto import names
from outfitter_proto.bus.port import Right


def of_manager(
    cluster: str, writers: Iterable[str], groups: Iterable[str] = (), *, history: bool = True
) -> list[Right]:
    """Of a manager that writes as `writers` (`host/<host>`, `partition/<n>`) and is a member of `groups`."""
    topics = names.topics(cluster)
    return [
        Right("Read", "topic", topics.registrations),
        Right("Read", "topic", topics.allocations),
        *(Right("Write", "topic", topic) for topic in topics.written(history=history)),
        *(Right("Write", "transactional-id", names.transactional_id(cluster, writer)) for writer in writers),
        *(Right("Read", "group", group) for group in groups),
    ]


def of_sweeper(cluster: str) -> list[Right]:
    """What a host-scope manager needs besides to look after what is nobody's; without, it leaves that to others."""
    return [
        Right("Read", "group", names.sweepers_group(cluster)),
        Right("Write", "transactional-id", names.transactional_id(cluster, names.sweeper_writer(0))),
    ]
