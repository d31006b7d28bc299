"""Rebuilds the ledger from history, at a moment or to the end.

It guesses the start of a replay from the snapshots that the ledger's checkpoints name. If a writer's state is
incomplete then, it replays again from further back, at last from the oldest message. A wrong guess only costs time.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta

from msgspec import UNSET, Struct

from outfitter_proto import keys, names
from outfitter_proto.bus import Bus, Message
from outfitter_proto.records import Checkpoint
from outfitter_proto.support.causes import side_by_side
from outfitter_service.config import BusConnection
from outfitter_service.query import history_reader, ledger_view
from outfitter_service.query.replay import Replay, ReplayedRecord, WriterReplay

EARLIEST = 1971
"""No history is of an earlier year, and Python counts no hours back from the first one."""
FIRST_GUESS = timedelta(hours=26)
"""How far before the moment the first replay begins. Snapshots are written at least daily."""
FURTHER = 4
"""Factor by which each further replay begins earlier."""


class RebuiltPartition(Struct, kw_only=True):
    """One partition: the checkpoints in its ledger by writer, and the replay of its history until a moment (None: the
    end of the ledger)."""

    partition: int
    checkpoints: dict[str, Checkpoint]
    replay: Replay
    until: datetime | None

    @property
    def records(self) -> dict[str, ReplayedRecord]:
        """The records and checkpoints by key. A writer that the ledger does not know has none now: it was forgotten, or
        its ledger was lost."""
        found = self.replay.records
        if self.until is not None:
            return found
        return {key: record for key, record in found.items() if record.writer in self.checkpoints}

    @property
    def writers(self) -> dict[str, WriterReplay]:
        """The progress of the replay for each writer."""
        return {writer: self.replay.writers.get(writer) or WriterReplay() for writer in self.checkpoints}


async def rebuild(bus: Bus, where: BusConnection, host: str | None, until: datetime | None) -> list[RebuiltPartition]:
    """The state at `until` (None: at the current end of the ledger), of all partitions or that of `host`.

    Raises:
        BusError: see the bus port.
        OutfitterCliError: there is no history, or it could not be read.
    """
    topic = await history_reader.topic_of(bus, where)
    rebuilt: list[RebuiltPartition] = []

    async def rebuild_one(partition: int) -> None:
        rebuilt.append(await _rebuild_partition(bus, where, topic, partition, host, until))

    async with side_by_side() as group:
        for partition in await ledger_view.partitions(bus, where.cluster, host):
            group.start_soon(rebuild_one, partition)
    return sorted(rebuilt, key=lambda part: part.partition)


async def _rebuild_partition(
    bus: Bus, where: BusConnection, topic: str, partition: int, host: str | None, until: datetime | None
) -> RebuiltPartition:
    changes = await ledger_view.read_partition(bus, names.topics(where.cluster).allocations, partition)
    checkpoints = {
        change.record.writer: change.record
        for change in changes
        if isinstance(change.record, Checkpoint) and _may_write_for(change.record, host)
    }
    part = RebuiltPartition(partition=partition, checkpoints=checkpoints, replay=Replay(), until=until)
    earliest, _ = await bus.offsets(topic, partition)
    end = await bus.stable_end(topic, partition)
    oldest_at = await _oldest_message_at(bus, topic, partition)
    # history has nothing of a writer whose last commit is before the oldest message
    recorded = {
        writer: checkpoint
        for writer, checkpoint in checkpoints.items()
        if oldest_at is not None and checkpoint.at > oldest_at - history_reader.MARGIN
    }
    moment = _guess(recorded, until)
    while checkpoints:
        start = await history_reader.offset_at(bus, topic, partition, moment) if moment is not None else earliest
        replay = Replay(
            until=until,
            commits={writer: checkpoint.commit for writer, checkpoint in checkpoints.items()},
            ledgers={writer: each.ledger_id for writer, each in checkpoints.items() if each.ledger_id is not UNSET},
        )
        part.replay = await _play(bus, topic, partition, replay, recorded, start, end)
        if start <= earliest or moment is None or all(part.writers[writer].is_known for writer in recorded):
            break
        reference = until or max(checkpoint.at for checkpoint in recorded.values())
        back = max(reference - moment, FIRST_GUESS) * FURTHER
        moment = reference - back if back < timedelta(days=366) else None
    return part


def _may_write_for(checkpoint: Checkpoint, host: str | None) -> bool:
    """Whether this checkpoint's writer may have written history of the host (None: of any host)."""
    if keys.is_sweeper(checkpoint.writer):
        return False
    return host is None or checkpoint.scope != "host" or checkpoint.writer == keys.host_writer(host)


async def _oldest_message_at(bus: Bus, topic: str, partition: int) -> datetime | None:
    """The time of the oldest message; None if there is none."""
    async with AsyncExitStack() as stack:
        first = await (await history_reader.open_range(stack, bus, topic, partition, start=None)).next()
    return datetime.fromtimestamp(first.timestamp_ms / 1000, UTC) if first is not None else None


def _guess(checkpoints: dict[str, Checkpoint], until: datetime | None) -> datetime | None:
    """The start of a replay; None: the beginning."""
    snapshots = [checkpoint.snapshot for checkpoint in checkpoints.values() if checkpoint.snapshot is not UNSET]
    if until is None:
        return min(snapshots, default=None)
    if until.year < EARLIEST:
        return None
    return min([until - FIRST_GUESS, *snapshots])


async def _play(
    bus: Bus, topic: str, partition: int, replay: Replay, writers: Collection[str], start: int, end: int
) -> Replay:
    """Replay from `start` to `end`, or until the replay of each of `writers` is finished."""
    async with AsyncExitStack() as stack:
        history_range = await history_reader.open_range(stack, bus, topic, partition, start=start, end=end)
        while (message := await history_range.next()) is not None:
            replay.add(message.value or b"")
            if all((progress := replay.writers.get(writer)) is not None and progress.finished for writer in writers):
                break
    return replay


async def oldest(
    bus: Bus, where: BusConnection, part: RebuiltPartition, writers: Collection[str]
) -> dict[str, datetime]:
    """The oldest moment to which each of `writers` can be replayed. Writers that cannot be replayed are left out."""
    topic = names.topics(where.cluster).history
    replay = Replay()
    moments: dict[str, datetime] = {}
    async with AsyncExitStack() as stack:
        history_range = await history_reader.open_range(stack, bus, topic, part.partition, start=None)
        while len(moments) < len(writers) and (message := await history_range.next()) is not None:
            replay.add(message.value or b"")
            for writer, progress in replay.writers.items():
                if progress.complete_since is not None and writer in writers:
                    moments.setdefault(writer, progress.complete_since)
    return moments


def allocations(parts: list[RebuiltPartition], host: str | None) -> list[ledger_view.StoredAllocation]:
    """The allocations of a replayed state, in the order of `LedgerView.allocations`."""
    state = ledger_view.LedgerView()
    for part in parts:
        for key, record in part.records.items():
            if host is None or keys.host_of(key.encode()) == host:
                state.put(ledger_view.decode(Message("history", part.partition, 0, key.encode(), record.wire, 0)))
    return state.allocations
