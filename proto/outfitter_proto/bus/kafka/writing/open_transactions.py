"""The open transactions of a partition, their producers, and the command that ends one.

A transaction without a living producer that its coordinator does not know stays open for good. It hides all later
records (KIP-664, "hanging"). Only a principal with Alter on the cluster can abort it.

One kind is our own to end. In Kafka 4.3 a partition may have no leader while the coordinator decides a transaction (a
restarted broker, before it is unfenced). The coordinator then treats the partition as deleted, writes no marker there
and counts the transaction as complete (KAFKA-20734). Its records hide all later ones until this producer id's next
marker decides them, perhaps differently. So the next holder of the transactional id ends an empty transaction there as
the last one ended.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

from outfitter_proto.bus.addresses import Node
from outfitter_proto.bus.kafka.connecting.cluster import Cluster
from outfitter_proto.bus.kafka.connecting.protocol import (
    OK,
    DescribeProducersRequest,
    DescribeTransactionsRequest,
    coordinator_of,
    refusal,
)
from outfitter_proto.bus.port import BusError

SUSPECT_AFTER_S = 3.0
"""Seconds until a transaction in the way is looked at. Managers' transactions last milliseconds."""
LOOK_AGAIN_S = 1.0
OVERDUE_S = 20.0
"""Longer than a manager's transaction can stay open: its time-out of 5 s, and at most 10 s until the broker's next scan
for expired ones. By the writers' clocks and this one, which is why it counts only after `SUSPECT_AFTER_S`."""


class LastTransaction(NamedTuple):
    """A transactional id's last transaction."""

    state: str
    """By Kafka's names."""
    producer_id: int = -1
    """The id's holder's. -1: unknown."""
    epoch: int = -1
    """The id's holder's. -1: unknown."""

    @property
    def is_none(self) -> bool:
        """Whether the coordinator knows no holder, so that no transaction can be open."""
        return not self.state

    @property
    def committed(self) -> bool:
        """Whether the decision is to commit. The next holder aborts an undecided transaction."""
        return self.state in ("PrepareCommit", "CompleteCommit")

    @property
    def is_committing(self) -> bool:
        """Whether some partitions do not show the commit yet."""
        return self.state == "PrepareCommit"

    def then(self, seen: LastTransaction) -> LastTransaction:
        """Combine this state with the later state `seen`. Taking the id raises its epoch by one and makes the
        coordinator forget the state. Then the earlier state counts, unless another producer took the id."""
        forgotten = seen.state == "Empty" and seen.producer_id == self.producer_id and seen.epoch <= self.epoch + 1
        return self._replace(epoch=seen.epoch) if forgotten else seen


async def belongs_to(cluster: Cluster, identity: str, topic: str, partition: int) -> bool:
    """Whether all open transactions of the partition belong to this transactional id; False if unknown."""
    try:
        _, code, _, producers, *_ = await _producers(cluster, topic, partition)
        if code != OK:
            return False
        open_producers = {producer for producer, *_, start, _ in producers if start >= 0}
        if len(open_producers) != 1:
            return False
        current = await holder(cluster, identity)
    except BusError:
        return False
    return current is not None and open_producers == {current[0]}


async def holder(cluster: Cluster, identity: str) -> tuple[int, int] | None:
    """The producer id and epoch of a transactional id's current holder; None: unknown."""
    transaction = await last(cluster, identity)
    return (transaction.producer_id, transaction.epoch) if transaction is not None else None


async def last(cluster: Cluster, identity: str) -> LastTransaction | None:
    """The state of a transactional id's last transaction; None: its coordinator does not know it."""
    coordinator = await cluster.send(None, coordinator_of("transactional-id", identity))
    if coordinator.error_code != OK:
        return None
    node = Node(coordinator.host, coordinator.port)
    answer = await cluster.send(node, DescribeTransactionsRequest(identity))
    [(code, _, state, _, _, producer_id, epoch, *_)] = answer.transaction_states
    return LastTransaction(state, producer_id, epoch) if code == OK else None


class Suspicion:
    """Whether an open transaction of a partition can be no manager's, because it has been open for too long. Whoever
    waits for its end need not wait on."""

    def __init__(self, cluster: Cluster, topic: str, partition: int) -> None:
        self._cluster = cluster
        self._topic = topic
        self._partition = partition
        self._looks_at = time.monotonic() + SUSPECT_AFTER_S

    async def is_overdue(self) -> bool:
        """Whether one is open to which nothing was written for `OVERDUE_S`. It asks the broker now and then."""
        if time.monotonic() < self._looks_at:
            return False
        self._looks_at = time.monotonic() + LOOK_AGAIN_S
        try:
            _, code, _, producers, _ = await _producers(self._cluster, self._topic, self._partition)
        except BusError:
            return False
        written = [at for *_, at, _, start, _ in producers if start >= 0] if code == OK else []
        return any(time.time() - at / 1000 > OVERDUE_S for at in written)


async def sentence(cluster: Cluster, topic: str, partition: int) -> str:
    """A sentence for error messages: the partition's open transactions, oldest first, and how to end the oldest one; or
    why they are unknown."""
    try:
        _, code, detail, producers, *_ = await _producers(cluster, topic, partition)
    except BusError as error:
        return f"whose transaction is open there is not known: {error}"
    if code != OK:
        why = refusal(cluster.login, code, topic=topic, operation="Read", detail=detail)
        return f"the broker does not say whose transaction is open there: {why}"
    open_transactions = sorted((start, *producer) for *producer, start, _ in producers if start >= 0)
    if not open_transactions:
        return "no transaction is open there any more"
    whose = ", ".join(
        f"producer id {producer} (epoch {epoch}) since offset {start}, last written "
        f"{datetime.fromtimestamp(written / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        for start, producer, epoch, _, written, _ in open_transactions
    )
    remedy = f"abort --topic {topic} --partition {partition} --start-offset {open_transactions[0][0]}"
    return (
        f"open transactions: {whose}; their writer ends them when it starts again; if its host is gone for good: "
        f"kafka-transactions --bootstrap-server {cluster.login.nodes[0]} {remedy}"
    )


async def _producers(cluster: Cluster, topic: str, partition: int) -> Any:
    """The leader's answer about the partition's producers: number, error code and message, the producers."""
    request = DescribeProducersRequest(topic, partition)
    return await cluster.ask_leader(topic, partition, request)
