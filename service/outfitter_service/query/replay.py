"""Rebuilds the ledger of one partition from its history alone: the state after any commit since a complete snapshot.

In each transaction, history has the commit's changes of the ledger: steps with their records, refreshes, queue
positions, deletions, the checkpoint. A replay can begin at a snapshot, which is spread over several commits: see
`records.Snapshot`. A replay has no rules: it only puts and deletes records. Records stay bytes, so that fields of later
versions are kept. The private classes below have only those fields of the history records that a replay needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct

from outfitter_proto.codec import encode
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import Checkpoint, CommitNumber


class _Stamp(Struct):
    """The writer of an allocation record, and the commit that wrote it."""

    writer: str
    commit: CommitNumber


class _Transition(Struct, tag_field="type", tag="transition"):
    """A step of an allocation. `record`: the whole record after it."""

    host: str
    worker: str
    incarnation: str
    record: Raw


class _Refresh(Struct, tag_field="type", tag="refresh"):
    """A change of an allocation without a step. `changed`: the new values by field."""

    host: str
    worker: str
    incarnation: str
    writer: str
    changed: dict[str, Raw]


class _Put(Struct, tag_field="type", tag="put"):
    """A new record under `key` that is no allocation: of a host or a device."""

    writer: str
    key: str
    record: Raw


class _Snapshot(Struct, tag_field="type", tag="snapshot"):
    """A piece of a snapshot: records by key."""

    writer: str
    begun: CommitNumber
    """The number of the commit with the first piece, the same in all pieces."""
    part: int
    """The number of the piece."""
    records: dict[str, Raw]
    last: bool = False
    """No piece follows."""


class _Commit(Struct, tag_field="type", tag="commit"):
    """The end of a commit. `positions`: the new queue positions by key. `dropped`: the deleted keys."""

    writer: str
    checkpoint: Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


_Change = _Transition | _Refresh | _Put | _Snapshot
_decode_history = msgspec.json.Decoder(_Change | _Commit).decode
_decode_stamp = msgspec.json.Decoder(_Stamp).decode
_decode_checkpoint = msgspec.json.Decoder(Checkpoint).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class ReplayedRecord(NamedTuple):
    """A record as on the wire, and its writer."""

    writer: str
    wire: bytes


class WriterReplay:
    """The progress of the replay for one writer."""

    def __init__(self) -> None:
        self.complete_since: datetime | None = None
        """Since when its state has been complete without a gap (None: it is not)."""
        self.checkpoint: Checkpoint | None = None
        """That of the last replayed commit."""
        self.finished = False
        """No later commit is replayed."""
        self._first: CommitNumber | None = None
        """The number of the first commit that was read, replayed or not."""
        self._snapshot: CommitNumber | None = None
        """The number of the commit with which the snapshot began; None without a snapshot to begin with."""
        self._part = 0
        self._changes: list[_Change] = []
        """The changes since the last commit."""

    @property
    def commit(self) -> CommitNumber | None:
        """The number of the last replayed commit."""
        return self.checkpoint.commit if self.checkpoint is not None else None

    @property
    def is_known(self) -> bool:
        """Whether its state is known: it is complete, or empty because its first commit came later."""
        return self.complete_since is not None or (self._first == 1 and self.checkpoint is None)

    @property
    def has_snapshot(self) -> bool:
        """Whether its state is complete, or becomes so with the next pieces of a snapshot."""
        return self._snapshot is not None

    def collect(self, change: _Change) -> None:
        """Add a change of the current commit. Records before a first piece are in one of the pieces, so leave them."""
        is_first_piece = type(change) is _Snapshot and change.part == 0
        if self.has_snapshot or self._changes or is_first_piece:
            self._changes.append(change)

    def take_changes(self) -> list[_Change]:
        """Remove and return the changes of the current commit."""
        changes, self._changes = self._changes, []
        return changes

    def note_commit(self, number: CommitNumber) -> None:
        """Note that a commit was read, replayed or not."""
        if self._first is None:
            self._first = number

    def advance(self, checkpoint: Checkpoint) -> None:
        """Replay the commit of `checkpoint`."""
        self.checkpoint = checkpoint

    def finish(self) -> None:
        """Ignore all that follows."""
        self.finished = True

    def begin_again(self) -> None:
        """Wait for another complete snapshot, because commits are missing."""
        self.complete_since = None
        self._snapshot = None

    def add_piece(self, piece: _Snapshot) -> None:
        """Add a piece of a snapshot. A piece that comes twice was written again after a commit of unknown outcome."""
        if piece.part == 0:
            self._snapshot = piece.begun
        elif self._snapshot != piece.begun or piece.part not in {self._part, self._part + 1}:
            self._snapshot = None
        self._part = piece.part

    def complete(self, at: datetime) -> None:
        """Note that the last piece of a snapshot is added."""
        self.complete_since = at


class Replay:
    """The replay of one partition. Add its history in order. `records`: the ledger after the last commit of each writer
    that was `at` or before `until`, and not after its number in `commits`. `ledgers`: the id of each writer's ledger.
    A commit of another ledger, which is lost, ends no replay: its numbers are others."""

    def __init__(
        self,
        *,
        until: datetime | None = None,
        commits: Mapping[str, CommitNumber] | None = None,
        ledgers: Mapping[str, str] | None = None,
    ) -> None:
        self._until = until
        self._commits = commits or {}
        self._ledgers = ledgers or {}
        self._records: dict[str, ReplayedRecord] = {}
        self.writers: dict[str, WriterReplay] = {}

    @property
    def records(self) -> dict[str, ReplayedRecord]:
        """The records and checkpoints by key, of the writers whose state is complete."""
        complete = {writer for writer, progress in self.writers.items() if progress.complete_since is not None}
        records = {key: record for key, record in self._records.items() if record.writer in complete}
        for writer in complete:
            checkpoint = self.writers[writer].checkpoint
            if checkpoint is not None:
                records[checkpoint.key] = ReplayedRecord(writer, encode(checkpoint))
        return records

    def add(self, value: bytes) -> None:
        """Add the next message. Unknown types of records are ignored."""
        try:
            record = _decode_history(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        stamp = _decode_stamp(record.record) if type(record) is _Transition else None
        writer = stamp.writer if stamp is not None else record.writer
        progress = self._progress(writer)
        if progress.finished:
            return
        if stamp is not None and progress.commit is not None and stamp.commit > progress.commit + 1:
            self._begin_again(writer, progress)
            progress.take_changes()
        if type(record) is _Commit:
            self._commit(record, progress)
        else:
            progress.collect(record)

    def _progress(self, writer: str) -> WriterReplay:
        progress = self.writers.get(writer)
        if progress is None:
            progress = self.writers[writer] = WriterReplay()
        return progress

    def _begin_again(self, writer: str, progress: WriterReplay) -> None:
        """Drop a writer's state after missing commits, until another snapshot is complete."""
        progress.begin_again()
        for key in [key for key, record in self._records.items() if record.writer == writer]:
            del self._records[key]

    def _commit(self, commit: _Commit, progress: WriterReplay) -> None:
        checkpoint = _decode_checkpoint(commit.checkpoint)
        changes = progress.take_changes()
        last = self._commits.get(commit.writer) if self._is_of_its_ledger(checkpoint) else None
        progress.note_commit(checkpoint.commit)
        if (self._until is not None and checkpoint.at > self._until) or (last is not None and checkpoint.commit > last):
            progress.finish()
            return
        if progress.commit is not None and checkpoint.commit != progress.commit + 1:
            self._begin_again(commit.writer, progress)
        progress.advance(checkpoint)
        if checkpoint.commit == last:
            progress.finish()
        for change in changes:
            if type(change) is _Snapshot and progress.complete_since is None:
                progress.add_piece(change)
        if not progress.has_snapshot:
            return
        for change in changes:
            self._apply(change, checkpoint, progress)
        stamp = {"commit": Raw(encode(checkpoint.commit)), "writer": Raw(encode(checkpoint.writer))}
        for key, position in commit.positions.items():
            self._patch(key, {"queue_position": Raw(encode(position)), **stamp})
        for key in commit.dropped:
            self._records.pop(key, None)

    def _is_of_its_ledger(self, checkpoint: Checkpoint) -> bool:
        """Whether a commit is of the ledger that the writer has. Version 0.1 named none."""
        named = checkpoint.ledger_id
        return named is UNSET or named == self._ledgers.get(checkpoint.writer, named)

    def _apply(self, change: _Change, checkpoint: Checkpoint, progress: WriterReplay) -> None:
        writer = checkpoint.writer
        match change:
            case _Transition():
                self._records[_key(change)] = ReplayedRecord(writer, bytes(change.record))
            case _Refresh():
                self._patch(_key(change), change.changed)
            case _Put():
                self._records[change.key] = ReplayedRecord(writer, bytes(change.record))
            case _Snapshot() if progress.complete_since is None:
                for key, record in change.records.items():
                    self._records[key] = ReplayedRecord(writer, bytes(record))
                if change.last:
                    progress.complete(checkpoint.at)
            case _Snapshot():
                pass

    def _patch(self, key: str, changed: Mapping[str, Raw]) -> None:
        """Change fields of a record. It may be missing until a later piece of the snapshot."""
        record = self._records.get(key)
        if record is not None:
            wire = encode({**_decode_fields(record.wire), **changed})
            self._records[key] = ReplayedRecord(record.writer, wire)


def _key(change: _Transition | _Refresh) -> AllocationKey:
    return allocation_key(change.host, change.worker, change.incarnation)
