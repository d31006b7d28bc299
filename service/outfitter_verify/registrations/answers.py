"""Promise 2: each registration that a writer has read is answered, and each invalid message is a dead letter.

A commit says how far its writer has read: `input.to`, and `input.ahead` for hosts that are read further. So at each
commit, each earlier message must have its record in the ledger at this prefix, or a dead letter.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from outfitter_verify import wire
from outfitter_verify.ledger.walk import LedgerWalk
from outfitter_verify.ledger.writers import NOTHING, Extent, VisibleCommit, VisibleWriter, Written
from outfitter_verify.logs import Partition, Record
from outfitter_verify.registrations.messages import Classified, MessageKind, classify
from outfitter_verify.report import Findings


class Letter(NamedTuple):
    """A dead letter: its place, its writer, whether it has its message's bytes, and when it was written."""

    offset: int
    writer: str
    fits: bool
    at_ms: int


class Input(NamedTuple):
    """A writer's newest input: its topic's id, the number added to its offsets, the first offset that it answers for,
    and whether that topic exists now and the writer never had another.

    An earlier input no longer exists, so the checker cannot read it.
    """

    topic_id: str
    base: int
    begin: int
    only: bool


_MOST_IN_BATCH = 1_000_000

RATION, RATION_MS = 100, 120_000
"""A writer with so many dead letters within this time before a commit needs no more for that commit. It writes so many
a minute for a host, and counts the others in one letter after that minute."""
COMMIT_MS = 15_000
"""The batches of one commit have timestamps that differ by at most a transaction's time-out."""
RATIONED = "more messages were refused within a minute than get a dead letter each"


