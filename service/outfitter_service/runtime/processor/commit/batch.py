"""The decisions of one commit: events are decided one after the other, and applied to the ledger.

Everything here is synchronous, so that no other task runs while half a batch is decided. The processor commits and
acts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import structlog
from msgspec import Struct, field, structs

from outfitter_proto.bus import Message
from outfitter_proto.codec import WireError, decode_registration, encode
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import (
    FINAL_STATES,
    Allocation,
    DeadLetter,
    Heartbeat,
    Host,
    Refresh,
    Register,
    Registration,
    Source,
    Transition,
)
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide, renumber
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.state.ledger import Change, DropAllocation, DropRecord, Ledger, PutAllocation, PutRecord
from outfitter_service.core.state.sizes import ENTRY_BYTES, is_long
from outfitter_service.runtime.changelog.encoding import dead_letter
from outfitter_service.runtime.dead_letter_quota import Omitted, Payer
from outfitter_service.runtime.processor.commit.output import CommitOutput
from outfitter_service.runtime.processor.commit.quotas import Quotas, RewriteQuota

log = structlog.get_logger("outfitter.processor")

FILL = 0.85
"""No event is decided any more for a commit that is so full. One that does not fit is decided in vain."""
LOGGED = 20
"""Most transitions of one commit that get a log line each: a flood of workers must not become a flood of lines."""


class Report(Struct):
    """A commit's part in metrics and log. `kinds`: the number of events by kind. `steps`: history's steps by key, of
    fast grants only those that are logged; `unlogged`: the number of the others. `granted`: when the registrations of
    fast grants were sent, by resource, in ms since 1970; `registered_ms`: the same of other registrations, by key.
    `unknown_fields`: messages with warnings. `about`: log fields of a dead letter's sender, by the letter's key."""

    kinds: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    steps: list[tuple[str, Transition]] = []
    unlogged: int = 0
    granted: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    registered_ms: dict[str, int] = {}
    unknown_fields: list[tuple[Registration, list[str]]] = []
    about: dict[str, dict[str, str | None]] = {}

    def fast_step(self, key: str, step: Transition) -> None:
        """Add a fast grant's step. Most commits consist of fast grants, so only some are logged."""
        if len(self.steps) < LOGGED:
            self.steps.append((key, step))
        else:
            self.unlogged += 1


class Effects(Struct):
    """What the manager does once the commit is settled: it sends `commands` to drivers, and decides the `follow_ups`.
    It begins empty, and a batch fills it. `failed_events`: events that met a defect.
    `renewed`: allocations whose worker gave a sign of life. `final_leases`: those whose last lease starts.
    `announced`: hosts whose records changed. `hosts`: hosts with changed allocations. `allocations`: these by key, None
    where deleted; `before`: the records before."""

    commands: list[m.Command] = []
    follow_ups: dict[m.Event, None] = {}
    failed_events: list[m.Event] = []
    renewed: dict[AllocationKey, None] = {}
    final_leases: dict[AllocationKey, None] = {}
    announced: dict[str, None] = {}
    hosts: set[str] = set()
    allocations: dict[AllocationKey, Allocation | None] = {}
    before: dict[AllocationKey, Allocation] = {}


class QuotaUse(Struct):
    """A commit's use of quotas. Of dead letters, by payer: `used` is the number of letters, `omitted` the messages
    beyond the quota, `summed` the messages that one letter sums up. Of rewritten records: `rewritten` is the number of
    bytes by host, `repeated` has the host and the key of each answer that had waited."""

    used: defaultdict[Payer, int] = field(default_factory=lambda: defaultdict(int))
    omitted: dict[Payer, Omitted] = {}
    summed: dict[Payer, Omitted] = {}
    rewritten: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    repeated: list[tuple[str, AllocationKey]] = []

    def rewrite(self, rewrites: RewriteQuota, host: str, size: int) -> None:
        """So many bytes of a host are rewritten."""
        rewrites.use(host, size)
        self.rewritten[host] += size


