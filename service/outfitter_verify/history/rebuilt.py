"""Rebuilds one partition's records from its history, and compares them with the ledger's, every field.

Each commit's changes are compared, and all records at the end. There are no rules here: records are put, changed and
deleted, commit by commit, up to each writer's last commit in the ledger. Where commits are missing, a writer's records
begin anew with a snapshot: all of them, in pieces beside the changes of its commits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from outfitter_verify import wire
from outfitter_verify.history.recorded_commits import NOT_RECORDED, CommitId, RecordedCommits
from outfitter_verify.ledger.walk import MOVED, LedgerWalk
from outfitter_verify.logs import Log, Record
from outfitter_verify.report import Findings

CHECKPOINT = "@checkpoint/"
SHOWN = 200
"""Most characters of a value in a violation."""

Body = dict[str, Any]

ChangeId = tuple[str, str, int]
"""A change: the key of its allocation, its writer, its commit number."""


@dataclass(slots=True)
class RebuiltWriter:
    """What is rebuilt of one writer."""

    last: int = 0
    """Its last commit so far."""
    offset: int = 0
    """The end of that commit in history."""
    checkpoint: Body = field(default_factory=dict)
    whole: bool = False
    """Its records are complete."""
    begun: object = None
    """The commit with which the newest snapshot begins; None: the snapshot lacks a piece."""
    part: int = 0
    stale: set[str] = field(default_factory=set)
    """Keys from before the snapshot that neither a piece nor a change has put since."""
    changes: list[Body] = field(default_factory=list)
    """The changes since its last commit."""


class RebuiltRecords:
    """The records as history says them. Add every history record in order; then call `compare`."""

    def __init__(
        self, history: Log, ledger: Log, recorded: RecordedCommits, *, partitions: int, findings: Findings
    ) -> None:
        self._history = history
        self._log = ledger
        self._recorded = recorded
        self._partitions = partitions
        self._findings = findings
        self._stored = _last_records(ledger)
        self._ends = {checkpoint.writer: checkpoint.commit for checkpoint in self._checkpoints()}
        """By writer: its last commit in the ledger."""
        self._writers: defaultdict[str, RebuiltWriter] = defaultdict(RebuiltWriter)
        self._records: dict[str, Body] = {}
        self._owners: dict[str, str] = {}
        """The writer that put each record."""
        self._whole: dict[str, CommitId] = {}
        """Where each key's last whole record is, also from before a gap."""
        self._digests: dict[ChangeId, bytes] = {}
        """The digest of the record after each change."""
        self._gapped: dict[ChangeId, CommitId | None] = {}
        """Changes with a gap between them and their last whole record (None: there is none)."""
        self._offsets: dict[CommitId, int] = {}
        """The offset of each commit's end."""

    def _checkpoints(self) -> Iterator[wire.Checkpoint]:
        for key, record in self._stored.items():
            if key.startswith(CHECKPOINT):
                try:
                    yield wire.checkpoint(wire.parse(record.value or b""))
                except (wire.DamagedError, AttributeError, RecursionError):
                    continue  # the walk reports it

    # --- rebuilding ---

    def add(self, offset: int, body: Body) -> None:
        """Add the next record; raises `DamagedError` and what else Python says of a wrong one."""
        kind = body.get("type")
        if kind not in ("transition", "refresh", "put", "snapshot", "commit"):
            return
        if kind == "refresh" and not isinstance(body.get("changed"), dict):
            raise wire.DamagedError("a refresh without changed fields")
        writer = str(body["record"]["writer"] if kind == "transition" else body["writer"])
        if kind != "commit":
            self._writers[writer].changes.append(body)
            return
        number = wire.checkpoint(body["checkpoint"]).commit
        rebuilt = self._writers[writer]
        changes, rebuilt.changes = rebuilt.changes, []
        if number > self._ends.get(writer, number):
            return  # the ledger was read before
        if number != rebuilt.last + 1:
            self._begin_again(writer, rebuilt)
        rebuilt.last, rebuilt.offset, rebuilt.checkpoint = number, offset, body["checkpoint"]
        self._offsets[writer, number] = offset
        for change in changes:
            self._apply(writer, rebuilt, change)
        positions = body.get("positions") or {}
        for key, position in positions.items():
            self._patch(key, {"queue_position": position, "writer": writer, "commit": number})
        for key in {*positions, *(_key(change) for change in changes if change["type"] in ("transition", "refresh"))}:
            self._note_change(key, writer, number)
        for key in body.get("dropped") or ():
            self._drop(key)
            self._whole.pop(key, None)

    def _note_change(self, key: str, writer: str, number: int) -> None:
        if self._owners.get(key) != writer:
            self._gapped[key, writer, number] = self._whole.get(key)
        if key in self._records:
            self._digests[key, writer, number] = wire.digest(self._records[key])

    def _begin_again(self, writer: str, rebuilt: RebuiltWriter) -> None:
        """Commits are missing: drop the writer's records until a snapshot is whole."""
        rebuilt.whole, rebuilt.begun = False, None
        for key in self._of(writer):
            self._drop(key)

    def _of(self, writer: str) -> set[str]:
        return {key for key, owner in self._owners.items() if owner == writer}

    def _apply(self, writer: str, rebuilt: RebuiltWriter, change: Body) -> None:
        match change["type"]:
            case "transition":
                self._put(writer, rebuilt, _key(change), change["record"])
            case "put":
                self._put(writer, rebuilt, change["key"], change["record"])
            case "refresh":
                self._patch(_key(change), change["changed"])
            case "snapshot":
                self._add_piece(writer, rebuilt, change)

    def _add_piece(self, writer: str, rebuilt: RebuiltWriter, piece: Body) -> None:
        """Add a piece of a snapshot. A piece that comes twice was written again after a commit of unknown outcome."""
        part, begun = piece["part"], piece["begun"]
        if part == 0 and rebuilt.begun != begun:
            rebuilt.begun, rebuilt.stale = begun, self._of(writer)
        elif rebuilt.begun != begun or part not in (rebuilt.part, rebuilt.part + 1):
            rebuilt.begun = None
        rebuilt.part = part
        if rebuilt.begun is None:
            return
        for key, record in piece["records"].items():
            self._put(writer, rebuilt, key, record)
        if piece.get("last"):
            for key in rebuilt.stale:
                self._drop(key)
            rebuilt.whole, rebuilt.stale = True, set()

    def _put(self, writer: str, rebuilt: RebuiltWriter, key: object, record: object) -> None:
        if not isinstance(key, str) or not isinstance(record, dict):
            raise wire.DamagedError("it puts no record under a key")
        self._records[key], self._owners[key], self._whole[key] = record, writer, (writer, rebuilt.last)
        rebuilt.stale.discard(key)

    def _patch(self, key: str, changed: Body) -> None:
        """Change fields of a record. It may be missing until a later piece of the snapshot."""
        if key in self._records:
            self._records[key] = {**self._records[key], **changed}

    def _drop(self, key: str) -> None:
        self._records.pop(key, None)
        self._owners.pop(key, None)

    # --- against the ledger ---

    def compare(self, ledger: LedgerWalk) -> None:
        """Check that the rebuilt records are the ledger's: after each change that both have, and at the end those of
        each writer whose records are complete."""
        self._compare_changes(ledger)
        unknown = {writer for writer, end in self._ends.items() if not self._reaches(writer, end)}
        for _ in unknown:
            self._findings.note_partial("replay", "history does not have a writer's whole state (was it switched off?)")
        rebuilt = dict(self._records)
        rebuilt |= {f"{CHECKPOINT}{writer}": each.checkpoint for writer, each in self._writers.items() if each.whole}
        for key in sorted(self._stored.keys() | rebuilt.keys()):
            writers = self._writers_of(key)
            if writers and not writers & unknown:
                self._findings.count("replay")
                self._compare(key, rebuilt.get(key))

    def _compare_changes(self, ledger: LedgerWalk) -> None:
        for name, change in ledger.changes.items():
            digest = self._digests.get(name)
            if digest is not None and digest != change.digest:
                self._wrong(ledger, name, change.offset, "rebuilds another record than the ledger's")
            elif digest is None and change.known and name[1:] in self._offsets and self._history.start == 0:
                self._wrong(ledger, name, change.offset, "does not have a change")

    def _wrong(self, ledger: LedgerWalk, name: ChangeId, offset: int, what: str) -> None:
        key, writer, number = name
        if ledger.commits.arrived(writer):
            self._findings.note_partial("history", MOVED)
            return
        if name in self._gapped and self._recorded.leaves_out(ledger, self._gapped[name], (writer, number)):
            self._findings.note_partial("history", NOT_RECORDED)
            return
        self._findings.wrong(
            "history", self._history.place(self._offsets[writer, number]),
            f"history {what} of {key} in commit {number}", ledger.log.place(offset),
        )  # fmt: skip

    def _reaches(self, writer: str, end: int) -> bool:
        each = self._writers.get(writer)
        return writer.startswith("sweeper/") or (each is not None and each.whole and each.last == end)

    def _writers_of(self, key: str) -> set[str]:
        """The writers that may have written this key: none if it is a sweeper's, or of a host of another partition."""
        here = f"partition/{self._log.partition}"
        first, _, rest = key.partition("/")
        if first == CHECKPOINT[:-1]:
            kind, _, name = rest.partition("/")
            is_ours = rest == here if kind == "partition" else kind == "host" and self._is_home(name)
            return {rest} if is_ours else set()
        host = rest.split("/")[0] if first in ("@host", "@device", "@cordon") else first
        host = unquote(host) if first == "@device" else host
        return {f"host/{host}", here} & self._ends.keys() if self._is_home(host) else set()

    def _is_home(self, host: str) -> bool:
        return wire.is_name(host) and wire.partition_of(host, self._partitions) == self._log.partition

    def _compare(self, key: str, rebuilt: Body | None) -> None:
        record = self._stored.get(key)
        try:
            stored = None if record is None else wire.parse(record.value or b"")
            faults = _differences(stored, rebuilt)
        except (wire.DamagedError, RecursionError):
            return  # the walk reports it
        if not faults:
            return
        if record is not None:
            place = self._log.place(record.offset)
        else:
            writer = key.removeprefix(CHECKPOINT) if key.startswith(CHECKPOINT) else self._owners[key]
            place = self._history.place(self._writers[writer].offset)
        self._findings.wrong("replay", place, f"{key}: {'; '.join(faults)}")


def _last_records(ledger: Log) -> dict[str, Record]:
    """The last record under each key, without those that are deleted."""
    stored: dict[str, Record] = {}
    for record in ledger.records:
        key = (record.key or b"").decode("utf-8", "replace")
        if record.value is None:
            stored.pop(key, None)
        else:
            stored[key] = record
    return stored


def _key(change: Body) -> str:
    return f"{change['host']}/{change['worker']}/{change['incarnation']}"


def _differences(stored: Any, rebuilt: Body | None) -> list[str]:
    if stored == rebuilt:
        return []
    if not isinstance(stored, dict) or rebuilt is None:
        return [f"the ledger has {_short(stored)}, history {_short(rebuilt)}"]
    return [
        f"field {name}: the ledger has {_short(stored.get(name))}, history {_short(rebuilt.get(name))}"
        for name in sorted(stored.keys() | rebuilt.keys())
        if stored.get(name) != rebuilt.get(name)
    ]


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
