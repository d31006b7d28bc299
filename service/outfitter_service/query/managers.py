"""The hosts whose manager is stopped or dead, for commands that look once."""

from __future__ import annotations

from typing import NamedTuple

from outfitter_proto import names
from outfitter_proto.bus import Bus
from outfitter_proto.partitioning import partition_of
from outfitter_proto.records import AllocationState, Checkpoint
from outfitter_proto.signs_of_life import UNSERVED, Life, Verdict, judge, read_signs, responsible
from outfitter_service.query.ledger_view import LedgerView
from outfitter_service.query.unanswered import UnansweredMessages


class UnservedHost(NamedTuple):
    """A host and its manager's end. `waiting`: how many workers wait there; `unanswered`: how many messages lie there
    (None: not known)."""

    host: str
    verdict: Verdict
    waiting: int
    unanswered: int | None

    @property
    def is_missed(self) -> bool:
        """Whether somebody must start the manager: it did not stop in order, or somebody waits for it."""
        return self.verdict.life is Life.DEAD or bool(self.waiting or self.unanswered)


async def unserved(bus: Bus, cluster: str, ledger: LedgerView, host: str | None = None) -> list[UnservedHost]:
    """The hosts of a ledger, or `host` only, whose manager is stopped or dead. The ledger was read before.

    Raises:
        BusError: the bus did not answer. Signs of life that cannot be read raise nothing.
    """
    count = (await bus.topic(names.topics(cluster).allocations)).partitions
    signs = await read_signs(bus, cluster, range(count) if host is None else [partition_of(host, count)])
    found: dict[str, Verdict] = {}
    checkpoints: dict[str, Checkpoint] = {}
    for name, record in ledger.hosts.items():
        checkpoint = responsible(ledger.checkpoints, name, count)
        verdict = judge(signs, checkpoint, record.manager)
        if verdict.life in UNSERVED:
            found[name] = verdict
            if checkpoint is not None:
                checkpoints[name] = checkpoint
    messages = UnansweredMessages(bus, cluster)
    await messages.look(checkpoints)
    return [
        UnservedHost(
            name,
            verdict,
            sum(record.state == AllocationState.PENDING for record in ledger.live(name)),
            messages.counts.get(name),
        )
        for name, verdict in sorted(found.items())
    ]