class Batch:
    """The decisions of one commit. Each is applied to the ledger at once (`Ledger.rollback` undoes them).

    `now`: the time with which events are decided. `events`: the number of decided events, with announced hosts and
    answers that had waited. `is_full`: an event had no room, and waits for the next commit. `output`, `report`,
    `effects`, `quota_use`: what the commit writes, reports, leads to, and uses of quotas. The batch's `PendingCommit`
    has its events and the input's position.
    """

    def __init__(
        self,
        ledger: Ledger,
        rules: Rules,
        now: datetime,
        *,
        on_new_host: Callable[[Batch, str], str | None],
        base: int = 0,
        history: bool = True,
        quotas: Quotas | None = None,
    ) -> None:
        """`base`: added to offsets, so that they only grow; see `records.InputPosition`. `on_new_host`: called with
        each host that the ledger does not know, before its first registration is decided. It announces the host, or
        returns why the registration is refused. `history`: whether history is written. `quotas`: None is no limit."""
        self.ledger = ledger
        self.rules = rules
        self.now = now
        self.events = 0
        self.is_full = False
        self.output = CommitOutput(history=history)
        self.report = Report()
        self.effects = Effects()
        self.quota_use = QuotaUse()
        self._silent_rules: tuple[Rules, Rules] | None = None  # `rules`, and the same without news
        self._base = base
        self._on_new_host = on_new_host
        self._quotas = quotas or Quotas.unlimited()

    @property
    def full(self) -> float:
        """The bytes of the ledger's batch from which on nothing more is decided."""
        return self.rules.max_bytes * FILL

    def has_room(self, size: int) -> bool:
        """Whether so many bytes fit into the ledger's batch. In an empty one each decision fits."""
        written = self.output.ledger_bytes
        return not written or written + size <= self.rules.max_bytes

    def decide(self, event: m.Event) -> Decision | FastGrant | None:
        """Decide one event and apply its changes. None: they do not fit beside those of earlier events, and nothing has
        changed. An event that meets a defect of Outfitter changes nothing: an error would end the manager, and again
        after every restart."""
        try:
            decision = decide(self.ledger, self._rules_for(event), event, self.now)
        except Exception as error:
            log.exception("an event could not be decided: a defect of Outfitter", event_kind=type(event).__name__)
            self.effects.failed_events.append(event)
            decision = Decision(kind="defect", refused=f"internal error: {type(error).__name__}: {error}")
        if type(decision) is FastGrant:
            return decision if self._grant(decision) else None
        if not self.has_room(_bytes(decision)):
            self.is_full = True
            return None
        self.events += 1
        effects = self.effects
        self.report.kinds[decision.kind] += 1
        if decision.changes:
            self.apply(decision.changes)
            for key, step in decision.history:
                if type(step) is Transition:
                    self.report.steps.append((key, step))
                size = self.output.step(key, step)
                if _repeats(step):
                    self.quota_use.rewrite(
                        self._quotas.rewrites, step.host, len(self.output.values[key][1] or b"") + size
                    )
        if decision.commands:
            effects.commands += decision.commands
        if decision.follow_ups:
            effects.follow_ups.update(dict.fromkeys(decision.follow_ups))
        for key in decision.renewed:
            effects.renewed[key] = None
        for key in decision.final_leases:
            effects.final_leases[key] = None
        for key in decision.repeats:
            self._repeat(key)
        return decision

    def _rules_for(self, event: m.Event) -> Rules:
        """The rules for an event. Its host's records say no more while the quota of rewritten ones is used up."""
        rewrites = self._quotas.rewrites
        if rewrites.is_unused or rewrites.may_tell(m.host_of(event)):
            return self.rules
        if self._silent_rules is None or self._silent_rules[0] is not self.rules:
            self._silent_rules = self.rules, structs.replace(self.rules, news=False)
        return self._silent_rules[1]

    def message(self, message: Message) -> bool:
        """Decide one message for this writer's hosts. A message that is invalid or refused becomes a dead letter.
        Returns False if its answer does not fit beside those of earlier events."""
        warnings: list[str] = []
        letters, naming = self._quotas.letters, self._quotas.naming
        exact = not letters.spent or (self._known_host(message), False) not in letters.spent
        named = not naming.spent or self._known_host(message) not in naming.spent
        try:
            registration = decode_registration(
                message.value, key=message.key, warnings=warnings, exact=exact, named=named
            )
        except WireError as error:
            self.refuse(message, error.problem, error.field, understood=False)
            return True
        if type(registration) is not Heartbeat:
            host_state = self.ledger.hosts.get(registration.host)
            if host_state is None or host_state.record is None:
                reason = self._on_new_host(self, registration.host)
                if reason is not None:
                    self.refuse(message, reason)
                    return True
                if self.is_full:
                    return False
        source = Source(partition=message.partition, offset=message.offset + self._base)
        decision = self.decide(m.Incoming(registration, source, warnings))
        if decision is None:
            return False
        if warnings:
            self.report.unknown_fields.append((registration, warnings))
            if named:
                naming.use(self._known_host(message))
        if type(decision) is FastGrant:
            for resource in decision.record.resources:
                self.report.granted[resource].append(message.timestamp_ms)
        elif decision.refused is not None:
            letter = self.refuse(message, decision.refused)
            if letter is not None:
                self.report.about[letter.key] = {"worker": registration.worker, "incarnation": registration.incarnation}
        elif type(registration) is Register and decision.kind == "register":
            key = allocation_key(registration.host, registration.worker, registration.incarnation)
            self.report.registered_ms[key] = message.timestamp_ms
        return True

    def _grant(self, grant: FastGrant) -> bool:
        """Apply a fast grant, as `decide` applies other decisions. Returns False if it does not fit."""
        key, record, output, effects = grant.key, grant.record, self.output, self.effects
        value = encode(record)
        if not self.has_room(len(value) + len(key) + ENTRY_BYTES):
            self.is_full = True
            return False
        self.events += 1
        self.ledger.grant(key, record, grant.names)
        if key in output.stepless:
            # liveness does not see that an earlier record was deleted under this key: renew its lease
            effects.renewed[key] = None
        effects.allocations[key] = record
        self.report.fast_step(key, output.grant(grant, value))
        return True

    def refuse(
        self, message: Message, reason: str, field: str | None = None, *, understood: bool = True
    ) -> DeadLetter | None:
        """Make a message a dead letter, or only count it where the quota is used up."""
        self.report.kinds["dead-letter"] += 1
        self.events += 1
        payer = self._known_host(message), understood
        if not self._quotas.letters.use(payer):
            omitted = self.quota_use.omitted.get(payer)
            self.quota_use.omitted[payer] = (
                Omitted(
                    first=dead_letter(message, reason, field, writer=self.rules.writer, at=self.now),
                    until=message.offset + 1,
                )
                if omitted is None
                else omitted.with_one(message.offset)
            )
            return None
        self.quota_use.used[payer] += 1
        letter = dead_letter(message, reason, field, writer=self.rules.writer, at=self.now)
        self.output.add_letter(letter)
        return letter

    def _known_host(self, message: Message) -> str:
        """The host of a message if the ledger has it, else an empty text."""
        host = (message.key or b"")[:300].decode("utf-8", "replace")
        return host if host in self.ledger.hosts else ""

    def sum_up(self, omitted: Mapping[Payer, Omitted]) -> None:
        """Write one dead letter for each payer's messages beyond its quota in the last minute."""
        for payer, messages in omitted.items():
            self.quota_use.summed[payer] = messages
            self.output.add_letter(messages.summary())

    def set_time(self, now: datetime) -> None:
        """Decide later events with this time."""
        self.now = now

    def announce(self, host: Host) -> bool:
        """Write a host's record, which counts as an event. Returns False if it does not fit."""
        change = PutRecord(host, encode(host))
        if not self.has_room(_bytes_of(change)):
            self.is_full = True
            return False
        self.apply([change])
        self.events += 1
        return True

    def apply(self, changes: Sequence[Change]) -> None:
        """Apply changes to the ledger, and keep the last value of each key for the commit."""
        output, effects = self.output, self.effects
        for change in changes:
            if type(change) is PutAllocation or type(change) is DropAllocation:
                self._keep_previous(change.key)
            key = self.ledger.change(change)
            if type(change) is PutAllocation:
                record = change.record
                effects.hosts.add(record.host)
                effects.allocations[change.key] = record
                output.put(key, record, change.value)
            elif key:
                if type(change) is DropAllocation:
                    effects.allocations[change.key] = None
                elif type(change) is PutRecord or type(change) is DropRecord:
                    effects.announced[change.host] = None
                put = (change.record, change.value) if type(change) is PutRecord else (None, None)
                output.put_without_step(key, *put)

    def _keep_previous(self, key: AllocationKey) -> None:
        """Keep the record under a key before this batch changes it."""
        if key not in self.effects.allocations:
            record = self.ledger.allocations.get(key)
            if record is not None:
                self.effects.before[key] = record

    def renumber(self, host: str, full: float) -> bool:
        """Refresh a host's queue positions in records, until the ledger's batch has `full` bytes. Returns False if some
        do not fit."""
        for change in renumber(self.ledger, self.rules, host):
            record = change.record
            if not self._rewrite(change.key, record, full):
                return False
            if record.queue_position is not None:
                self.output.positions[record.key] = record.queue_position
        return True

    def repeat_waiting(self, full: float, most: int) -> None:
        """Write the answers that wait, until the ledger's batch has `full` bytes or the batch has `most` events. Each
        counts as an event."""
        waiting = self._quotas.rewrites.take_waiting()
        while self.events < most and (key := next(waiting, None)) is not None:
            record = self.ledger.allocations.get(key)
            if record is None or key in self.effects.allocations:
                continue
            if not self._rewrite(key, record, full):
                self._quotas.rewrites.postpone(record.host, key)
                return
            self.quota_use.repeated.append((record.host, key))
            self.events += 1

    def _repeat(self, key: AllocationKey) -> None:
        """Write an allocation's unchanged record again, unless this commit writes it anyway. It waits behind those that
        wait already."""
        record, rewrites = self.ledger.allocations.get(key), self._quotas.rewrites
        if record is None or key in self.effects.allocations:
            return
        if rewrites.has_waiting(record.host) or not self._rewrite(key, record, self.rules.max_bytes):
            rewrites.postpone(record.host, key)

    def _rewrite(self, key: AllocationKey, record: Allocation, full: float) -> bool:
        """Write a record without a step. Returns False if its host's quota is used up, or the ledger's batch would have
        more than `full` bytes."""
        output, rewrites = self.output, self._quotas.rewrites
        if rewrites.is_spent(record.host):
            return False
        value = encode(record)
        if output.ledger_bytes and output.ledger_bytes + len(value) > full:
            return False
        self.quota_use.rewrite(rewrites, record.host, len(value))
        self.apply([PutAllocation(key, record, value)])
        return True


def _bytes(decision: Decision) -> int:
    """The bytes of a decision in the ledger's batch."""
    return sum([_bytes_of(change) for change in decision.changes])


def _bytes_of(change: Change) -> int:
    # `type is`, as in `apply`: this is done for each change
    if type(change) is PutAllocation or type(change) is PutRecord:
        return len(change.key) + ENTRY_BYTES + len(encode(change.record) if change.value is None else change.value)
    return len(change.key) + ENTRY_BYTES if type(change) is DropAllocation or type(change) is DropRecord else 0


def _repeats(step: Transition | Refresh) -> bool:
    """Whether a step has much written that an earlier record has already."""
    if type(step) is not Transition:
        return True
    record = step.record
    return step.from_ is not None and step.to in FINAL_STATES and type(record) is Allocation and is_long(record.request)
