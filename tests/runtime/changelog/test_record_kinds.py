"""What every kind of record in the ledger goes through, whatever its rules: commit, restore, history, snapshot."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

import pytest
from msgspec import structs

from outfitter_proto import topics as wanted_topics
from outfitter_proto.bus import Bus, Entry
from outfitter_proto.codec import decode_ledger, encode
from outfitter_proto.keys import host_writer
from outfitter_proto.names import topics, transactional_id
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    Cordon,
    Device,
    Host,
    InputPosition,
    ManagerIdentity,
    ResolvedRequest,
    Source,
    StateRecord,
)
from outfitter_service.core.decide import Rules
from outfitter_service.core.state.ledger import DropRecord, Ledger, PutAllocation, PutRecord
from outfitter_service.core.state.record_kinds import KINDS
from outfitter_service.query.replay import Replay
from outfitter_service.runtime.changelog.restore import restore
from outfitter_service.runtime.changelog.snapshots import Pace, Snapshots
from outfitter_service.runtime.input.scope import HostScope
from support.core import commits

WRITER, TOPICS, NOW = host_writer("h"), topics(), datetime(2026, 1, 1, tzinfo=UTC)
SAMPLES: list[StateRecord] = [
    Host(host="h", manager=ManagerIdentity(instance="one", version="0", since=NOW), since=NOW),
    Device(host="h", id="GPU-0/1", since=NOW, state="ill"),
    Cordon(host="h", order="o1", author="ada", reason="dust", since=NOW, device="GPU-0/1"),
]
GRANT = Allocation(
    host="h", worker="w", incarnation="1", state="allocated", request=ResolvedRequest(amounts={}), since=NOW,
    writer=WRITER, commit=1, source=Source(partition=0, offset=0), token=1,
)  # fmt: skip

every_kind = pytest.mark.parametrize("record", SAMPLES, ids=lambda record: type(record).__name__)


class Writer:
    """A writer whose commits are kept: the ledger's entries and history's."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.snapshots = Snapshots(WRITER, "one", Pace())
        self.written: list[Entry] = []
        self.history: list[Entry] = []

    def commit(self, *changes: PutAllocation | PutRecord | DropRecord) -> list[Entry]:
        commit = commits.begin(self.ledger, Rules(writer=WRITER, specs={}), NOW)
        commit.apply(changes)
        number = self.ledger.commits + 1
        commit.transaction.piece = self.snapshots.piece(self.ledger, NOW, commit=number)
        position = InputPosition(topic_id="id", partition=0, from_=0, to=0)
        checkpoint = Checkpoint(
            writer=WRITER, instance="one", cluster="outfitter", scope="host", commit=number, token=0, input=position,
            at=NOW,
        )  # fmt: skip
        written = dict(commit.transaction.entries(TOPICS, checkpoint))
        self.ledger.begin_commit()
        self.ledger.end_commit()
        self.snapshots.committed(commit.transaction.piece, 0)
        self.written += written[TOPICS.allocations]
        self.history += written[TOPICS.history]
        return written[TOPICS.allocations]

    def replayed(self) -> dict[str, bytes]:
        replay = Replay()
        for entry in self.history:
            replay.add(entry.value or b"")
        return {key: kept.wire for key, kept in replay.records.items() if not key.startswith("@checkpoint/")}

    async def restored(self, bus: Bus) -> Ledger:
        await wanted_topics.create(bus, "outfitter", partitions=1)
        async with await bus.open_writer(transactional_id("outfitter", WRITER), 0) as writer:
            await writer.commit([(TOPICS.allocations, self.written)])
        return (await restore(bus, TOPICS.allocations, 0, HostScope("h", WRITER))).ledger


def test_every_kind_has_a_row_and_a_sample_here() -> None:
    assert set(get_args(StateRecord)) == set(KINDS) == set(map(type, SAMPLES))


@every_kind
async def test_what_a_commit_puts_is_restored(record: StateRecord, bus: Bus) -> None:
    writer = Writer()
    writer.commit(PutRecord(record), PutAllocation(GRANT.key, GRANT))
    ledger = await writer.restored(bus)
    assert ledger.records == {record.key: record}
    assert ledger.keys() == [record.key, GRANT.key]


@every_kind
async def test_what_a_commit_deletes_is_not_restored(record: StateRecord, bus: Bus) -> None:
    writer = Writer()
    writer.commit(PutRecord(record))
    writer.commit(DropRecord(record.key))
    assert (await writer.restored(bus)).records == {}


@every_kind
def test_history_tells_what_was_put_and_deleted_with_and_without_a_snapshot(record: StateRecord) -> None:
    writer = Writer()
    writer.commit(PutRecord(record))  # a snapshot has it
    assert writer.replayed() == {record.key: encode(record)}
    changed = structs.replace(record, since=NOW.replace(year=2027))
    writer.commit(PutRecord(changed))
    assert writer.replayed() == {record.key: encode(changed)}
    writer.commit(DropRecord(record.key))
    assert writer.replayed() == {}


@every_kind
def test_a_commit_that_is_taken_back_leaves_everything_as_it_was(record: StateRecord) -> None:
    ledger = Ledger()
    ledger.change(PutRecord(record))
    ledger.rollback()
    assert ledger.keys() == []
    ledger.restore(PutRecord(record))
    ledger.change(DropRecord(record.key))
    ledger.rollback()
    assert ledger.record(record.key) == record


@every_kind
def test_a_device_is_barred_before_the_grants_and_a_host_is_told_after_them(record: StateRecord) -> None:
    written = Writer().commit(PutAllocation(GRANT.key, GRANT), PutRecord(record))
    kinds = [type(decode_ledger(entry.value or b"")) for entry in written]
    assert kinds == ([Allocation, Host] if type(record) is Host else [type(record), Allocation]) + [Checkpoint]
