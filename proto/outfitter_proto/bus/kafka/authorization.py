"""Rights on the brokers: which are missing, to whom, and the command that grants them.

Topics' rights are asked for in the metadata (KIP-430), where asking changes nothing. Those on transactional ids and
groups cannot be: whoever may find the coordinator of one may use it, unless Describe alone was granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from aiokafka.protocol.coordination import FindCoordinatorRequest

from outfitter_proto.bus.kafka.access import Access
from outfitter_proto.bus.kafka.cluster import Cluster
from outfitter_proto.bus.kafka.protocol import OK, MetadataRequest, denial
from outfitter_proto.bus.port import Right

_BITS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}
"""Kafka's AclOperation codes, which are the bits of the answer."""
_UNKNOWN = -(2**31)
_COORDINATORS = {"group": 0, "transactional-id": 1}
_DENIED = frozenset({29, 30, 53})


async def missing(cluster: Cluster, wanted: Sequence[Right]) -> list[Right]:
    """Those of `wanted` that our principal lacks. A topic that does not exist is passed over.

    Raises:
        BusError: see `Cluster.send`.
    """
    granted = await _granted(cluster, {right.name for right in wanted if right.kind == "topic"})
    found: list[Right] = []
    for right in wanted:
        if right.kind == "topic":
            if not granted.get(right.name, -1) & 1 << _BITS[right.operation]:
                found.append(right)
        elif (await cluster.send(None, _coordinator_of(right))).error_code in _DENIED:
            found.append(right)
    return found


async def writable(cluster: Cluster, topics: Iterable[str]) -> list[str]:
    """Those topics that exist and that our principal may write to.

    Raises:
        BusError: see `Cluster.send`.
    """
    granted = await _granted(cluster, set(topics))
    return [topic for topic, operations in granted.items() if operations & 1 << _BITS["Write"]]


def sentences(access: Access, rights: Iterable[Right]) -> list[str]:
    """What is missing, for people."""
    return [denial(access, right) for right in rights]


async def _granted(cluster: Cluster, topics: Set[str]) -> dict[str, int]:
    """What we may do with each topic that is known to exist, or that we are not to know of; all bits where the broker
    does not tell."""
    answer = await cluster.send(None, MetadataRequest(sorted(topics), rights=True))
    granted: dict[str, int] = {}
    for code, name, *_, operations, _tags in answer.topics:
        if code in _DENIED:
            granted[name] = 0
        elif code == OK:
            granted[name] = operations if operations != _UNKNOWN else -1
    return granted


def _coordinator_of(right: Right) -> FindCoordinatorRequest:
    return FindCoordinatorRequest(right.name, _COORDINATORS[right.kind])
