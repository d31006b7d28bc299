"""One commit in the making: events decided one after the other on the ledger, and what they come to.

Synchronous throughout: nobody awaits while half a batch is decided. Committing and acting are the processor's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import structlog
from msgspec import Raw, structs

from outfitter_proto.bus import Entry, Message
from outfitter_proto.codec import WireError, decode_registration, encode
from outfitter_proto.names import Topics
from outfitter_proto.records import (
    Allocation,
    Checkpoint,
    DeadLetter,
    Heartbeat,
    Host,
    Note,
    Refresh,
    Registration,
    Source,
    Transition,
)
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide, renumber
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.state.ledger import Change, DropAllocation, DropHost, Ledger, PutAllocation, PutHost
from outfitter_service.runtime.changelog.encoding import (
    batches,
    commit_entries,
    dead_letter,
    ledger_batch,
    note_entry,
    step_entry,
)
from outfitter_service.runtime.changelog.snapshots import Piece
from outfitter_service.runtime.dead_letter_quota import DeadLetterQuota, Omitted, Payer

log = structlog.get_logger("outfitter.processor")

LOGGED = 20
"""How many transitions of one commit get a line each: a flood of workers must not become a flood of lines."""


class Batch:
    """The decisions of one commit, applied to the ledger as they are made (`Ledger.rollback` takes them back).

    Plain grants are most of them, and are kept apart in `plain`, in the order of their tokens; where one is changed by
    a later decision, it is in `values` like all else. Of their steps `steps` has no more than are logged, and
    `unlogged` counts the others.
    """

    # more than the 30 attributes up to which Python keeps them without a dictionary
    __slots__ = (
        "_base",
        "_dead_letter_quota",
        "_history",
        "_naming",
        "_on_new_host",
        "_positions",
        "_stepless",
        "_told",
        "about",
        "allocations",
        "announced",
        "before",
        "bytes",
        "commands",
        "cut",
        "events",
        "follow_ups",
        "granted",
        "history_bytes",
        "hosts",
        "kinds",
        "ledger",
        "letters",
        "notes",
        "now",
        "omitted",
        "piece",
        "plain",
        "rationed",
        "registered_ms",
        "renewed",
        "rules",
        "steps",
        "summed",
        "undecided",
        "unlogged",
        "values",
        "warned",
    )  # fmt: skip

    def __init__(
        self,
        ledger: Ledger,
        rules: Rules,
        now: datetime,
        *,
        on_new_host: Callable[[Batch, str], str | None],
        base: int = 0,
        history: bool = True,
        dead_letter_quota: DeadLetterQuota | None = None,
        naming: DeadLetterQuota | None = None,
    ) -> None:
        """`base` is added to offsets to make numbers that only grow: see `records.InputPosition`. `on_new_host` is
        told of a
        host that the ledger does not know, before its first registration is decided; it may say something of it here,
        or answer why that one is refused. `dead_letter_quota` says how many dead letters are written, `naming` of how
        many
        messages the unknown fields are named; None: each."""
        self.ledger = ledger
        self.now = now
        self.notes: list[Note] = []
        self.steps: list[tuple[str, Transition]] = []
        self.unlogged = 0
        self.letters: list[DeadLetter] = []
        self.warned: list[tuple[Registration, list[str]]] = []
        self.about: dict[str, dict[str, str | None]] = {}
        self.rationed: defaultdict[Payer, int] = defaultdict(int)
        self.omitted: dict[Payer, Omitted] = {}
        self.summed: dict[Payer, Omitted] = {}
        self.commands: list[m.Command] = []
        self.follow_ups: dict[m.Event, None] = {}
        self.undecided: list[m.Event] = []
        self.renewed: dict[str, None] = {}
        self.cut: dict[str, None] = {}
        self.kinds: defaultdict[str, int] = defaultdict(int)
        self.registered_ms: dict[str, int] = {}
        self.granted: defaultdict[str, list[int]] = defaultdict(list)
        self.plain: dict[str, tuple[Allocation, Entry]] = {}
        self.values: dict[str, tuple[Allocation | Host | None, bytes | None]] = {}
        self.allocations: dict[str, Allocation | None] = {}
        self.before: dict[str, Allocation] = {}
        self.bytes = 0
        self.events = 0
        self.hosts: set[str] = set()
        self.piece: Piece | None = None
        self.history_bytes = 0
        self.announced: dict[str, None] = {}
        self.rules = rules
        self._base = base
        self._on_new_host = on_new_host
        self._history = history
        self._dead_letter_quota = dead_letter_quota
        self._naming = naming
        self._told: list[Entry] = []
        self._positions: dict[str, int] = {}
        self._stepless: dict[str, None] = {}

    @property
    def empty(self) -> bool:
        """Nothing to write (heartbeats move leases in memory only)."""
        return not (self.values or self.steps or self.notes or self.letters)

    def decide(self, event: m.Event) -> Decision | FastGrant:
        """Decide one event and apply what it changes. One that meets a defect of ours changes nothing, for itself
        alone: raising would end the manager, and again after every restart."""
        self.events += 1
        try:
            decision = decide(self.ledger, self.rules, event, self.now)
        except Exception as error:
            log.exception("an event could not be decided: a defect of Outfitter", event_kind=type(event).__name__)
            self.undecided.append(event)
            decision = Decision(kind="defect", refused=f"internal error: {type(error).__name__}: {error}")
        if type(decision) is FastGrant:
            self._grant(decision)
            return decision
        kind = decision.kind
        self.kinds[kind] += 1
        if decision.changes:
            self.apply(decision.changes)
            for key, step in decision.history:
                self._tell(key, step)
        if decision.commands:
            self.commands += decision.commands
        if decision.follow_ups:
            self.follow_ups.update(dict.fromkeys(decision.follow_ups))
        for key in decision.renewed:
            self.renewed[key] = None
        for key in decision.cut:
            self.cut[key] = None
        return decision

    def message(self, message: Message) -> None:
        """Decide one message of this writer's host; what cannot be understood or obeyed becomes a dead letter."""
        warnings: list[str] = []
        dead_letter_quota, naming = self._dead_letter_quota, self._naming
        exact = (
            dead_letter_quota is None
            or not dead_letter_quota.spent
            or (self._known_host(message), False) not in dead_letter_quota.spent
        )
        named = naming is None or not naming.spent or self._known_host(message) not in naming.spent
        try:
            registration = decode_registration(
                message.value, key=message.key, warnings=warnings, exact=exact, named=named
            )
        except WireError as error:
            self.refuse(message, error.problem, error.field, understood=False)
            return
        if type(registration) is not Heartbeat:
            host_state = self.ledger.hosts.get(registration.host)
            if host_state is None or host_state.record is None:
                stranger = self._on_new_host(self, registration.host)
                if stranger is not None:
                    self.refuse(message, stranger)
                    return
        source = Source(partition=message.partition, offset=message.offset + self._base)
        if warnings:
            self.warned.append((registration, warnings))
            if named and naming is not None:
                naming.take(self._known_host(message))
        decision = self.decide(m.Incoming(registration, source, warnings))
        if type(decision) is FastGrant:
            for resource in decision.record.resources:
                self.granted[resource].append(message.timestamp_ms)
        elif decision.refused is not None:
            letter = self.refuse(message, decision.refused)
            if letter is not None:
                self.about[letter.key] = {"worker": registration.worker, "incarnation": registration.incarnation}
        elif decision.kind == "register":
            key = f"{registration.host}/{registration.worker}/{registration.incarnation}"
            self.registered_ms[key] = message.timestamp_ms

    def _grant(self, grant: FastGrant) -> None:
        """Apply a plain grant, as `apply` and `_tell` do with what has more to it."""
        key, record = grant.key, grant.record
        name, value = key.encode(), encode(record)
        size = len(name) + 16
        self.ledger.grant(key, record, grant.names)
        if key in self._stepless:
            # that its record was forgotten before will not be seen, so the lease of that one goes on, from now
            self.renewed[key] = None
            del self.values[key]
        self.allocations[key] = record
        self.plain[key] = record, Entry(name, value)
        self.bytes += size + len(value)
        step = grant.step(Raw(value))
        if len(self.steps) < LOGGED:
            self.steps.append((key, step))
        else:
            self.unlogged += 1
        if self._history:
            told = encode(step)
            self._told.append(Entry(name, told))
            self.history_bytes += size + len(told)

    def refuse(
        self, message: Message, reason: str, field: str | None = None, *, understood: bool = True
    ) -> DeadLetter | None:
        """Send a message to the dead letters, or count it where there are enough of those."""
        self.kinds["dead-letter"] += 1
        self.events += 1
        payer = self._known_host(message), understood
        if self._dead_letter_quota is not None and not self._dead_letter_quota.take(payer):
            known = self.omitted.get(payer)
            self.omitted[payer] = (
                Omitted(first=self._letter(message, reason, field), until=message.offset + 1)
                if known is None
                else known.with_one(message.offset)
            )
            return None
        self.rationed[payer] += 1
        letter = self._letter(message, reason, field)
        self._write(letter)
        return letter

    def _known_host(self, message: Message) -> str:
        """The host that a message is from, if it is one of the ledger's, else nothing."""
        host = (message.key or b"")[:300].decode("utf-8", "replace")
        return host if host in self.ledger.hosts else ""

    def _letter(self, message: Message, reason: str, field: str | None) -> DeadLetter:
        return dead_letter(message, reason, field, writer=self.rules.writer, at=self.now)

    def sum_up(self, omitted: Mapping[Payer, Omitted]) -> None:
        """Write one dead letter for what was refused at the cost of each ration in a minute that is over."""
        for payer, of_one in omitted.items():
            self.summed[payer] = of_one
            self._write(of_one.summary())

    def _write(self, letter: DeadLetter) -> None:
        self.bytes += len(letter.body) * 4 // 3 + len(letter.reason)
        self.letters.append(letter)

    def set_time(self, now: datetime) -> None:
        """Decide from now on as of `now`."""
        self.now = now

    def add_notes(self, notes: Sequence[Note]) -> None:
        """Write `notes` to history."""
        self.notes += notes

    def add_piece(self, piece: Piece | None) -> None:
        """Write a piece of a snapshot to history; None: none is due."""
        self.piece = piece

    def announce(self, host: Host) -> None:
        """Write a host's record, which counts as an event."""
        self.apply([PutHost(host)])
        self.events += 1

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes to the ledger and keep the last value of each key for the ledger's batch."""
        for change in changes:
            if type(change) is PutAllocation or type(change) is DropAllocation:
                self._remember(change.key)
            key = self.ledger.change(change)
            if type(change) is PutAllocation:
                record = change.record
                self.hosts.add(record.host)
                self.allocations[key] = record
                self._keep(key, record, change.value)
            elif key:
                self._stepless[key] = None
                if type(change) is PutHost:
                    self.announced[change.record.host] = None
                    self._keep(key, change.record)
                    continue
                if type(change) is DropHost:
                    self.announced[change.host] = None
                else:
                    self.allocations[key] = None
                self._keep(key, None)

    def _remember(self, key: str) -> None:
        """Keep what is under a key before this batch changes it."""
        if key not in self.allocations:
            record = self.ledger.allocations.get(key)
            if record is not None:
                self.before[key] = record

    def renumber(self, host: str, full: float) -> bool:
        """Bring the queue positions that are shown up to date, as far as it fits; False if something is left."""
        for change in renumber(self.ledger, self.rules, host):
            record = change.record
            value = encode(record)
            if self.bytes and self.bytes + len(value) > full:
                return False
            self.apply([structs.replace(change, value=value)])
            if record.queue_position is not None:
                self._positions[record.key] = record.queue_position
        return True

    def _keep(self, key: str, record: Allocation | Host | None, value: bytes | None = None) -> None:
        """`value`: the record as it is encoded, where it is already."""
        if value is None and record is not None:
            value = encode(record)
        self.plain.pop(key, None)
        self.values[key] = (record, value)
        # what an earlier value of this key took is counted as well: few have any, and it is a bound
        self.bytes += len(key) + 16 + (0 if value is None else len(value))

    def _tell(self, key: str, step: Transition | Refresh) -> None:
        """Encode a step here and now: its record's bytes are mostly those that were just made for the ledger."""
        if type(step) is Transition:
            self.steps.append((key, step))
        if not self._history:
            return
        if type(step) is Transition:
            record, value = self.values[key]
            entry = step_entry(key, step, value if record is step.record else None)
        else:
            entry = Entry(key.encode(), encode(step))
        self._told.append(entry)
        self.history_bytes += len(key) + 16 + len(entry.value or b"")

    def transaction(self, topics: Topics, checkpoint: Checkpoint) -> list[tuple[str, list[Entry]]]:
        """What the commit writes, topic by topic, in order."""
        last = {key: self.values.get(key) for key in self._stepless}
        reborn = [key for key, value in last.items() if value is None or type(value[0]) is Allocation]
        ledger = ledger_batch(self.values, self.plain, checkpoint, reborn=reborn)
        if not self._history:
            return batches(topics, [], self.letters, ledger)
        stepless = {key: value for key, value in last.items() if value is not None}
        piece = self.piece.entry if self.piece is not None else None
        end = commit_entries(checkpoint, ledger[-1], stepless, self._positions, piece)
        return batches(topics, [*map(note_entry, self.notes), *self._told, *end], self.letters, ledger)
