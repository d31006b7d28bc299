"""A writer's commits from its checkpoints: numbers, positions, instances, and which commits are hidden.

A log cleaner removes records that a later one of the same key replaces, mostly checkpoints. So a gap in the numbers is
either a violation, or the place of removed records. The offsets decide: removed records leave holes, and each commit
takes at least one offset, that of its checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outfitter_verify.logs import Log, Reading
from outfitter_verify.report import Findings
from outfitter_verify.wire import Allocation, Checkpoint, had_place, partition_of


class Written(NamedTuple):
    """An allocation record in the ledger, and the one before it under its key (if visible)."""

    offset: int
    record: Allocation
    before: Written | None = None
    repeat: bool = False


class VisibleCommit(NamedTuple):
    """One commit: its checkpoint, the checkpoint's place, and the last visible one before it."""

    offset: int
    checkpoint: Checkpoint
    before: Checkpoint | None


class Extent(NamedTuple):
    """How far a writer has read: everything before `to`, and more of some hosts (by key)."""

    to: int
    ahead: Mapping[bytes, int]

    def covers(self, offset: int, key: bytes | None) -> bool:
        return offset < self.end(key)

    def end(self, key: bytes | None) -> int:
        """The offset before which all messages of a host are read."""
        return max(self.to, self.ahead.get(key or b"", 0))


NOTHING = Extent(0, {})
"""Nothing has been read."""


def _number(name: str) -> int | None:
    return int(name) if name.isdecimal() and len(name) < 10 else None


def _offset(commit: VisibleCommit) -> int:
    return commit.offset


@dataclass(slots=True)
class VisibleWriter:
    """One writer's commits so far."""

    name: str
    commits: list[VisibleCommit] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of offsets between which commits of it are missing."""
    opened: list[Written] = field(default_factory=list)
    """Its records that wait for their checkpoint."""
    instances: dict[str, int] = field(default_factory=dict)
    """By manager, the offset at which the writer last became this manager's."""

    def take_opened(self) -> list[Written]:
        """Remove and return the records that a checkpoint ends."""
        records, self.opened = self.opened, []
        return records

    @property
    def last(self) -> Checkpoint | None:
        return self.commits[-1].checkpoint if self.commits else None

    @property
    def host(self) -> str | None:
        """The host of a host's writer; None for other writers."""
        kind, _, name = self.name.partition("/")
        return name if kind == "host" else None

    @property
    def arrived(self) -> bool:
        """Whether any of its records came from another partition or input."""
        return any(commit.checkpoint.moved or commit.checkpoint.base > 0 for commit in self.commits)

    def brings(self, after: int, *, at_once: bool) -> bool:
        """Whether any of its records came here after an offset of the ledger, or (`at_once`) in the same commit."""
        moves = [commit.checkpoint.moved for commit in self.commits[bisect_right(self.commits, after, key=_offset) :]]
        return any(moves[:1] if at_once else moves)

    def in_the_open(self, after: int, before: int) -> bool:
        """Whether no commit of this writer is hidden between two offsets of the ledger (`after` -1: from the start)."""
        if not self.commits:
            return False
        first = self.commits[0]
        if after < first.offset and first.checkpoint.commit != 1:
            return False
        return not any(low < before and high > after for low, high in self.gaps)


