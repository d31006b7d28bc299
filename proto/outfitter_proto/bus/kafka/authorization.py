"""Missing rights on the brokers, with the principal and the command that grants them.

Metadata have the rights on topics (KIP-430) but not those on transactional ids and groups. For these we look up the
coordinator. A principal that may do so can also use the id or group, unless it has only Describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.kafka.connecting.protocol import OK, MetadataRequest, coordinator_of, denial
from outfitter_proto.bus.port import Right

_BITS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
"""Kafka's AclOperation codes, which are bits in the answer."""
_UNKNOWN = -(2**31)
_DENIED = frozenset({29, 30, 53})


async def missing(cluster: Cluster, rights: Sequence[Right]) -> list[Right]:
    """The ones of `rights` that our principal lacks, except those on missing topics.

    Raises:
        BusError: see `Cluster.send`.
    """
    topics = sorted({right.name for right in rights if right.kind == "topic"})
    granted = _granted(await cluster.send(None, MetadataRequest(topics, rights=True)))
    lacking: list[Right] = []
    for right in rights:
        if right.kind == "topic":
            if not granted.get(right.name, -1) & 1 << _BITS[right.operation]:
                lacking.append(right)
        elif (await cluster.send(None, coordinator_of(right.kind, right.name))).error_code in _DENIED:
            lacking.append(right)
    return lacking


async def writable(cluster: Cluster, topics: Iterable[str], partition: int) -> list[str]:
    """The topics that have this partition, with a leader, and to which our principal may write.

    Raises:
        BusError: see `Cluster.send`.
    """
    answer = await cluster.send(None, MetadataRequest(sorted(topics), rights=True))
    granted = _granted(answer)
    led = {name for _, name, _, _, partitions, *_ in answer.topics if _has_leader(partitions, partition)}
    return [topic for topic, operations in granted.items() if topic in led and operations & 1 << _BITS["Write"]]


def sentences(login: Login, rights: Iterable[Right]) -> list[str]:
    """A sentence for each missing right."""
    return [denial(login, right) for right in rights]


def _granted(answer: Any) -> dict[str, int]:
    """The rights, as bits, on each topic that exists or that the broker hides from us. All bits if the broker reports
    no rights."""
    granted: dict[str, int] = {}
    for code, name, *_, operations, _tags in answer.topics:
        if code in _DENIED:
            granted[name] = 0
        elif code == OK:
            granted[name] = operations if operations != _UNKNOWN else -1
    return granted


def _has_leader(partitions: Iterable[Sequence[Any]], partition: int) -> bool:
    return any(number == partition and leader >= 0 for _, number, leader, *_ in partitions)
