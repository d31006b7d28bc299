"""Rebuilds each allocation's record after each commit from history alone: from steps and refreshes.

A commit in history consists of transitions with whole records, refreshes with the changed fields, and at the end a
`commit` record with queue positions and deletions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from outfitter_verify import wire
from outfitter_verify.history.recorded_commits import NOT_RECORDED, CommitId, RecordedCommits
from outfitter_verify.ledger.walk import MOVED, Ledger
from outfitter_verify.logs import Log
from outfitter_verify.report import Findings

ChangeId = tuple[str, str, int]
"""A change: the key of its allocation, its writer, its commit number."""


class RebuiltRecords:
    """The records as history says them. Add every history record in order; then call `compare`."""

    def __init__(self, log: Log, recorded: RecordedCommits, findings: Findings) -> None:
        """`recorded` must get each commit before this class does."""
        self._log = log
        self._recorded = recorded
        self._findings = findings
        self._now: dict[str, dict[str, Any]] = {}
        self._changed_keys: defaultdict[str, set[str]] = defaultdict(set)
        """The keys that each writer has changed since its last commit."""
        self._digests: dict[ChangeId, bytes] = {}
        """The digest of the record after each change."""
        self._ends: dict[CommitId, int] = {}
        """The offset of each commit's end."""
        self._whole: dict[str, CommitId] = {}
        """Where each key's last whole record is."""
        self._gapped: dict[ChangeId, CommitId | None] = {}
        """Changes with a gap between them and their last whole record (None: there is none)."""

    def step(self, record: wire.Allocation) -> None:
        """Add a transition, with the whole record after it."""
        self._now[record.key] = dict(record.body)
        self._whole[record.key] = record.writer, record.commit
        self._changed_keys[record.writer].add(record.key)

    def refresh(self, body: Mapping[str, Any]) -> wire.Allocation | None:
        """Apply changed fields without a step. Returns the changed record, if it is known."""
        key = f"{body.get('host')}/{body.get('worker')}/{body.get('incarnation')}"
        changed = body.get("changed")
        if not isinstance(changed, dict):
            raise wire.DamagedError("a refresh without changed fields")
        self._changed_keys[str(body.get("writer"))].add(key)
        if key not in self._now:
            return None
        self._now[key] |= changed
        return wire.allocation(self._now[key])

    def commit(self, offset: int, body: Mapping[str, Any]) -> None:
        """End a commit."""
        checkpoint = wire.checkpoint(body["checkpoint"])
        writer, number = checkpoint.writer, checkpoint.commit
        self._ends[writer, number] = offset
        for key, position in (body.get("positions") or {}).items():
            self._changed_keys[writer].add(key)
            if key in self._now:
                self._now[key] |= {"queue_position": position, "writer": writer, "commit": number}
        resumed = self._recorded.resumed(writer)
        for key in self._changed_keys.pop(writer, ()):
            whole = self._whole.get(key)
            if whole is None or whole[0] != writer or whole[1] < resumed:
                self._gapped[key, writer, number] = whole
            if key in self._now:
                self._digests[key, writer, number] = wire.digest(self._now[key])
        for key in body.get("dropped") or ():
            self._now.pop(key, None)
            self._whole.pop(key, None)

    def compare(self, ledger: Ledger) -> None:
        """Check that the rebuilt records equal the ledger's, at each commit that both have completely."""
        for name, digest in self._digests.items():
            change = ledger.changes.get(name)
            if change is not None and change.digest != digest:
                self._wrong(ledger, name, change.offset, "rebuilds another record than the ledger's")
        if self._log.start > 0:
            return
        for name, change in ledger.changes.items():
            if change.known and name not in self._digests and name[1:] in self._ends:
                self._wrong(ledger, name, change.offset, "does not have a change")

    def _wrong(self, ledger: Ledger, name: ChangeId, offset: int, what: str) -> None:
        key, writer, number = name
        if ledger.commits.arrived(writer):
            self._findings.note_partial("history", MOVED)
            return
        if name in self._gapped and self._recorded.leaves_out(ledger, self._gapped[name], (writer, number)):
            self._findings.note_partial("history", NOT_RECORDED)
            return
        self._findings.wrong(
            "history", self._log.place(self._ends[writer, number]), f"history {what} of {key} in commit {number}",
            ledger.log.place(offset),
        )  # fmt: skip
