"""A host-scope manager's part in sweeping messages for hosts without a manager.

The manager is a member of the group of sweepers, and sweeps the partitions that the group assigns to it
(partition_sweeper.py). This does not affect the manager's own host, and no error here ends the manager.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from datetime import datetime
from functools import partial

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct

from outfitter_proto import rights
from outfitter_proto.bus import Bus, BusError, MemberReplacedError, Membership
from outfitter_proto.codec import WireError, decode_ledger
from outfitter_proto.keys import HOST, checkpoint_key, host_of, host_writer
from outfitter_proto.names import sweepers_group, topics
from outfitter_proto.partitioning import murmur2
from outfitter_proto.records import Checkpoint, Host, LedgerRecord
from outfitter_proto.support.backoff import Backoff
from outfitter_service.runtime.identity import Identity
from outfitter_service.runtime.instruments import Instruments
from outfitter_service.runtime.sweeper.partition_sweeper import GRACE_S, PartitionSweeper, SweepContext

log = structlog.get_logger("outfitter.sweeper")

SESSION_S, HEARTBEAT_S = 10.0, 2.5
"""Seconds after which the group gives up a killed sweeper, and seconds between two heartbeats."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
"""Seconds between attempts to join."""
CANDIDATES = 16
"""How many hosts of a partition take part. If all managers of a large fleet were in one group, each start and stop of
a manager would delay all others."""
TURN_S = 3600.0
"""Seconds of one turn. In each turn, some of the other managers take part by chance, because all candidates may have
died."""


def at_work(neighbours: Mapping[bytes, bytes], *, since: datetime) -> list[str]:
    """The hosts whose manager works: it has committed after `since`, and the host's record does not say that it has
    stopped. `neighbours`: ledger records by key, encoded."""
    hosts: list[str] = []
    for key, value in neighbours.items():
        if key.startswith(HOST):
            host = host_of(key) or ""
            record = _read(value)
            last = _read(neighbours.get(checkpoint_key(host_writer(host)).encode()))
            is_stopped = not isinstance(record, Host) or record.manager.stopped_at is not None
            if not is_stopped and isinstance(last, Checkpoint) and last.at > since:
                hosts.append(host)
    return hosts


def is_candidate(host: str, others: Collection[str]) -> bool:
    """Whether `host`'s manager always takes part in sweeping: it is one of the first by the hash of their names.
    `others`: the partition's other hosts with a working manager."""
    own = murmur2(host.encode())
    return sum(murmur2(other.encode()) < own for other in others) < CANDIDATES


def _read(value: bytes | None) -> LedgerRecord | None:
    try:
        return decode_ledger(value) if value is not None else None
    except WireError:
        return None


ACTIVITY = "joining the group of sweepers"
"""The activity's name in log lines about outages."""


class SweeperMember(Struct, frozen=True):
    """Takes part in sweeping while `run` runs.

    `partitions`: how many partitions the topics have. `identity`: the manager that sweeps. `grace_s`: seconds that a
    message of a host without a manager waits for one. `session_s`: seconds until the group gives a killed member's
    partitions to others. `heartbeat_s`: seconds between two heartbeats."""

    bus: Bus
    partitions: int
    identity: Identity
    instruments: Instruments
    grace_s: float = GRACE_S
    session_s: float = SESSION_S
    heartbeat_s: float = HEARTBEAT_S
    _sweepers: dict[int, tuple[PartitionSweeper, anyio.CancelScope]] = {}

    @property
    def is_sweeping(self) -> bool:
        """Whether it sweeps some partition now."""
        return bool(self._sweepers)

    async def run_by_turns(self, others: Collection[str]) -> None:
        """Sweep always, or only in some turns, until cancelled. `others`: the partition's other hosts with a working
        manager. Returns if rights are missing."""
        if is_candidate(self.identity.host or "", others):
            await self.run()
            return
        log.info("other managers sweep, and this one only in some turns", others=len(others))
        while True:
            with anyio.move_on_after(TURN_S) as turn:
                if random.random() < CANDIDATES / len(others):  # noqa: S311 - chance, not a secret
                    await self.run()
                else:
                    await anyio.sleep_forever()
            if not turn.cancelled_caught:
                return

    async def run(self) -> None:
        """Sweep the assigned partitions until cancelled. Returns if rights are missing."""
        try:
            await self._run()
        finally:
            self.instruments.outage.drop(ACTIVITY)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.2)
        is_said = False
        while True:
            begun = self.instruments.clock.monotonic()
            try:
                missing = await self.bus.missing_rights(rights.of_sweeper(self.identity.cluster))
                if missing:
                    log.warning("this manager takes no part in sweeping", missing=missing)
                    return
                membership = await self.bus.join(
                    sweepers_group(self.identity.cluster),
                    topics(self.identity.cluster).registrations,
                    replica=self.identity.host,
                    session_timeout=self.session_s,
                    heartbeat_interval=self.heartbeat_s,
                )
                self.instruments.outage.passed(ACTIVITY)
                membership.on_trouble(self._note_trouble)
                async with membership:
                    await self._serve_assignments(membership)
            except MemberReplacedError:
                if not is_said:
                    log.warning("another manager serves this host, too: stop one of them", host=self.identity.host)
                is_said = True
            except BusError as error:
                if not self.bus.local:  # there, the group has one member
                    self.instruments.outage.met(ACTIVITY, error)
            await anyio.sleep(backoff.next_delay(lasted=self.instruments.clock.monotonic() - begun))

    def _note_trouble(self, trouble: BusError | None) -> None:
        if trouble is None:
            self.instruments.outage.passed(ACTIVITY)
        else:
            self.instruments.outage.met(ACTIVITY, trouble)

    async def _serve_assignments(self, membership: Membership) -> None:
        """Sweep exactly the assigned partitions, until the membership fails.

        Raises:
            BusError: the membership has failed.
        """
        trouble: BusError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                while trouble is None:
                    try:
                        self._assign(await membership.changed(), membership, tasks)
                    except BusError as error:
                        trouble = error
                tasks.cancel_scope.cancel()
        finally:
            self._sweepers.clear()
            self.instruments.metrics.swept_partitions.set(0)
        if trouble is not None:
            raise trouble

    def _assign(self, partitions: frozenset[int], membership: Membership, tasks: TaskGroup) -> None:
        for lost in self._sweepers.keys() - partitions:
            self._sweepers.pop(lost)[1].cancel()
        for new in partitions - self._sweepers.keys():
            scope = anyio.CancelScope()
            sweeper = PartitionSweeper(
                self._context(new), owns_partition=partial(membership.confirmed, new), served=self._hosts
            )
            self._sweepers[new] = sweeper, scope
            tasks.start_soon(self._sweep, sweeper, scope)
        self.instruments.metrics.swept_partitions.set(len(self._sweepers))

    async def _sweep(self, sweeper: PartitionSweeper, scope: anyio.CancelScope) -> None:
        with scope:
            await sweeper.run()

    def _context(self, partition: int) -> SweepContext:
        return SweepContext(
            bus=self.bus,
            topics=topics(self.identity.cluster),
            partition=partition,
            partitions=self.partitions,
            identity=self.identity,
            instruments=self.instruments,
            grace_s=self.grace_s,
        )

    def _hosts(self) -> list[str]:
        """The hosts with a manager in the partitions that this member sweeps."""
        return [
            host
            for sweeper, _ in self._sweepers.values()
            if sweeper.host_registry is not None
            for host in sweeper.host_registry.hosts
        ]
