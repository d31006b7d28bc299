"""Whether the managers of hosts live, for commands that look once, and for those that follow the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from outfitter_proto import keys, names
from outfitter_proto.bus import Bus
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import AllocationState, Checkpoint, Host
from outfitter_proto.signs_of_life import (
    UNSERVED,
    Life,
    SignsOfLife,
    Verdict,
    follow_signs,
    judge,
    read_signs,
    responsible,
)
from outfitter_service.query.cordons import OrderInEffect, host_order, orders_on
from outfitter_service.query.ledger_view import LedgerView, RecordChange
from outfitter_service.query.unanswered import UnansweredMessages


class UnservedHost(NamedTuple):
    """A host and its manager's end. `waiting`: how many workers wait there; `unanswered`: how many messages lie there
    (None: not known). `planned`: the operator's order by which all of the host is taken out, if there is one."""

    host: str
    verdict: Verdict
    waiting: int
    unanswered: int | None
    planned: OrderInEffect | None = None

    @property
    def is_missed(self) -> bool:
        """See `is_missed`. Whoever has taken out the host misses nobody."""
        return self.planned is None and is_missed(self.verdict.life, self.unanswered, waiting=self.waiting)


def is_missed(life: Life, unanswered: int | None, *, waiting: int, holding: int = 0) -> bool:
    """Whether somebody must start a host's manager, which does not serve it. It was killed, or messages lie
    `unanswered`, or workers wait. Those that hold devices count as well, unless the manager stopped in order."""
    return life is Life.DEAD or bool(unanswered or waiting or (holding and life is not Life.STOPPED))


async def lives(bus: Bus, cluster: str, ledger: LedgerView, host: str | None = None) -> dict[str, Verdict]:
    """Whether the manager lives of each host of a ledger, or of `host` only. The ledger was read before.

    Raises:
        BusError: the bus did not answer. Signs of life that cannot be read raise nothing.
    """
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    signs = await read_signs(bus, cluster, range(count) if host is None else [partition_of(host, count)])
    return {
        name: judge(signs, responsible(ledger.checkpoints, name, count), record.manager)
        for name, record in ledger.hosts.items()
    }


async def unserved(bus: Bus, cluster: str, ledger: LedgerView, host: str | None = None) -> list[UnservedHost]:
    """The hosts of a ledger, or `host` only, whose manager is stopped or dead. The ledger was read before.

    Raises:
        BusError: the bus did not answer. Signs of life that cannot be read raise nothing.
    """
    judged = await lives(bus, cluster, ledger, host)
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    found = {name: verdict for name, verdict in judged.items() if verdict.life in UNSERVED}
    last = {name: responsible(ledger.checkpoints, name, count) for name in found}
    checkpoints = {name: checkpoint for name, checkpoint in last.items() if checkpoint is not None}
    messages = UnansweredMessages(bus, cluster)
    await messages.look(checkpoints)
    return [
        UnservedHost(
            name,
            verdict,
            sum(record.state == AllocationState.PENDING for record in ledger.live(name)),
            messages.counts.get(name),
            host_order(orders_on(ledger, name), datetime.now(UTC)),
        )
        for name, verdict in sorted(found.items())
    ]


async def unread_orders(bus: Bus, cluster: str, ledger: LedgerView, served: Iterable[str]) -> dict[str, list[str]]:
    """Why managers cannot read operators' orders, with the names of their writers. `served`: the hosts that count.

    Raises:
        BusError: the bus did not answer.
    """
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    found: dict[str, set[str]] = {}
    for checkpoint in (responsible(ledger.checkpoints, host, count) for host in served):
        if checkpoint is not None and checkpoint.orders_unread:
            found.setdefault(checkpoint.orders_unread, set()).add(checkpoint.writer)
    return {why: sorted(writers) for why, writers in sorted(found.items())}


class FollowedManagers:
    """Whether managers live, for who follows the ledger: it gets each change."""

    def __init__(self, bus: Bus, cluster: str) -> None:
        self._bus = bus
        self._cluster = cluster
        self._signs = SignsOfLife()
        self._hosts: dict[str, Host] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._partitions = 1
        self._seen_at: dict[str, float] = {}
        """When the checkpoint of each writer's instance was first seen."""

    async def follow(self, partition: int, count: int, caught_up: Callable[[], object]) -> None:
        """Follow the signs of life of a partition out of so many, until cancelled. `caught_up` is called once those of
        now are read, or cannot be."""
        self._partitions = max(self._partitions, count)
        await follow_signs(self._bus, self._cluster, partition, self._signs, caught_up=caught_up)

    def put(self, change: RecordChange) -> None:
        record = change.record
        if isinstance(record, Checkpoint):
            before = self._checkpoints.get(record.writer)
            if before is None or before.instance != record.instance:
                self._seen_at[record.writer] = self._signs.monotonic()
            self._checkpoints[record.writer] = record
        elif isinstance(record, Host):
            self._hosts[record.host] = record
        elif change.message.value is None and (change.message.key or b"").startswith(keys.HOST):
            self._hosts.pop(keys.host_of(change.message.key or b"") or "", None)

    def life(self, host: str) -> Verdict:
        """Whether a host's manager lives."""
        checkpoint = responsible(self._checkpoints, host, self._partitions)
        seen_at = -math.inf if checkpoint is None else self._seen_at[checkpoint.writer]
        record = self._hosts.get(host)
        return judge(self._signs, checkpoint, None if record is None else record.manager, seen_at=seen_at)