@dataclass(slots=True)
class Commits:
    """All writers of one partition of the ledger."""

    ledger: Log
    input_log: Log
    reading: Reading
    findings: Findings
    writers: dict[str, VisibleWriter] = field(default_factory=dict)

    def writer(self, name: str) -> VisibleWriter:
        return self.writers.setdefault(name, VisibleWriter(name))

    def in_the_open(self, writer: str, after: int, before: int) -> bool:
        """Whether all records of `writer` between two offsets are visible."""
        if not self.reading.markers and self.ledger.holes(max(after, self.ledger.start - 1), before):
            return False  # commits leave no holes on this bus, so a hole is a removed record
        commits = self.writers.get(writer)
        return commits is not None and commits.in_the_open(after, before)

    def arrived(self, writer: str) -> bool:
        """See `VisibleWriter.arrived`."""
        commits = self.writers.get(writer)
        return commits is not None and commits.arrived

    def brings(self, writer: str, after: int, *, at_once: bool) -> bool:
        """See `VisibleWriter.brings`."""
        commits = self.writers.get(writer)
        return commits is not None and commits.brings(after, at_once=at_once)

    def shows(self, writer: VisibleWriter, number: int) -> bool:
        """Whether all records of a commit are visible.

        They are one batch with the checkpoint last. If the checkpoint is still there, a log cleaner has kept the
        others, unless it removes records one by one.
        """
        index = bisect_left(writer.commits, number, key=lambda commit: commit.checkpoint.commit)
        if index == len(writer.commits) or writer.commits[index].checkpoint.commit != number:
            return False
        low = writer.commits[index - 1].offset if index else self.ledger.start - 1
        return self.reading.markers or self.ledger.holes(low, writer.commits[index].offset) == 0

    def commit(self, offset: int, checkpoint: Checkpoint) -> tuple[VisibleWriter, VisibleCommit]:
        """Add a checkpoint, and check it against the one before."""
        writer = self.writer(checkpoint.writer)
        commit = VisibleCommit(offset, checkpoint, writer.last)
        self._identity(offset, checkpoint)
        self._number(writer, commit)
        self._position(commit)
        self._instance(writer, commit)
        writer.commits.append(commit)
        self.findings.counts["commits"] += 1
        return writer, commit

    def _wrong(self, check: str, offset: int, what: str, *records: object) -> None:
        self.findings.wrong(check, self.ledger.place(offset), what, *records)

    def _identity(self, offset: int, checkpoint: Checkpoint) -> None:
        self.findings.count("partitions")
        kind, _, name = checkpoint.writer.partition("/")
        home = partition_of(name, self.reading.partitions) if kind == "host" else _number(name)
        moved = kind == "host" and had_place(name, self.ledger.partition, self.reading.partitions)
        if home not in (None, self.ledger.partition) and not moved:
            self._wrong("partitions", offset, f"writer {checkpoint.writer} belongs in partition {home}")
        if checkpoint.partition != self.ledger.partition:
            self._wrong("partitions", offset, f"it names input partition {checkpoint.partition}")
        if checkpoint.cluster != self.reading.cluster:
            what = f"it is of cluster {checkpoint.cluster!r}, but in the topics of {self.reading.cluster!r}"
            self._wrong("writers", offset, what)

    def _number(self, writer: VisibleWriter, commit: VisibleCommit) -> None:
        self.findings.count("commits")
        number = commit.checkpoint.commit
        before = commit.before.commit if commit.before is not None else 0
        shown = self._before(writer)
        if number <= before:
            self._wrong("commits", commit.offset, f"{writer.name} commits number {number} after {before}", *shown)
        elif number > before + 1 and commit.checkpoint.moved:
            writer.gaps.append((writer.commits[-1].offset if writer.commits else -1, commit.offset))
        elif number > before + 1:
            low = writer.commits[-1].offset if writer.commits else -1
            # The first one that is left tells where the numbers begin: a restored writer goes on from elsewhere, and
            # compaction may have removed the commit that said so. At least one is missing then.
            missing = number - before - 1 if writer.commits else 1
            # Each missing commit had a checkpoint and, on a bus with markers, a marker. The marker of the commit before
            # is in between, too.
            markers = self.reading.markers
            needed = missing * (2 if markers else 1) + (1 if markers and writer.commits else 0)
            if self.ledger.holes(low, commit.offset) < needed:
                self._wrong("commits", commit.offset, f"{writer.name} commits number {number} after {before}", *shown)
            else:
                self.findings.note_partial("commits", "older commits are gone, as compaction removes them")
            writer.gaps.append((low, commit.offset))
        token = commit.before.token if commit.before is not None else 0
        self.findings.count("tokens")
        if commit.checkpoint.token < token:
            self._wrong("tokens", commit.offset, f"token {commit.checkpoint.token} after {token}", *shown)

    def _position(self, commit: VisibleCommit) -> None:
        self.findings.count("positions")
        here, before = commit.checkpoint, commit.before
        if here.start > here.to:
            self._wrong("positions", commit.offset, f"it read from {here.start} to {here.to}")
        if before is not None and here.topic_id != before.topic_id and here.writer.startswith("sweeper/"):
            return  # it assigns no numbers, and starts again with another input
        if before is not None and here.base + here.start < before.base + before.to:
            self._wrong("positions", commit.offset, f"it read from {here.start} although {before.to} was next")
        if before is not None and here.topic_id != before.topic_id and here.base < before.base + before.reach:
            self._wrong("positions", commit.offset, "the input was replaced, and its numbers start below the last ones")
        if here.topic_id == self.reading.topic_id and here.to > self.input_log.end:
            self._wrong("positions", commit.offset, f"it read to {here.to}, but the input ends at {self.input_log.end}")
        self._ahead(commit)
        if (
            before is not None
            and here.commit == before.commit + 1
            and not here.writer.startswith("sweeper/")  # a sweeper writes nothing without unroutable messages
            and (here.topic_id, here.base) == (before.topic_id, before.base)
            and here.start > before.to >= self.input_log.start
        ):
            # each commit continues where the one before stopped, unless the input was deleted meanwhile
            self._wrong("positions", commit.offset, f"it read from {here.start}, but {before.to} was next")

    def _ahead(self, commit: VisibleCommit) -> None:
        """Check hosts that are read further: they are in this partition, and the position of a host never goes back."""
        here, before = commit.checkpoint, commit.before
        for host, offset in here.ahead.items():
            if not had_place(host, self.ledger.partition, self.reading.partitions):
                self._wrong("partitions", commit.offset, f"it read ahead for {host}, a host of another partition")
            if offset <= here.to:
                self._wrong("positions", commit.offset, f"{host} is ahead at {offset}, but it read to {here.to} anyway")
            if here.topic_id == self.reading.topic_id and offset > self.input_log.end:
                what = f"it read to {offset} for {host}, but the input ends at {self.input_log.end}"
                self._wrong("positions", commit.offset, what)
        if before is None or (here.topic_id, here.base) != (before.topic_id, before.base):
            return
        for host, offset in before.ahead.items():
            if offset > max(here.to, here.ahead.get(host, 0)):
                what = f"it has read to {max(here.to, here.ahead.get(host, 0))} for {host}, but to {offset} before"
                self._wrong("positions", commit.offset, what)

    def _instance(self, writer: VisibleWriter, commit: VisibleCommit) -> None:
        here, before = commit.checkpoint, commit.before
        if before is not None and here.instance == before.instance:
            return
        self.findings.count("instances")
        self.findings.counts["managers"] += 1
        earlier = writer.instances.get(here.instance)
        # A partition may return to an earlier manager. Then its numbers and positions must still fit.
        if earlier is not None and writer.host is not None:
            self._wrong(
                "instances", commit.offset,
                f"manager {here.instance} of {writer.name} commits although {before.instance if before else ''} "
                "had taken over",
                self.ledger.place(earlier), *self._before(writer),
            )  # fmt: skip
        writer.instances[here.instance] = commit.offset

    def _before(self, writer: VisibleWriter) -> tuple[str, ...]:
        return (str(self.ledger.place(writer.commits[-1].offset)),) if writer.commits else ()

    # --- a commit and its records ---

    def finished(self, writer: VisibleWriter, commit: VisibleCommit) -> list[Written]:
        """The records of a commit, checked against its checkpoint."""
        here = commit.checkpoint
        before = commit.before.commit if commit.before is not None else 0
        records = writer.take_opened()
        for written in records:
            number = written.record.commit
            place = self.ledger.place(commit.offset)
            seen = self.in_the_open(writer.name, written.before.offset if written.before else -1, written.offset)
            is_here = written.repeat or here.moved or not seen
            if not (is_here or before < number <= here.commit) or (number > here.commit and not here.moved):
                self._wrong("commits", written.offset, f"it names commit {number}, but {here.commit} wrote it", place)
            self._check_place(written, writer, is_here=is_here)
            if (written.record.token or 0) > here.token:
                self._wrong(
                    "tokens", written.offset, f"token {written.record.token}, but {here.token} is the last", place
                )
        return records

    def _check_place(self, written: Written, writer: VisibleWriter, *, is_here: bool) -> None:
        """Check that a record names this partition's writer and input."""
        record, before = written.record, written.before
        if is_here:
            return
        if record.writer != writer.name:
            self._wrong("writers", written.offset, f"{record.writer} is no writer for host {record.host}")
        source = record.source_partition
        if source != self.ledger.partition and (before is None or before.record.source_partition != source):
            self._wrong("partitions", written.offset, f"it answers registration partition {source}")

    def finish(self) -> None:
        """Check at the end of the ledger that no record is without its checkpoint."""
        for writer in self.writers.values():
            for written in writer.opened:
                if not written.repeat:
                    self._wrong(
                        "commits", written.offset, f"no checkpoint of {writer.name} follows: the commit is incomplete"
                    )


