"""What keeps a partition's end undecided: transactions that are open there, for people who have to end one.

A transaction that no living producer and no coordinator knows of stays open for good and hides all that comes behind
it (KIP-664, "hanging"). Only a principal with Alter on the cluster can end another's, by aborting it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outfitter_proto.bus.kafka.cluster import Cluster
from outfitter_proto.bus.kafka.protocol import OK, DescribeProducersRequest, refusal
from outfitter_proto.bus.port import BusError


async def sentence(cluster: Cluster, topic: str, partition: int) -> str:
    """Whose transactions are open in the partition, oldest first, and how to end the oldest one; says so where the
    broker does not tell."""
    request = DescribeProducersRequest(topic, partition)
    try:
        answer = await cluster.ask_leader(topic, partition, request, lambda response: int(_only(response)[1]))
    except BusError as error:
        return f"whose transaction is open there is not known: {error}"
    _, code, detail, producers, _ = _only(answer)
    if code != OK:
        why = refusal(cluster.access, code, topic=topic, operation="Read", detail=detail)
        return f"whose transaction is open there is not told: {why}"
    found = sorted((start, *who) for *who, start, _ in producers if start >= 0)
    if not found:
        return "no transaction is open there any more"
    whose = ", ".join(
        f"producer id {producer} (epoch {epoch}) since offset {start}, last written "
        f"{datetime.fromtimestamp(written / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        for start, producer, epoch, _, written, _ in found
    )
    remedy = f"abort --topic {topic} --partition {partition} --start-offset {found[0][0]}"
    return (
        f"open transactions: {whose}; who wrote there ends it when started again; if that host is gone for good: "
        f"kafka-transactions --bootstrap-server {cluster.access.nodes[0]} {remedy}"
    )


def _only(response: Any) -> Any:
    [(_, [partition], _)] = response.topics
    return partition
