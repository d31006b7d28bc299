"""Compares history with the ledger: it has every step, in order, and each record as the ledger at that commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from outfitter_verify import wire
from outfitter_verify.history.rebuilt import ChangeId, RebuiltRecords
from outfitter_verify.history.recorded_commits import NOT_RECORDED, CommitId, RecordedCommits
from outfitter_verify.ledger.walk import MOVED, AllocationChange, LedgerWalk
from outfitter_verify.logs import Log, Record
from outfitter_verify.report import Findings


class RecordedStep(NamedTuple):
    """A transition: its place, and its states before and after."""

    offset: int
    before: str | None
    after: str


class LastStep(NamedTuple):
    """An allocation's last step so far: the state after it, its registration, its offset and its commit."""

    state: str
    source: int
    offset: int
    commit: CommitId


class Doubt(NamedTuple):
    """A step that does not begin where the last one (None: none before) ended: a violation, unless history may lack a
    step in between."""

    offset: int
    what: str
    last: LastStep | None
    commit: CommitId


class History:
    """One whole partition of the history, beside the same partition of the ledger. `sources`: the registrations that
    its records answer, by key."""

    def __init__(self, log: Log, ledger: Log, *, partitions: int, findings: Findings) -> None:
        self.sources: defaultdict[str, set[int]] = defaultdict(set)
        self._log = log
        self._partitions = partitions
        self._findings = findings
        self._steps: dict[ChangeId, list[RecordedStep]] = {}
        self._oldest: dict[str, int] = {}
        """By writer: the smallest number of a commit with a step."""
        self._doubts: list[Doubt] = []
        self._last: dict[str, LastStep] = {}
        self._commits = RecordedCommits()
        self._rebuilt = RebuiltRecords(log, ledger, self._commits, partitions=partitions, findings=findings)
        for record in log.records:
            try:
                self._add(record)
            except (wire.DamagedError, AttributeError, LookupError, TypeError, RecursionError) as error:
                self._wrong(record.offset, f"it is no history record: {error}")

    def _add(self, record: Record) -> None:
        body = wire.parse(record.value or b"")
        match body.get("type"):
            case "transition":
                self._transition(record, body)
            case "snapshot":
                self._commits.snapshot(body)
            case "commit":
                self._commits.commit(wire.checkpoint(body["checkpoint"]))
        self._rebuilt.add(record.offset, body)

    def _transition(self, record: Record, body: Mapping[str, Any]) -> None:
        self._findings.count("history")
        self._findings.counts["transitions"] += 1
        after = wire.allocation(body["record"]) if isinstance(body.get("record"), dict) else None
        key = f"{body.get('host')}/{body.get('worker')}/{body.get('incarnation')}"
        if after is None or not (record.key == after.key.encode() == key.encode()) or body.get("to") != after.state:
            self._wrong(record.offset, f"a transition of {key} whose key, record or state belongs to another one")
            return
        self._findings.count("partitions")
        if not wire.had_place(after.host, self._log.partition, self._partitions):
            self._findings.wrong(
                "partitions", self._log.place(record.offset), f"host {after.host} belongs in another partition"
            )
        before = body.get("from")
        self._chain(record.offset, after, before)
        self.sources[after.key].add(after.source)
        step = RecordedStep(record.offset, before, after.state)
        self._steps.setdefault((after.key, after.writer, after.commit), []).append(step)
        self._oldest[after.writer] = min(after.commit, self._oldest.get(after.writer, after.commit))

    def _chain(self, offset: int, after: wire.Allocation, before: str | None) -> None:
        """Check that each step is legal and begins where the last one ended."""
        last, here = self._last.get(after.key), (after.writer, after.commit)
        self._last[after.key] = LastStep(after.state, after.source, offset, here)
        if before != after.state and (before, after.state) not in wire.STEPS and after.state in wire.STATES:
            self._wrong(offset, f"{after.key} goes from {before} to {after.state}")
        elif last is None:
            if before is not None and self._log.start == 0:
                self._doubts.append(Doubt(offset, f"{after.key} begins with a step from {before}", None, here))
        elif before != last.state and not (
            # the allocation ended and was deleted meanwhile, and this is another registration
            before is None and last.state in wire.FINAL and (after.source != last.source or after.source == wire.UNSEEN)
        ):
            what = f"{after.key} goes from {before}, but its last step led to {last.state}"
            self._doubts.append(Doubt(offset, what, last, here))

    def _wrong(self, offset: int, what: str, *records: object) -> None:
        self._findings.wrong("history", self._log.place(offset), what, *records)

    # --- against the ledger ----------------------------------------------------------------------------

    def compare(self, ledger: LedgerWalk) -> None:
        """Check that history has exactly the ledger's changes."""
        for doubt in self._doubts:
            self._judge(ledger, doubt)
        writing = self._writing(ledger.changes)
        for name, change in ledger.changes.items():
            steps = self._steps.get(name)
            if steps is None:
                if change.before != change.state:
                    self._missing(ledger, name, change, writing)
                continue
            self._agree(ledger, name, change, steps)
        for name, steps in self._steps.items():
            if name not in ledger.changes:
                self._invented(ledger, name, steps[-1])
        self._rebuilt.compare(ledger)

    def _judge(self, ledger: LedgerWalk, doubt: Doubt) -> None:
        offset, what, last, commit = doubt
        if ledger.commits.arrived(commit[0]):
            self._findings.note_partial("history", MOVED)
        elif self._commits.leaves_out(ledger, last.commit if last is not None else None, commit):
            self._findings.note_partial("history", NOT_RECORDED)
        else:
            self._wrong(offset, what, *([self._log.place(last.offset)] if last is not None else []))

    def _writing(self, changes: Mapping[ChangeId, AllocationChange]) -> set[tuple[str, str]]:
        """The writers with instance that wrote any history: others may have it switched off."""
        return self._commits.instances | {(name[1], changes[name].instance) for name in self._steps if name in changes}

    def _missing(
        self, ledger: LedgerWalk, name: ChangeId, change: AllocationChange, writing: set[tuple[str, str]]
    ) -> None:
        key, writer, commit = name
        if not change.known:
            self._findings.note_partial("history", "an earlier record was compacted away")
        elif (writer, change.instance) not in writing:
            self._findings.note_partial("history", "a manager writes no history (is it switched off?)")
        elif self._log.start == 0 and self._commits.begins_anew(writer, commit):
            self._findings.note_partial("history", "its topic was recreated, so its beginning is gone")
        elif self._log.start > 0 and commit <= self._oldest.get(writer, commit):
            self._findings.note_partial("history", "its beginning was deleted by retention")
        else:
            what = f"history does not have the step of {key} from {change.before} to {change.state}"
            self._findings.wrong("history", ledger.log.place(change.offset), what)

    def _agree(self, ledger: LedgerWalk, name: ChangeId, change: AllocationChange, steps: list[RecordedStep]) -> None:
        first, last = steps[0], steps[-1]
        place = ledger.log.place(change.offset)
        if last.after != change.state:
            self._wrong(last.offset, f"{name[0]} is {last.after}, but {change.state} in the ledger", place)
        elif self._log.start > 0 and name[2] <= self._oldest[name[1]]:
            pass  # retention may have deleted the commit's first steps
        elif change.known and first.before != change.before and not _new_life(first, change):
            self._wrong(
                first.offset, f"{name[0]} goes from {first.before}, but was {change.before} in the ledger", place
            )

    def _invented(self, ledger: LedgerWalk, name: ChangeId, step: RecordedStep) -> None:
        key, writer, commit = name
        in_ledger = ledger.commits.writers.get(writer)
        if in_ledger is None or in_ledger.last is None or commit > in_ledger.last.commit:
            return  # it is newer than the ledger, which was read before history
        if not ledger.commits.shows(in_ledger, commit):
            self._findings.note_partial("history", "the ledger's records of its commits were compacted away")
        else:
            self._wrong(step.offset, f"{writer}'s commit {commit} wrote no record of {key}")


def _new_life(first: RecordedStep, change: AllocationChange) -> bool:
    return first.before is None and change.before in (*wire.FINAL, None)
