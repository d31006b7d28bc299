"""Rights on the brokers: which are missing, to whom, and the command that grants them.

Topics' rights are asked for in the metadata (KIP-430), where asking changes nothing. Those on transactional ids and
groups cannot be: whoever may find the coordinator of one may use it, unless Describe alone was granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.login import Login
from outfitter_proto.bus.kafka.connecting.protocol import OK, MetadataRequest, coordinator_of, denial
from outfitter_proto.bus.port import Right

_BITS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
"""Kafka's AclOperation codes, which are the bits of the answer."""
_UNKNOWN = -(2**31)
_DENIED = frozenset({29, 30, 53})


async def missing(cluster: Cluster, wanted: Sequence[Right]) -> list[Right]:
    """Those of `wanted` that our principal lacks. A topic that does not exist is passed over.

    Raises:
        BusError: see `Cluster.send`.
    """
    topics = sorted({right.name for right in wanted if right.kind == "topic"})
    granted = _granted(await cluster.send(None, MetadataRequest(topics, rights=True)))
    found: list[Right] = []
    for right in wanted:
        if right.kind == "topic":
            if not granted.get(right.name, -1) & 1 << _BITS[right.operation]:
                found.append(right)
        elif (await cluster.send(None, coordinator_of(right.kind, right.name))).error_code in _DENIED:
            found.append(right)
    return found


async def writable(cluster: Cluster, topics: Iterable[str], partition: int) -> list[str]:
    """Those topics that our principal may write to and that have this partition, with a leader.

    Raises:
        BusError: see `Cluster.send`.
    """
    answer = await cluster.send(None, MetadataRequest(sorted(topics), rights=True))
    granted = _granted(answer)
    led = {name for _, name, _, _, partitions, *_ in answer.topics if _has_leader(partitions, partition)}
    return [topic for topic, operations in granted.items() if topic in led and operations & 1 << _BITS["Write"]]


def sentences(access: Login, rights: Iterable[Right]) -> list[str]:
    """What is missing, for people."""
    return [denial(access, right) for right in rights]


def _granted(answer: Any) -> dict[str, int]:
    """What we may do with each topic that is known to exist, or that we are not to know of; all bits where the broker
    does not tell."""
    granted: dict[str, int] = {}
    for code, name, *_, operations, _tags in answer.topics:
        if code in _DENIED:
            granted[name] = 0
        elif code == OK:
            granted[name] = operations if operations != _UNKNOWN else -1
    return granted


def _has_leader(partitions: Iterable[Sequence[Any]], wanted: int) -> bool:
    return any(number == wanted and leader >= 0 for _, number, leader, *_ in partitions)
