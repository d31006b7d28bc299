"""Replays one partition's history and compares the end with the ledger: every record, every field.

A replay begins at a snapshot: all records of a writer, in pieces beside the changes of its commits. It has no rules: it
puts and deletes records, commit by commit, up to each writer's last commit in the ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from outfitter_verify import wire
from outfitter_verify.logs import Log, Record
from outfitter_verify.report import Findings

CHECKPOINT = "@checkpoint/"
SHOWN = 200
"""Most characters of a value in a violation."""

Body = dict[str, Any]


@dataclass(slots=True)
class Progress:
    """The replay of one writer. `last`: its last replayed commit, whose end is at `offset` in history. `whole`: its
    records are complete. `begun`: the commit with which the newest snapshot begins (None: it lacks a piece)."""

    last: int = 0
    offset: int = 0
    checkpoint: Body = field(default_factory=dict)
    whole: bool = False
    begun: object = None
    part: int = 0
    stale: set[str] = field(default_factory=set)
    """Keys from before the snapshot that neither a piece nor a change has put since."""
    changes: list[Body] = field(default_factory=list)
    """The changes since its last commit."""


class Replay:
    """The replay of one partition. Add every history record in order; then call `compare`."""

    def __init__(self, history: Log, ledger: Log, *, partitions: int, findings: Findings) -> None:
        self._history = history
        self._ledger = ledger
        self._partitions = partitions
        self._findings = findings
        self._stored = _last_records(ledger)
        self._ends = {checkpoint.writer: checkpoint.commit for checkpoint in self._checkpoints()}
        self._writers: defaultdict[str, Progress] = defaultdict(Progress)
        self._records: dict[str, Body] = {}
        self._owners: dict[str, str] = {}
        """The writer that put each record."""

    def _checkpoints(self) -> Iterator[wire.Checkpoint]:
        for key, record in self._stored.items():
            if key.startswith(CHECKPOINT):
                try:
                    yield wire.checkpoint(wire.parse(record.value or b""))
                except (wire.DamagedError, AttributeError, RecursionError):
                    continue  # the walk reports it

    # --- replaying ---

    def add(self, offset: int, body: Body) -> None:
        """Add the next record; raises `DamagedError` and what else Python says of a wrong one."""
        kind = body.get("type")
        if kind not in ("transition", "refresh", "put", "snapshot", "commit"):
            return
        writer = str(body["record"]["writer"] if kind == "transition" else body["writer"])
        if kind != "commit":
            self._writers[writer].changes.append(body)
            return
        number = wire.checkpoint(body["checkpoint"]).commit
        progress = self._writers[writer]
        changes, progress.changes = progress.changes, []
        if number > self._ends.get(writer, number):
            return  # the ledger was read before
        if number != progress.last + 1:
            self._begin_again(writer, progress)
        progress.last, progress.offset, progress.checkpoint = number, offset, body["checkpoint"]
        for change in changes:
            self._apply(writer, progress, change)
        for key, position in (body.get("positions") or {}).items():
            self._patch(key, {"queue_position": position, "writer": writer, "commit": number})
        for key in body.get("dropped") or ():
            self._drop(key)

    def _begin_again(self, writer: str, progress: Progress) -> None:
        """Commits are missing: drop the writer's records until a snapshot is whole."""
        progress.whole, progress.begun = False, None
        for key in self._of(writer):
            self._drop(key)

    def _of(self, writer: str) -> set[str]:
        return {key for key, owner in self._owners.items() if owner == writer}

    def _apply(self, writer: str, progress: Progress, change: Body) -> None:
        match change["type"]:
            case "transition":
                self._put(writer, progress, _key(change), change["record"])
            case "put":
                self._put(writer, progress, change["key"], change["record"])
            case "refresh":
                self._patch(_key(change), change["changed"])
            case "snapshot":
                self._add_piece(writer, progress, change)

    def _add_piece(self, writer: str, progress: Progress, piece: Body) -> None:
        """Add a piece of a snapshot. A piece that comes twice was written again after a commit of unknown outcome."""
        part, begun = piece["part"], piece["begun"]
        if part == 0 and progress.begun != begun:
            progress.begun, progress.stale = begun, self._of(writer)
        elif progress.begun != begun or part not in (progress.part, progress.part + 1):
            progress.begun = None
        progress.part = part
        if progress.begun is None:
            return
        for key, record in piece["records"].items():
            self._put(writer, progress, key, record)
        if piece.get("last"):
            for key in progress.stale:
                self._drop(key)
            progress.whole, progress.stale = True, set()

    def _put(self, writer: str, progress: Progress, key: object, record: object) -> None:
        if not isinstance(key, str) or not isinstance(record, dict):
            raise wire.DamagedError("it puts no record under a key")
        self._records[key], self._owners[key] = record, writer
        progress.stale.discard(key)

    def _patch(self, key: str, changed: Body) -> None:
        """Change fields of a record. It may be missing until a later piece of the snapshot."""
        if key in self._records:
            self._records[key] = {**self._records[key], **changed}

    def _drop(self, key: str) -> None:
        self._records.pop(key, None)
        self._owners.pop(key, None)

    # --- against the ledger ---

    def compare(self) -> None:
        """Check that the replayed records are the ledger's, those of each writer whose replay is complete."""
        unknown = {writer for writer, end in self._ends.items() if not self._reaches(writer, end)}
        for _ in unknown:
            self._findings.note_partial("replay", "history does not have a writer's whole state (was it switched off?)")
        replayed = dict(self._records)
        replayed |= {f"{CHECKPOINT}{writer}": each.checkpoint for writer, each in self._writers.items() if each.whole}
        for key in sorted(self._stored.keys() | replayed.keys()):
            writers = self._writers_of(key)
            if writers and not writers & unknown:
                self._findings.count("replay")
                self._compare(key, replayed.get(key))

    def _reaches(self, writer: str, end: int) -> bool:
        progress = self._writers.get(writer)
        return writer.startswith("sweeper/") or (progress is not None and progress.whole and progress.last == end)

    def _writers_of(self, key: str) -> set[str]:
        """The writers that may have written this key: none if it is a sweeper's, or of a host of another partition."""
        here = f"partition/{self._ledger.partition}"
        first, _, rest = key.partition("/")
        if first == CHECKPOINT[:-1]:
            kind, _, name = rest.partition("/")
            is_ours = rest == here if kind == "partition" else kind == "host" and self._is_home(name)
            return {rest} if is_ours else set()
        host = rest.split("/")[0] if first in ("@host", "@device") else first
        host = unquote(host) if first == "@device" else host
        return {f"host/{host}", here} & self._ends.keys() if self._is_home(host) else set()

    def _is_home(self, host: str) -> bool:
        return wire.is_name(host) and wire.partition_of(host, self._partitions) == self._ledger.partition

    def _compare(self, key: str, replayed: Body | None) -> None:
        record = self._stored.get(key)
        try:
            stored = None if record is None else wire.parse(record.value or b"")
            faults = _differences(stored, replayed)
        except (wire.DamagedError, RecursionError):
            return  # the walk reports it
        if not faults:
            return
        if record is not None:
            place = self._ledger.place(record.offset)
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


def _differences(stored: Any, replayed: Body | None) -> list[str]:
    if stored == replayed:
        return []
    if not isinstance(stored, dict) or replayed is None:
        return [f"the ledger has {_short(stored)}, history {_short(replayed)}"]
    return [
        f"field {name}: the ledger has {_short(stored.get(name))}, history {_short(replayed.get(name))}"
        for name in sorted(stored.keys() | replayed.keys())
        if stored.get(name) != replayed.get(name)
    ]


def _short(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
