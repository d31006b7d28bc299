"""Rebuilds the ledger of one partition from its history alone: the state after any commit since a complete snapshot.

In each transaction, history has the commit's changes of the ledger: steps with their records, refreshes, queue
positions, deletions, the checkpoint. A replay can begin at a snapshot, which is spread over several commits: see
`records.Snapshot`. A replay has no rules: it only puts and deletes records. They stay bytes, to keep fields of later
versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from outfitter_proto.codec import encode
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import Checkpoint, CommitNumber


class _Stamp(Struct):
    """The writer and the commit of a record."""

    writer: str
    commit: CommitNumber


class _Transition(Struct, tag_field="type", tag="transition"):
    host: str
    worker: str
    incarnation: str
    record: Raw


class _Refresh(Struct, tag_field="type", tag="refresh"):
    host: str
    worker: str
    incarnation: str
    writer: str
    changed: dict[str, Raw]


class _Put(Struct, tag_field="type", tag="put"):
    writer: str
    key: str
    record: Raw


class _Snapshot(Struct, tag_field="type", tag="snapshot"):
    writer: str
    begun: CommitNumber
    part: int
    records: dict[str, Raw]
    last: bool = False


class _Commit(Struct, tag_field="type", tag="commit"):
    writer: str
    checkpoint: Raw
    positions: dict[str, int] = {}
    dropped: list[str] = []


_Line = _Transition | _Refresh | _Put | _Snapshot | _Commit
_decode_line = msgspec.json.Decoder(_Line).decode
_decode_stamp = msgspec.json.Decoder(_Stamp).decode
_decode_checkpoint = msgspec.json.Decoder(Checkpoint).decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode


class Kept(NamedTuple):
    """A record on the wire, and its writer."""

    writer: str
    wire: bytes


class Progress:
    """The progress of the replay for one writer.

    `whole`: since when its state has been complete without a gap (None: it is not). `checkpoint`: of the last replayed
    commit. `over`: no later commit is wanted. `first`: the number of the first commit read, wanted or not.
    """

    def __init__(self) -> None:
        self.whole: datetime | None = None
        self.checkpoint: Checkpoint | None = None
        self.over = False
        self.first: CommitNumber | None = None
        self.begun: CommitNumber | None = None
        self.part = 0
        self.pending: list[_Transition | _Refresh | _Put | _Snapshot] = []

    @property
    def commit(self) -> CommitNumber | None:
        return self.checkpoint.commit if self.checkpoint is not None else None

    @property
    def known(self) -> bool:
        """Whether its state is known: it is complete, or empty because its first commit came later."""
        return self.whole is not None or (self.first == 1 and self.checkpoint is None)


class Replay:
    """The replay of one partition. Add its history in order. `records`: the ledger after the last commit of each writer
    that was `at` or before `until`, and not after its number in `commits`."""

    def __init__(self, *, until: datetime | None = None, commits: Mapping[str, CommitNumber] | None = None) -> None:
        self._until = until
        self._commits = commits or {}
        self._kept: dict[str, Kept] = {}
        self.writers: dict[str, Progress] = {}

    @property
    def records(self) -> dict[str, Kept]:
        """The records and checkpoints by key, of the writers whose state is complete."""
        records = {key: kept for key, kept in self._kept.items() if self.writers[kept.writer].whole is not None}
        for writer, progress in self.writers.items():
            if progress.whole is not None and progress.checkpoint is not None:
                records[progress.checkpoint.key] = Kept(writer, encode(progress.checkpoint))
        return records

    def add(self, value: bytes) -> None:
        """Add the next message. Unknown types of records are ignored."""
        try:
            line = _decode_line(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        stamp = _decode_stamp(line.record) if type(line) is _Transition else None
        writer = stamp.writer if stamp is not None else line.writer
        progress = self._progress(writer)
        if progress.over:
            return
        if stamp is not None and progress.commit is not None and stamp.commit > progress.commit + 1:
            self._lose(writer, progress)
            progress.pending.clear()
        if type(line) is _Commit:
            self._commit(line, progress)
            return
        # records before a first piece are in one of the pieces
        if progress.begun is not None or progress.pending or (type(line) is _Snapshot and line.part == 0):
            progress.pending.append(line)

    def _progress(self, writer: str) -> Progress:
        progress = self.writers.get(writer)
        if progress is None:
            progress = self.writers[writer] = Progress()
        return progress

    def _lose(self, writer: str, progress: Progress) -> None:
        """Drop a writer's state after missing commits, until another snapshot is complete."""
        progress.whole = None
        progress.begun = None
        for key in [key for key, kept in self._kept.items() if kept.writer == writer]:
            del self._kept[key]

    def _commit(self, line: _Commit, progress: Progress) -> None:
        checkpoint = _decode_checkpoint(line.checkpoint)
        pending, progress.pending = progress.pending, []
        last = self._commits.get(line.writer)
        if progress.first is None:
            progress.first = checkpoint.commit
        if (self._until is not None and checkpoint.at > self._until) or (last is not None and checkpoint.commit > last):
            progress.over = True
            return
        if progress.commit is not None and checkpoint.commit != progress.commit + 1:
            self._lose(line.writer, progress)
        progress.checkpoint = checkpoint
        progress.over = last == checkpoint.commit
        for change in pending:
            if type(change) is _Snapshot and progress.whole is None:
                _add_piece(change, progress)
        if progress.begun is None:
            return
        for change in pending:
            self._apply(change, checkpoint, progress)
        stamp = {"commit": Raw(encode(checkpoint.commit)), "writer": Raw(encode(checkpoint.writer))}
        for key, position in line.positions.items():
            self._patch(key, {"queue_position": Raw(encode(position)), **stamp})
        for key in line.dropped:
            self._kept.pop(key, None)

    def _apply(
        self, change: _Transition | _Refresh | _Put | _Snapshot, checkpoint: Checkpoint, progress: Progress
    ) -> None:
        writer = checkpoint.writer
        match change:
            case _Transition():
                self._kept[_key(change)] = Kept(writer, bytes(change.record))
            case _Refresh():
                self._patch(_key(change), change.changed)
            case _Put():
                self._kept[change.key] = Kept(writer, bytes(change.record))
            case _Snapshot() if progress.whole is None:
                for key, record in change.records.items():
                    self._kept[key] = Kept(writer, bytes(record))
                if change.last:
                    progress.whole = checkpoint.at
            case _Snapshot():
                pass

    def _patch(self, key: str, changed: Mapping[str, Raw]) -> None:
        """Change fields of a record. It may be missing until a later piece of the snapshot."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept[key] = Kept(kept.writer, encode({**_decode_fields(kept.wire), **changed}))


def _key(change: _Transition | _Refresh) -> AllocationKey:
    return allocation_key(change.host, change.worker, change.incarnation)


def _add_piece(piece: _Snapshot, progress: Progress) -> None:
    """Add a piece of a snapshot. A piece that comes twice was written again after a commit of unknown outcome."""
    if piece.part == 0:
        progress.begun = piece.begun
    elif progress.begun != piece.begun or piece.part not in {progress.part, progress.part + 1}:
        progress.begun = None
    progress.part = piece.part


class RecordDifference(NamedTuple):
    """A difference between the ledger and its replay: a field of the record under `key`, or the whole record (None)."""

    key: str
    field: str | None
    ledger: Any
    history: Any


def differences(ledger: Mapping[str, bytes], history: Mapping[str, bytes]) -> list[RecordDifference]:
    """Compare two states field by field, as values and not as bytes."""
    fields: list[RecordDifference] = []
    for key in sorted(ledger.keys() | history.keys()):
        one, other = ledger.get(key), history.get(key)
        if one is None or other is None:
            fields.append(RecordDifference(key, None, _as_values(one), _as_values(other)))
        elif one != other:
            here, there = _as_values(one), _as_values(other)
            fields += [
                RecordDifference(key, field, here.get(field), there.get(field))
                for field in sorted(here.keys() | there.keys())
                if here.get(field) != there.get(field)
            ]
    return fields


def _as_values(wire: bytes | None) -> Any:
    return None if wire is None else msgspec.json.decode(wire)
