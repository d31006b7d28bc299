"""The output of one commit: the ledger's records, history's steps, dead letters. Each is encoded when it is decided."""

from __future__ import annotations

from msgspec import Raw, Struct

from outfitter_proto.bus import Entry
from outfitter_proto.codec import encode
from outfitter_proto.names import Topics
from outfitter_proto.records import Allocation, Checkpoint, DeadLetter, Note, Refresh, StateRecord, Transition
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.runtime.changelog.encoding import batches, commit_entries, ledger_batch, note_entry, step_entry
from outfitter_service.runtime.changelog.snapshots import Piece


class CommitOutput(Struct, kw_only=True):
    """It begins empty, and a batch fills it.

    `history`: whether history is written. `values`: the last record of each changed key with its encoded value; None is
    a tombstone. `fast_grants`: records and entries by key, in the order of their tokens. `stepless`: keys that were put
    or deleted without a step in history. `positions`: changed queue positions by key. `steps`: history's entries.
    `letters`: dead letters. `notes`: the event queue's notes. `piece`: of a snapshot. `ledger_bytes`, `history_bytes`:
    upper bounds of the sizes of the ledger's batch, letters included, and of history's."""

    history: bool
    values: dict[str, tuple[Allocation | StateRecord | None, bytes | None]] = {}
    fast_grants: dict[str, tuple[Allocation, Entry]] = {}
    stepless: dict[str, None] = {}
    positions: dict[str, int] = {}
    steps: list[Entry] = []
    letters: list[DeadLetter] = []
    notes: list[Note] = []
    piece: Piece | None = None
    ledger_bytes: int = 0
    history_bytes: int = 0

    @property
    def empty(self) -> bool:
        """Whether the commit has nothing to write (heartbeats move leases in memory only)."""
        return not (self.values or self.fast_grants or self.notes or self.letters)

    def put(self, key: str, record: Allocation | StateRecord | None, value: bytes | None = None) -> None:
        """Write a record, or a tombstone. `value`: the encoded record, if it is encoded already."""
        if value is None and record is not None:
            value = encode(record)
        self.fast_grants.pop(key, None)
        self.values[key] = (record, value)
        # an earlier value of this key stays in the sum: few keys have one, and this is an upper bound
        self.ledger_bytes += len(key) + 16 + (0 if value is None else len(value))

    def put_without_step(self, key: str, record: StateRecord | None, value: bytes | None = None) -> None:
        """As `put`, for a record other than an allocation: history gets it at the end of the commit."""
        self.stepless[key] = None
        self.put(key, record, value)

    def grant(self, grant: FastGrant, value: bytes) -> Transition:
        """Write a fast grant, encoded as `value`, and its step. Returns the step."""
        key, record = grant.key, grant.record
        name = key.encode()
        size = len(name) + 16
        if key in self.stepless:
            del self.values[key]
        self.fast_grants[key] = record, Entry(name, value)
        self.ledger_bytes += size + len(value)
        step = grant.step(Raw(value))
        if self.history:
            encoded = encode(step)
            self.steps.append(Entry(name, encoded))
            self.history_bytes += size + len(encoded)
        return step

    def step(self, key: str, step: Transition | Refresh) -> int:
        """Write a step into history, and return its size. It is encoded at once: its record was mostly just encoded
        for the ledger."""
        if not self.history:
            return 0
        if type(step) is Transition:
            record, value = self.values[key]
            entry = step_entry(key, step, value if record is step.record else None)
        else:
            entry = Entry(key.encode(), encode(step))
        self.steps.append(entry)
        size = len(key) + 16 + len(entry.value or b"")
        self.history_bytes += size
        return size

    def add_letter(self, letter: DeadLetter) -> None:
        """Write a dead letter."""
        self.ledger_bytes += len(letter.body) * 4 // 3 + len(letter.reason)
        self.letters.append(letter)

    def add_notes(self, notes: list[Note]) -> None:
        """Write notes to history."""
        self.notes += notes

    def add_piece(self, piece: Piece | None) -> None:
        """Write a piece of a snapshot to history, if one is due."""
        self.piece = piece

    def transaction(self, topics: Topics, checkpoint: Checkpoint) -> list[tuple[str, list[Entry]]]:
        """The entries of the commit, by topic, in order."""
        last = {key: self.values.get(key) for key in self.stepless}
        recreated = [key for key, value in last.items() if value is None or type(value[0]) is Allocation]
        ledger = ledger_batch(self.values, self.fast_grants, checkpoint, recreated=recreated)
        if not self.history:
            return batches(topics, [], self.letters, ledger)
        stepless = {key: value for key, value in last.items() if value is not None}
        piece = self.piece.entry if self.piece is not None else None
        end = commit_entries(checkpoint, ledger[-1], stepless, self.positions, piece)
        return batches(topics, [*map(note_entry, self.notes), *self.steps, *end], self.letters, ledger)