class Answers:
    """The registrations of one partition and their answers. Call `commit` at each commit, and `finish` at the end.
    `messages`: the classified messages by their offsets."""

    def __init__(
        self,
        logs: Partition,
        inputs: Mapping[str, Input],
        *,
        partitions: int,
        unseen: int = 0,
        findings: Findings,
    ) -> None:
        """`unseen`: see `wire.Checkpoint`."""
        self._log = logs.registrations
        self._ledger_since_ms = min((record.timestamp_ms for record in logs.allocations.records), default=0)
        self._letter_log = logs.dead_letters
        self._inputs = inputs
        self._findings = findings
        self.messages: dict[int, Classified] = {}
        self._letters: defaultdict[int, list[Letter]] = defaultdict(list)
        self._written_ms: defaultdict[str, list[int]] = defaultdict(list)
        self._read: dict[str, Extent] = {}
        self._newest_commits: dict[str, int] = {}
        self._doubts: list[tuple[int, int, str]] = []
        self._unroutable: set[int] = set()
        self._unseen = unseen
        self._in_batches: set[int] = set()
        """Offsets in dead letters of whole record batches, whose bytes cannot be compared with records."""
        self._hosts: defaultdict[bytes, list[int]] = defaultdict(list)
        hosts = self._hosts
        for record in self._log.records:
            message = self.messages[record.offset] = classify(record.key, record.value)
            findings.counts["messages"] += 1
            findings.counts["registrations"] += message.kind is MessageKind.REGISTER
            if record.key is not None and _home(record.key, partitions) == self._log.partition:
                hosts[record.key].append(record.offset)
            else:
                self._unroutable.add(record.offset)
        for record in self._letter_log.records:
            self._letter(record)
        for times in self._written_ms.values():
            times.sort()
        self._messages_by_writer = {name: self._messages_of(name, hosts) for name in inputs}
        self._answered_for = {offset for key in hosts for offset in hosts[key] if not self._swept(key, offset)}

    def _messages_of(self, writer: str, hosts: Mapping[bytes, list[int]]) -> list[int]:
        """The offsets of the messages for `writer`: those of its host, all of its partition, or the unroutable ones."""
        scope, _, name = writer.partition("/")
        if scope == "partition":
            return sorted(self.messages)
        if scope == "sweeper":
            return sorted(
                [*self._unroutable, *(offset for key in hosts for offset in hosts[key] if self._swept(key, offset))]
            )
        return [offset for offset in hosts.get(name.encode(), []) if offset >= self._inputs[writer].begin]

    def _swept(self, key: bytes, offset: int) -> bool:
        """Whether a host's message is for the sweeper: the host has no manager, or one that began later."""
        manager = self._inputs.get(f"host/{key.decode()}")
        return manager is None or offset < manager.begin

    # --- at a commit -----------------------------------------------------------------------------------

    def commit(
        self, ledger: LedgerWalk, writer: VisibleWriter, commit: VisibleCommit, records: list[Written]
    ) -> tuple[Extent, Extent] | None:
        """Check all messages that the writer has read with this commit, and the registrations that its records answer.
        Returns how far it had read before and has now; None for another input than the newest."""
        here, newest = commit.checkpoint, self._inputs.get(writer.name)
        if newest is None or (here.topic_id, here.base) != (newest.topic_id, newest.base):
            return None
        before = self._read.get(writer.name)
        if before is None:
            before = Extent(here.start if here.commit == 1 or not newest.only else self._log.start, {})
        after = Extent(here.to, {host.encode(): offset for host, offset in here.ahead.items()})
        self._read[writer.name] = after
        own = self._messages_by_writer[writer.name]
        for offset in _between(own, before.to, after.to):
            if not before.ahead or not before.covers(offset, self._key(offset)):
                self._check_answer(ledger, writer, commit, offset)
        for key, end in after.ahead.items():
            for offset in _between(self._hosts.get(key, []), max(after.to, before.ahead.get(key, 0)), end):
                self._check_answer(ledger, writer, commit, offset)
        for written in records:
            if not written.repeat and written.before is None:
                self._check_source(ledger, writer, commit, written, before, after)
        self._newest_commits[writer.name] = commit.offset
        return before, after

    def _key(self, offset: int) -> bytes | None:
        message = self._log.at(offset)
        return message.key if message is not None else None

    def _check_answer(self, ledger: LedgerWalk, writer: VisibleWriter, commit: VisibleCommit, offset: int) -> None:
        message = self.messages[offset]
        if offset < self._unseen:
            what = f"not looked at before {self._log.place(self._unseen)}: version 0.2 added partitions"
            self._findings.note_partial("answers", what)
            return
        if offset in self._in_batches:
            self._findings.note_partial("answers", "record batches that their manager could not read")
            return
        refused = any(letter.fits for letter in self._letters.get(offset, ()))
        place = ledger.log.place(commit.offset)
        rationed = not refused and self._is_rationed(writer.name, ledger.log.at(commit.offset))
        # for a host without a manager, only registrations need a dead letter
        unserved = writer.name.startswith("sweeper/") and message.kind in (MessageKind.REGISTER, MessageKind.UNSURE)
        if message.kind is MessageKind.NONE or offset in self._unroutable or unserved:
            self._findings.count("dead-letters")
            if not refused and self._letter_log.start > 0:
                self._findings.note_partial("dead-letters", "dead letters were deleted by retention")
            elif rationed:
                self._findings.note_partial("dead-letters", RATIONED)
            elif not refused:
                why = message.why or "its host has another partition, or no manager"
                self._wrong("dead-letters", offset, f"{writer.name} read it and wrote no dead letter ({why})", place)
            return
        answer = ledger.now.get(message.allocation) if message.allocation is not None else None
        if message.kind in (MessageKind.REGISTER, MessageKind.UNSURE):
            self._findings.count("answers")
            if answer is not None or refused or self._was_deleted_now(ledger, writer, message.allocation):
                return
            if rationed:
                self._findings.note_partial("answers", RATIONED)
                return
            what = f"{writer.name} read the registration of {message.allocation}, which has no record"
            if ledger.commits.in_the_open(writer.name, -1, commit.offset):
                self._wrong("answers", offset, what, place)
            else:
                self._doubts.append((offset, commit.checkpoint.base, message.allocation or ""))
        elif message.kind is MessageKind.DEREGISTER and answer is not None and (not refused or message.certain):
            self._findings.count("answers")
            state, source = answer.record.state, answer.record.source
            if source <= offset + commit.checkpoint.base and state in ("pending", "preparing", "allocated"):
                if refused and ledger.is_refused(answer.record.host):
                    self._findings.note_partial("answers", "a host's records are invalid, so its messages are refused")
                elif refused:
                    what = f"{writer.name} refused the deregistration of {message.allocation}, which is {state}"
                    self._wrong("answers", offset, what, place)
                elif ledger.commits.in_the_open(answer.record.writer, answer.offset, commit.offset):
                    what = f"{writer.name} read the deregistration of {message.allocation}, which is still {state}"
                    self._wrong("answers", offset, what, place)
                else:
                    self._findings.note_partial("answers", "older answers are gone, as compaction removes them")

    def _was_deleted_now(self, ledger: LedgerWalk, writer: VisibleWriter, key: str | None) -> bool:
        """Whether the record that was the answer is deleted in the same commit in which the registration is read."""
        return key is not None and key in ledger.gone and ledger.newest[key] > self._newest_commits.get(writer.name, -1)

    def _is_rationed(self, writer: str, commit: Record | None) -> bool:
        """Whether a writer had reached its limit of dead letters at this commit."""
        times = self._written_ms.get(writer)
        if times is None or commit is None:
            return False
        at = commit.timestamp_ms
        return bisect_right(times, at + COMMIT_MS) - bisect_left(times, at - RATION_MS) >= RATION

    def _check_source(
        self,
        ledger: LedgerWalk,
        writer: VisibleWriter,
        commit: VisibleCommit,
        written: Written,
        before: Extent,
        after: Extent,
    ) -> None:
        """Check that a new record answers a registration that this commit has read."""
        record, here = written.record, commit.checkpoint
        if record.source == wire.UNSEEN:
            if record.state not in wire.FINAL:
                ledger.wrong("answers", written.offset, f"{record.key} is {record.state}, but nobody registered it")
            return
        offset = record.source - here.base
        if offset < 0:
            return  # of an earlier input
        host = record.host.encode()
        if before.covers(offset, host) or not after.covers(offset, host):
            read = f"from {before.end(host)} to {after.end(host)}"
            what = f"{record.key} answers registration {offset}, but its commit read {read}"
            ledger.suspect("answers", written.offset, what, writer=writer.name, after=-1)
        elif self._log.start <= offset < self._log.end and not self._log.hides(offset):
            message = self.messages.get(offset)
            if message is None:
                # a client may show fewer records than a batch has, such as librdkafka after the first gzip member
                self._findings.note_partial("answers", "registrations that its client does not show")
            elif message.kind not in (MessageKind.REGISTER, MessageKind.UNSURE) or message.allocation != record.key:
                what = f"{record.key} answers a registration that is not its own"
                ledger.wrong("answers", written.offset, what, self._log.place(offset))

    # --- at the end ------------------------------------------------------------------------------------

    def finish(self, ledger: LedgerWalk, sources: Mapping[str, set[int]]) -> None:
        """Decide the cases that compaction left open, and find duplicate dead letters. `sources`: the registrations in
        history, by allocation."""
        for offset, base, key in self._doubts:
            if not any(source <= offset + base for source in ledger.sources.get(key, set()) | sources.get(key, set())):
                self._findings.note_partial("answers", "older answers are gone, as compaction removes them")
        for offset, letters in self._letters.items():
            if not self._log.hides(offset) and offset not in self._in_batches:
                self._check_letters(offset, letters)
        self._count_waiting()

    def _count_waiting(self) -> None:
        """Count messages that are not read yet (`unread`), and those without a writer (`unserved`)."""
        served: set[int] = set()
        for writer, own in self._messages_by_writer.items():
            served.update(own)
            read = self._read.get(writer, NOTHING)
            self._findings.counts["unread"] += sum(
                self.messages[offset].kind is MessageKind.REGISTER and not read.covers(offset, self._key(offset))
                for offset in own[bisect_left(own, read.to) :]
            )
        self._findings.counts["unserved"] += len(self.messages.keys() - served)

    def _check_letters(self, offset: int, letters: list[Letter]) -> None:
        first: dict[str, Letter] = {}
        for letter in letters:
            source = self._inputs.get(letter.writer)
            if source is None or not source.only or letter.at_ms < self._ledger_since_ms:
                continue  # of a writer of an earlier input, or ledger
            place = self._letter_log.place(letter.offset)
            extent = self._read.get(letter.writer, NOTHING)
            if not letter.fits and self._log.start <= offset and extent.covers(offset, self._key(offset)):
                self._findings.wrong(
                    "dead-letters", place, "its bytes are not those of its message", self._log.place(offset)
                )
            elif letter.writer.startswith("sweeper/") and offset in self._answered_for:
                what = f"{letter.writer} reports a message that its host's manager answers"
                self._findings.wrong("dead-letters", place, what, self._log.place(offset))
            elif letter.writer in first:
                self._findings.wrong(
                    "dead-letters", place, f"{letter.writer} reports the message twice",
                    self._letter_log.place(first[letter.writer].offset), self._log.place(offset),
                )  # fmt: skip
            first.setdefault(letter.writer, letter)

    def _letter(self, record: Record) -> None:
        self._findings.counts["dead letters"] += 1
        if record.value is None:
            self._damaged(record, "somebody wrote a tombstone there, which deletes a dead letter: no manager does so")
            return
        try:
            body = wire.parse(record.value)
            source = body["source"]
            place = f"{source['topic']}/{source['partition']}/{source['offset']}"
            offset, writer = int(source["offset"]), str(body["writer"])
            is_here = (source["topic"], source["partition"]) == (self._log.topic, self._log.partition)
            digest = (int(body["length"]), str(body["sha256"]))
            first = int(body.get("first", offset + 1))
        except (wire.DamagedError, LookupError, TypeError, ValueError, RecursionError) as error:
            self._damaged(record, f"it is no dead letter: {error}")
            return
        if record.key != place.encode() or not is_here:
            self._damaged(
                record, f"it is about {place}, under the key {(record.key or b'').decode('utf-8', 'replace')}"
            )
            return
        if first <= offset:
            self._in_batches.update(range(max(first, offset - _MOST_IN_BATCH), offset + 1))
        message = self._log.at(offset)
        value = (message.value or b"") if message is not None else None
        fits = value is not None and digest == (len(value), hashlib.sha256(value).hexdigest())
        self._letters[offset].append(Letter(record.offset, writer, fits, record.timestamp_ms))
        self._written_ms[writer].append(record.timestamp_ms)

    def _damaged(self, record: Record, what: str) -> None:
        self._findings.wrong("dead-letters", self._letter_log.place(record.offset), what)

    def _wrong(self, check: str, offset: int, what: str, *records: object) -> None:
        self._findings.wrong(check, self._log.place(offset), what, *records)


def _between(offsets: list[int], begin: int, end: int) -> list[int]:
    return offsets[bisect_left(offsets, begin) : bisect_left(offsets, end)]


def _home(key: bytes, partitions: int) -> int | None:
    try:
        return wire.partition_of(key.decode(), partitions)
    except UnicodeDecodeError:
        return None
