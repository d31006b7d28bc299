"""Walks through one partition of the ledger, record by record, and makes all checks on its prefixes.

A violation that compaction may explain is a suspicion first. It is judged at the end, when it is known what is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from outfitter_verify import wire
from outfitter_verify.ledger import choices, operators
from outfitter_verify.ledger.cordons import Cordons
from outfitter_verify.ledger.devices import Holdings, grants
from outfitter_verify.ledger.order import Order
from outfitter_verify.ledger.writers import Commits, Custody, VisibleCommit, VisibleWriter, Written
from outfitter_verify.logs import Log, Record
from outfitter_verify.report import Findings


class Suspicion(NamedTuple):
    """A violation, unless records of `writer` between two offsets are hidden, or `key` has a later record, so that an
    earlier one may have been removed."""

    check: str
    offset: int
    what: str
    records: tuple[str, ...]
    writer: str
    after: int
    key: str | None = None


class AllocationChange(NamedTuple):
    """A commit's change of one allocation, to compare with history: its state, and the one before.

    `known` is False if the state before is hidden; `digest` is of the whole record.
    """

    offset: int
    state: str
    before: str | None
    known: bool
    digest: bytes
    instance: str


MOVED = "it was restored from a backup, or version 0.2 moved it here: earlier records are elsewhere"

OnCommit = Callable[[VisibleWriter, VisibleCommit, list[Written]], None]


class LedgerWalk:
    """One partition of the ledger, at the prefix that the walk has reached."""

    def __init__(
        self,
        log: Log,
        commits: Commits,
        order: Order,
        cordons: Cordons,
        *,
        partitions: int,
        findings: Findings,
        on_commit: OnCommit,
    ) -> None:
        self.log = log
        self.commits = commits
        self.now: dict[str, Written] = {}
        """The records by key."""
        self.gone: dict[str, int] = {}
        self.changes: dict[tuple[str, str, int], AllocationChange] = {}
        """Each commit's changes by key, writer and commit."""
        self.newest: dict[str, int] = {}
        """Each key's last place."""
        self.sources: dict[str, set[int]] = {}
        """The numbers of the registrations that each key's records answer."""
        self._order = order
        self._cordons = cordons
        self._partitions = partitions
        self._findings = findings
        self._on_commit = on_commit
        self._holdings = Holdings()
        self._custody = Custody(log, findings)
        self._suspicions: list[Suspicion] = []
        self._tokens: dict[tuple[str, int], tuple[str, int]] = {}
        self._damaged: set[str] = set()
        self._refused: set[str] = set()
        self._misplaced: dict[str, tuple[int, str]] = {}

    def holders(self) -> Iterator[tuple[str, str, Written, bool]]:
        """The holders of devices at the end, by host and by each of the device's names, and whether each holds it
        alone."""
        for host, name, key, alone in self._holdings.all():
            yield host, name, self.now[key], alone

    def walk(self) -> None:
        """Walk through all records."""
        for record in self.log.records:
            self._take(record)
        self.commits.finish()
        self._judge()
        for offset, what in self._misplaced.values():
            self.wrong("partitions", offset, what)
        self._order.finish(self.now, self._holdings, self._cordons.takes_out)
        self._cordons.finish()
        counts = self._findings.counts
        for key, written in self.now.items():
            counts[written.record.state] += 1
            self._findings.last[key] = written.record.body

    def is_refused(self, host: str) -> bool:
        """Whether a manager may refuse a host, because the host has had invalid records."""
        return host in self._refused

    def _refuse(self, key: str) -> None:
        first, *rest = key.split("/")
        self._refused.add(rest[0] if rest and first in ("@host", "@device", "@cordon") else first)

    def wrong(self, check: str, offset: int, what: str, *records: object) -> None:
        self._findings.wrong(check, self.log.place(offset), what, *records)

    def suspect(self, check: str, offset: int, what: str, *records: str, writer: str, after: int) -> None:
        self._suspicions.append(Suspicion(check, offset, what, records, writer, after))

    def _suspect_after(self, other: Written, check: str, offset: int, what: str, key: str | None = None) -> None:
        """Suspect a record because of another one that is before it in the ledger."""
        place = str(self.log.place(other.offset))
        self._suspicions.append(Suspicion(check, offset, what, (place,), other.record.writer, other.offset, key))

    def _judge(self) -> None:
        for suspicion in self._suspicions:
            check, offset, key = suspicion.check, suspicion.offset, suspicion.key
            is_proved = self.commits.in_the_open(suspicion.writer, suspicion.after, offset)
            if self.commits.brings(suspicion.writer, offset, at_once=check == "tokens"):
                self._findings.note_partial(check, MOVED)
            elif is_proved or (key is not None and self.newest.get(key, -1) <= offset):
                self.wrong(check, offset, suspicion.what, *suspicion.records)
            else:
                self._findings.note_partial(check, "the record that would decide it was compacted away")

    # --- record by record ---

    def _take(self, record: Record) -> None:
        try:
            key = (record.key or b"").decode()
        except UnicodeDecodeError:
            key = ""
        if not key:
            self.wrong("writers", record.offset, "its key is no key of the ledger")
            return
        if record.value is None:
            self._tombstone(record.offset, key)
            return
        try:
            self._body(record.offset, key, wire.parse(record.value))
        except (wire.DamagedError, RecursionError) as error:
            self._damaged.add(key)
            self._refuse(key)
            self.wrong("writers", record.offset, f"{key}: {error}")

    def _body(self, offset: int, key: str, body: Any) -> None:
        kind = body.get("type") if isinstance(body, dict) else None
        if kind == "allocation":
            record = wire.allocation(body)
            self._key(offset, key, record.key)
            self._home(offset, key, record.host)
            self._allocation(offset, record)
        elif kind == "checkpoint":
            checkpoint = wire.checkpoint(body)
            self._key(offset, key, checkpoint.key)
            writer, commit = self.commits.commit(offset, checkpoint)
            records = self.commits.finished(writer, commit)
            self._custody.commit(records, commit)
            for written in records:
                self._keep(written, checkpoint)
            self._order.commit(self.now, checkpoint, records)
            self._cordons.commit(commit, records)
            self._needs_parts(commit, records)
            self._on_commit(writer, commit, records)
        elif kind in ("host", "device"):
            host = body.get("host")
            if not wire.is_name(host):
                raise wire.DamagedError(f"its field 'host' is {host!r}")
            self._findings.count("writers")
            own = f"@host/{host}" if kind == "host" else f"@device/{host}/{body.get('id')}"
            self._key(offset, unquote(key) if kind == "device" else key, own)
            self._home(offset, key, host)
            if kind == "host":
                inventories = wire.inventories(body)
                self._holdings.connect(host, inventories.values())
                self._order.host(offset, host, inventories)
                self._cordons.host(host, inventories)
        elif kind == "cordon":
            cordon = wire.cordon(body)
            self._findings.count("writers")
            self._key(offset, key, cordon.key)
            self._home(offset, key, cordon.host)
            self._cordons.put(offset, cordon)
        elif isinstance(kind, str):
            self._findings.note_partial("writers", f"this version does not know records of type {kind!r}")
        else:
            raise wire.DamagedError("it is no object with a type")

    def _key(self, offset: int, key: str, own: str) -> None:
        if key != own:
            self.wrong("writers", offset, f"its body belongs under {own}, but it is under {key}")

    def _needs_parts(self, commit: VisibleCommit, records: list[Written]) -> None:
        """Check that managers that do not know parts refuse this ledger, from the first record that says something of
        them on."""
        here = commit.checkpoint
        if any(written.record.uses for written in records if not written.repeat) and "parts" not in here.needs:
            self.wrong("writers", commit.offset, "a manager that knows no parts of devices would work on this ledger")

    def _home(self, offset: int, key: str, host: str) -> None:
        self._findings.count("partitions")
        home = wire.partition_of(host, self._partitions)
        if home == self.log.partition:
            return
        what = f"host {host} belongs in partition {home}"
        if wire.had_place(host, self.log.partition, self._partitions):
            self._misplaced[key] = offset, what  # unless it is moved, and then deleted here
        else:
            self.wrong("partitions", offset, what)

    def _tombstone(self, offset: int, key: str) -> None:
        self._findings.counts["tombstones"] += 1
        self._cordons.delete(offset, key)
        before = self.now.pop(key, None)
        self.newest[key] = offset
        self._holdings.drop(key)
        moved = self._misplaced.pop(key, None) is not None
        if before is None:
            return
        self._order.delete(before.record)
        self.gone[key] = before.record.source
        if before.record.state not in wire.FINAL and key not in self._damaged and not moved:
            self._suspect_after(before, "steps", offset, f"{key} is deleted while it is {before.record.state}")

    def _allocation(self, offset: int, record: wire.Allocation) -> None:
        self._findings.counts["records"] += 1
        before = self.now.get(record.key)
        repeat = before is not None and before.record.body == record.body
        written = Written(offset, record, before._replace(before=None) if before else None, repeat)
        self.now[record.key] = written
        self.newest[record.key] = offset
        self.sources.setdefault(record.key, set()).add(record.source)
        self._custody.record(offset, record)
        self._exclusivity(written)
        self._ending(record).opened.append(written)
        self._findings.count("steps")
        if repeat:
            return
        if record.state not in wire.STATES:
            self._findings.note_partial("steps", f"this version does not know state {record.state!r}")
            self._refused.add(record.host)
            return
        self._step(written)
        self._token(written)
        if record.holds and (before is None or not before.record.holds):
            self._findings.count("operators", len(record.operators))
            for what in operators.faults(record):
                self.wrong("operators", offset, what)
            self._choices(written)

    def _choices(self, written: Written) -> None:
        """A worker has been granted devices."""
        record, before = written.record, written.before.record if written.before is not None else None
        if not record.request.choices and not (before is not None and before.request.choices):
            return
        self._findings.count("choices")
        if not choices.is_known(record):
            self._findings.note_partial("choices", "this version does not know all words of a worker's clauses")
            return
        for what in choices.faults(record, before):
            self.wrong("choices", written.offset, what)

    def _ending(self, record: wire.Allocation) -> VisibleWriter:
        """The writer whose checkpoint ends a record's commit. A restored record still names its former writer."""
        is_owner = record.writer.startswith("partition/")
        return self.commits.writer(f"partition/{self.log.partition}" if is_owner else record.writer)

    def _exclusivity(self, written: Written) -> None:
        granted = grants(written)
        self._findings.count("exclusivity", granted)
        self._findings.counts["grants"] += granted > 0
        key = written.record.key
        for device, other in self._holdings.put(written.record):
            what = f"{key} holds {device} of host {written.record.host}, which {other} holds as well"
            self._suspect_after(self.now[other], "exclusivity", written.offset, what, key=other)

    def _step(self, written: Written) -> None:
        record, before = written.record, written.before
        key, state = record.key, record.state
        if before is None:
            old = self.gone.get(key)
            if old is not None and record.source != wire.UNSEEN and record.source <= old:
                what = f"{key} was deleted, and answers the same registration again"
                self.suspect("steps", written.offset, what, writer=record.writer, after=-1)
            return
        was = before.record
        place = str(self.log.place(before.offset))
        if record.source != was.source:
            what = f"{key} answered registration {was.source} before, but now {record.source}"
            self._suspect_after(before, "steps", written.offset, what)
        elif was.state in wire.FINAL:
            what = f"{key} was {was.state}, which is final, but is {state} now"
            if wire.is_set_back(record.body, was.body):
                return
            if record.source == wire.UNSEEN:  # perhaps deleted, and then deregistered again before its registration
                self._suspect_after(before, "steps", written.offset, what)
            elif state != was.state or wire.fingerprint(record.body) != wire.fingerprint(was.body):
                self.wrong("steps", written.offset, what, place)
        elif state != was.state and was.state in wire.STATES and (was.state, state) not in wire.LEAPS:
            self.wrong("steps", written.offset, f"{key} goes from {was.state} to {state}", place)
        elif was.state == "releasing" and state in wire.FINAL and was.outcome not in (None, state):
            self.wrong("steps", written.offset, f"{key} had to become {was.outcome}, but is {state} now", place)
        elif was.holds and record.holds and wire.devices(was.body) != wire.devices(record.body):
            self.wrong("steps", written.offset, f"{key} has other devices than it was granted", place)

    def _token(self, written: Written) -> None:
        record, before = written.record, written.before
        token, had = record.token, before.record.token if before is not None else None
        if record.holds and token is None:
            self.wrong("tokens", written.offset, f"{record.key} is {record.state} without a token")
        if before is not None and had is not None and record.source == before.record.source:
            if token != had:
                place = self.log.place(before.offset)
                self.wrong("tokens", written.offset, f"{record.key} had token {had}, but has {token} now", place)
            return
        if token is None:
            return
        self._findings.count("tokens")
        after = before.offset if before is not None else -1
        last = self.commits.writer(record.writer).last
        if last is not None and token <= last.token:
            what = f"{record.key} gets token {token}, but {last.token} was granted before"
            self.suspect("tokens", written.offset, what, writer=record.writer, after=after)
        other, where = self._tokens.setdefault((record.writer, token), (record.key, written.offset))
        if where != written.offset:
            what = f"{record.key} gets token {token}, which {other} has got"
            self.suspect("tokens", written.offset, what, str(self.log.place(where)), writer=record.writer, after=after)

    def _keep(self, written: Written, checkpoint: wire.Checkpoint) -> None:
        if written.repeat:
            return
        record, before = written.record, written.before
        after = before.offset if before is not None else -1
        known = not checkpoint.moved and self.commits.in_the_open(record.writer, after, written.offset)
        state = before.record.state if before is not None else None
        self.changes[record.key, record.writer, record.commit] = AllocationChange(
            offset=written.offset,
            state=record.state,
            before=state,
            known=known,
            digest=wire.digest(record.body),
            instance=checkpoint.instance,
        )
