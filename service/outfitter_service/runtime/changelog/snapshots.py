"""Writes a writer's whole state into history, in pieces. A replay can begin only at such a snapshot.

Each commit has at most one piece, however large the ledger is. Changes between the pieces are in history as always
(`records.Snapshot`). This module decides nothing and commits nothing.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec import UNSET, Raw, Struct, UnsetType

from outfitter_proto.bus import Entry
from outfitter_proto.codec import encode
from outfitter_proto.records import Checkpoint, CommitNumber, Snapshot
from outfitter_service.core.state.ledger import Ledger

PIECE_BYTES = 256 * 1024
"""Bytes of one piece: some hundred records, a millisecond or two of a commit."""
INTERVAL = timedelta(hours=24)
"""The age of the newest snapshot at which the next one begins, if anything is committed: far less than history's
retention."""
BETWEEN_BYTES = 1024**3
BETWEEN_TIMES = 16
"""The least history between two snapshots, in bytes and as a multiple of the state, unless the interval is over. A
replay reads that much in well under a minute, and snapshots add a sixteenth at most."""


class Pace(Struct, frozen=True, kw_only=True):
    """How often history gets snapshots."""

    piece_bytes: int = PIECE_BYTES
    """The most bytes of a piece."""
    interval: timedelta = INTERVAL
    """The age of the newest snapshot at which the next one begins."""
    between_bytes: int = BETWEEN_BYTES
    """The history after which one begins earlier."""


class Piece(Struct, frozen=True, kw_only=True):
    """One commit's part of a snapshot."""

    entry: Entry
    """What is written."""
    upto: int
    """How many of the snapshot's keys this piece and the earlier ones have."""
    size: int
    """The bytes of this piece's records."""
    last: datetime | None
    """When the snapshot was begun, if this piece completes it; else None."""


class _Underway:
    """A snapshot under way. `size`: the bytes of its committed records. `handed`, `committed`: how many pieces and how
    many of the `keys` commits have got, and how many of both are committed."""

    def __init__(self, keys: list[str], begun: CommitNumber, at: datetime) -> None:
        """`keys`: of all records when it was begun. `begun`: the number of the commit that it begins with; `at`: that
        commit's time."""
        self.keys = keys
        self.begun = begun
        self.at = at
        self.size = 0
        self.handed = (0, 0)
        self.committed = (0, 0)


class Snapshots:
    """The snapshots of one writer. Call `piece` when a commit's decisions are made, then `committed` or `rollback`."""

    def __init__(self, writer: str, instance: str, pace: Pace | None) -> None:
        """`writer`: the name of the writer. `instance`: this manager. `pace`: how often; None: no history is written,
        and so no snapshots."""
        self._writer = writer
        self._instance = instance
        self._pace = pace
        self._piece_bytes = pace.piece_bytes if pace is not None else 0
        self._since: datetime | None = None
        self._written = 0
        self._size = 0
        self._underway: _Underway | None = None

    @property
    def underway(self) -> bool:
        """Whether pieces are left to write, even if nothing else is."""
        return self._underway is not None

    @property
    def expected(self) -> bool:
        """Whether history should have a complete snapshot."""
        return self._since is not None

    def newest(self, piece: Piece | None) -> datetime | UnsetType:
        """For the checkpoint: when the newest complete snapshot was begun. `piece`: the one in the same commit."""
        if piece is not None and piece.last is not None:
            return piece.last
        return self._since if self._since is not None else UNSET

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """The ledger was restored up to this checkpoint. Another manager may have written no history."""
        self._since = None
        if self._pace is not None and checkpoint is not None and checkpoint.snapshot is not UNSET:
            self._since = checkpoint.snapshot
        underway = self._underway
        if underway is not None:
            is_own = checkpoint is not None and checkpoint.instance == self._instance
            underway.handed = underway.committed
            # if no piece is committed, the keys may be those of a commit that failed
            if not is_own or self._since == underway.at or underway.committed[0] == 0:
                self._underway = None

    def restart(self) -> None:
        """The written history is gone: the next commit begins a snapshot."""
        self._since = self._underway = None

    def piece(self, ledger: Ledger, now: datetime, *, commit: CommitNumber) -> Piece | None:
        """The next piece that is due, or None. `ledger`: with all decisions of the commit with the number `commit`."""
        if self._underway is None and self._is_due(now):
            self._underway = _Underway(ledger.keys(), commit, now)
        underway = self._underway
        if underway is None or (underway.handed[1] == len(underway.keys) and underway.handed[0]):
            return None
        part, at = underway.handed
        records: dict[str, Raw] = {}
        size = 0
        while at < len(underway.keys) and size < self._piece_bytes:
            key = underway.keys[at]
            record = ledger.record(key)
            if record is not None:
                value = encode(record)
                if records and size + len(value) > self._piece_bytes:
                    break  # a large record is a piece of its own
                records[key] = Raw(value)
                size += len(value) + len(key)
            at += 1
        last = at == len(underway.keys)
        underway.handed = (part + 1, at)
        snapshot = Snapshot(writer=self._writer, begun=underway.begun, part=part, records=records, last=last)
        return Piece(
            entry=Entry(self._writer.encode(), encode(snapshot)), upto=at, size=size, last=underway.at if last else None
        )

    def committed(self, piece: Piece | None, written: int) -> None:
        """A commit has returned. `piece`: its piece, or None. `written`: its bytes of history."""
        self._written += written
        underway = self._underway
        if piece is None or underway is None:
            return
        underway.committed = (underway.committed[0] + 1, piece.upto)
        underway.size += piece.size
        if piece.upto == len(underway.keys):
            self._since = underway.at
            self._size, self._written = underway.size, 0
            self._underway = None

    def rollback(self) -> None:
        """Commits have failed: write their pieces again."""
        underway = self._underway
        if underway is not None:
            underway.handed = underway.committed
            if underway.committed[0] == 0:
                self._underway = None  # the snapshot begins with another commit

    def _is_due(self, now: datetime) -> bool:
        pace = self._pace
        if pace is None:
            return False
        if self._since is None or not timedelta() <= now - self._since < pace.interval:
            return True
        return self._written >= max(pace.between_bytes, BETWEEN_TIMES * self._size)