@dataclass(slots=True)
class Custody:
    """Checks that one writer at a time writes each host's records."""

    ledger: Log
    findings: Findings
    _current: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    """By host: its writer, the manager's instance, and the offset of its last commit for the host."""
    _earlier: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """By host, writer and instance: the last commit before another writer or manager took over."""

    def record(self, offset: int, record: Allocation) -> None:
        """Check the writer that a host's record names."""
        self.findings.count("writers")
        kind, _, name = record.writer.partition("/")
        if record.writer != f"host/{record.host}" and (kind != "partition" or _number(name) is None):
            self.findings.wrong(
                "writers", self.ledger.place(offset), f"{record.writer} is no writer for host {record.host}"
            )

    def commit(self, records: list[Written], commit: VisibleCommit) -> None:
        """Check that no other writer wrote for these hosts in between."""
        here = commit.checkpoint
        for host in {written.record.host: None for written in records if not written.repeat}:
            current = self._current.get(host)
            manager = (here.writer, here.instance)
            if current is not None and current[:2] != manager:
                self._earlier[host, *current[:2]] = current[2]
                earlier = self._earlier.get((host, *manager))
                if earlier is not None and current[0] != here.writer:
                    self.findings.wrong(
                        "writers", self.ledger.place(commit.offset),
                        f"{here.writer} writes for host {host} although {current[0]} had taken over",
                        self.ledger.place(earlier), self.ledger.place(current[2]),
                    )  # fmt: skip
            self._current[host] = (*manager, commit.offset)
