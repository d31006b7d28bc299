"""The open transactions of a partition, their producers, and how people can end one.

A transaction without a living producer that its coordinator does not know stays open for good. It hides all later
records (KIP-664, "hanging"). Only a principal with Alter on the cluster can abort it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.protocol import (
    OK,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    coordinator_of,
    refusal,
)
from outfitter_proto.bus.kafka.writing.producer import Last
from outfitter_proto.bus.port import BusError


async def belongs_to(cluster: Cluster, identity: str, topic: str, partition: int) -> bool:
    """Whether all open transactions of the partition belong to this transactional id; False if unknown."""
    try:
        _, code, _, producers, _ = await _producers(cluster, topic, partition)
        if code != OK:
            return False
        open_there = {producer for producer, *_, start, _ in producers if start >= 0}
        if len(open_there) != 1:
            return False
        found = await holder(cluster, identity)
    except BusError:
        return False
    return found is not None and open_there == {found[0]}


async def holder(cluster: Cluster, identity: str) -> tuple[int, int] | None:
    """The producer id and epoch of a transactional id's current holder; None if its coordinator does not tell."""
    found = await last(cluster, identity)
    return (found.producer_id, found.epoch) if found is not None else None


async def last(cluster: Cluster, identity: str) -> Last | None:
    """The state of a transactional id's last transaction; None if its coordinator does not tell."""
    found = await cluster.send(None, coordinator_of("transactional-id", identity))
    if found.error_code != OK:
        return None
    answer = await cluster.send(Node(found.host, found.port), DescribeTransactionsRequest(identity))
    [(code, _, state, _, _, producer_id, epoch, *_)] = answer.transaction_states
    return Last(state, producer_id, epoch) if code == OK else None


async def sentence(cluster: Cluster, topic: str, partition: int) -> str:
    """A sentence about the partition's open transactions, oldest first, and how to end the oldest one, or about why
    this is unknown."""
    try:
        _, code, detail, producers, _ = await _producers(cluster, topic, partition)
    except BusError as error:
        return f"whose transaction is open there is not known: {error}"
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


async def _producers(cluster: Cluster, topic: str, partition: int) -> Any:
    """The leader's answer about the partition's producers: number, error code and message, the producers."""
    request = DescribeProducersRequest(topic, partition)
    return _only(await cluster.ask_leader(topic, partition, request, lambda response: int(_only(response)[1])))


def _only(response: Any) -> Any:
    [(_, [partition], _)] = response.topics
    return partition
