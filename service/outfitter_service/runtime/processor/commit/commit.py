"""One commit: its events, their decisions, and what becomes of it.

Everything here is synchronous, so that no other task runs while half a commit is decided. The commit loop writes
it, and acts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime

import structlog
from msgspec import UNSET, structs

from outfitter_proto.bus import BusError, Message
from outfitter_proto.codec import WireError, decode_registration, encode
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import (
    FINAL_STATES,
    Allocation,
    DeadLetter,
    Heartbeat,
    Host,
    InputPosition,
    ManagerIdentity,
    Refresh,
    Register,
    Source,
    Transition,
)
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide, renumber
from outfitter_service.core.fast_path import FastGrant
from outfitter_service.core.hosts import host_record
from outfitter_service.core.state.ledger import (
    DropAllocation,
    DropRecord,
    Ledger,
    LedgerChange,
    PutAllocation,
    PutRecord,
)
from outfitter_service.core.state.sizes import ENTRY_BYTES, is_long
from outfitter_service.runtime.changelog.encoding import Transaction, dead_letter
from outfitter_service.runtime.dead_letter_quota import Omitted, Payer
from outfitter_service.runtime.input.input_reader import Cursor
from outfitter_service.runtime.input.lookahead import LookAheadBuffer
from outfitter_service.runtime.input.scope import Scope
from outfitter_service.runtime.processor.commit.effects import Effects
from outfitter_service.runtime.processor.commit.quotas import Quotas
from outfitter_service.runtime.processor.limits import DEFAULT_LIMITS, Limits

log = structlog.get_logger("outfitter.processor")

FILL = 0.85
"""No event is decided any more for a commit that is so full. One that does not fit is decided in vain."""


class Commit:
    """One commit. Each decision is applied to the ledger at once (`Ledger.rollback` undoes them). If the commit fails,
    its events are decided again."""

    def __init__(
        self,
        ledger: Ledger,
        rules: Rules,
        now: datetime,
        *,
        manager: ManagerIdentity,
        cursor: Cursor,
        after: Commit | Cursor,
        opening: bool = False,
        limits: Limits = DEFAULT_LIMITS,
        quotas: Quotas | None = None,
    ) -> None:
        """`manager`: this one, as host records name it. `cursor`: the committed position in the input. The commit
        begins where `after` ends there. `opening`: it is the first one of its tenure. `quotas`: None is no limit."""
        self.ledger = ledger
        self.rules = rules
        self.now = now
        """The time with which events are decided."""
        self.opening = opening
        self.transaction = Transaction(history=limits.history is not None)
        """What it writes."""
        self.effects = Effects()
        """What follows from it."""
        self.events = 0
        """The number of decided events, with announced hosts and answers that had waited."""
        self.is_full = False
        """An event had no room, and waits for the next commit."""

        # --- where its events come from; messages of other scopes are dropped ---
        self.position: int = after.position
        """The input's next offset after its messages."""
        self.ahead: dict[bytes, int] = {key: offset for key, offset in after.ahead.items() if offset > after.position}
        """The same, for hosts that are ahead."""
        self.internal: list[m.Event] = []
        """The manager's own events."""
        self.messages: list[Message] = []
        """From the input reader, with those that were decided before their turn."""

        # --- what it uses of quotas ---
        self.omitted: dict[Payer, Omitted] = {}
        """The messages beyond the quota of dead letters."""
        self.summed: dict[Payer, Omitted] = {}
        """The messages that one letter sums up."""
        self.rewritten: defaultdict[str, int] = defaultdict(int)
        """Bytes of rewritten records, by host."""
        self._letters: defaultdict[Payer, int] = defaultdict(int)
        self._repeated: list[tuple[str, AllocationKey]] = []

        # --- what is known of its end ---
        self.deaths_left = False
        """Later commits have more deaths by the end of an earlier boot."""
        self.closing = False
        """It is the last commit of the tenure."""
        self.done = False
        """The bus has answered, after so many `seconds`."""
        self.trouble: BusError | None = None
        """Why it failed, or None."""
        self.seconds = 0.0

        self._manager = manager
        self._most_events = limits.events_per_commit
        self._most_hosts = limits.hosts
        self._base = cursor.base
        self._quotas = quotas or Quotas.unlimited()
        self._silent_rules: tuple[Rules, Rules] | None = None  # `rules`, and the same without news

    @property
    def full(self) -> float:
        """The bytes of the ledger's part from which on nothing more is decided."""
        return self.rules.max_bytes * FILL

    @property
    def is_open(self) -> bool:
        """Whether more may be decided for this commit."""
        transaction = self.transaction
        has_bytes = transaction.ledger_bytes < self.full and transaction.history_bytes < self.rules.max_bytes
        return has_bytes and not self.is_full and self.events < self._most_events

    def has_room(self, size: int) -> bool:
        """Whether so many bytes fit into the ledger's part. In an empty one each decision fits."""
        written = self.transaction.ledger_bytes
        return not written or written + size <= self.rules.max_bytes

    # --- events ---

    def decide_internal(self, event: m.Event) -> bool:
        """Decide an event of the manager's own. Returns False if it has no room."""
        if self.decide(event) is None:
            return False
        self.internal.append(event)
        return True

    def decide_in_turn(self, message: Message, scope: Scope) -> bool:
        """Decide the input's next message, unless it was decided before its turn. Returns False if it has no room."""
        ahead = self.ahead
        is_decided = ahead and message.offset < ahead.get(message.key or b"", 0)
        if is_decided or self._decide_message(message, scope):
            self.messages.append(message)
        elif self.is_full:
            return False
        self.position = message.offset + 1
        return True

    def decide_ahead(self, lookahead_buffer: LookAheadBuffer, scope: Scope) -> None:
        """Decide the look-ahead's next message before its turn; if it has no room, it stays there. Each source skips
        messages that were decided from the other one."""
        message = lookahead_buffer.pop()
        if message.offset >= self.position:
            if not self._decide_message(message, scope) and self.is_full:
                lookahead_buffer.put_back([message])
                return
            self.ahead[message.key or b""] = message.offset + 1

    def read_to(self, position: int) -> None:
        """All messages before `position` are decided. The offsets before it may have gaps."""
        self.position = max(self.position, position)

    def input_position(self, cursor: Cursor, partition: int, since: int) -> InputPosition:
        """The input position for the checkpoint. `since`: the offset from which on the commit has read the input."""
        ahead = {key.decode(): offset for key, offset in self.ahead.items() if offset > self.position}
        return InputPosition(
            topic_id=cursor.topic_id,
            partition=partition,
            from_=since,
            to=self.position,
            base=cursor.base or UNSET,
            begin=cursor.begin or UNSET,
            ahead=ahead or UNSET,
        )

    def _decide_message(self, message: Message, scope: Scope) -> bool:
        """Decide a message if it belongs to this processor and has room. Returns whether it was decided."""
        if scope.serves(message):
            return self.message(message)
        if (reason := scope.refusal(message)) is None:
            return False
        self.refuse(message, reason)
        return True

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
                if len(self.ledger.hosts) >= self._most_hosts:
                    self.refuse(
                        message,
                        f"host {registration.host!r} is new, and this manager serves at most {self._most_hosts} hosts "
                        "of one partition",
                    )
                    return True
                if not self.announce(registration.host):
                    return False
        source = Source(partition=message.partition, offset=message.offset + self._base)
        decision = self.decide(m.Incoming(registration, source, warnings))
        if decision is None:
            return False
        effects = self.effects
        if warnings:
            effects.unknown_fields.append((registration, warnings))
            if named:
                naming.use(self._known_host(message))
        if type(decision) is FastGrant:
            for resource in decision.record.resources:
                effects.granted[resource].append(message.timestamp_ms)
        elif decision.refused is not None:
            letter = self.refuse(message, decision.refused)
            if letter is not None:
                effects.about[letter.key] = {"worker": registration.worker, "incarnation": registration.incarnation}
        elif type(registration) is Register and decision.kind == "register":
            key = allocation_key(registration.host, registration.worker, registration.incarnation)
            effects.registered_ms[key] = message.timestamp_ms
        return True

    # --- deciding ---

    def set_time(self, now: datetime) -> None:
        """Decide later events with this time."""
        self.now = now

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
        effects.kinds[decision.kind] += 1
        if decision.changes:
            self.apply(decision.changes)
            for key, step in decision.history:
                if type(step) is Transition:
                    effects.steps.append((key, step))
                size = self.transaction.step(key, step)
                if _repeats(step):
                    self._use_rewriting(step.host, len(self.transaction.values[key][1] or b"") + size)
        for note in decision.notes:
            self.transaction.note(note)
            effects.notes.append(note)
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

    def _grant(self, grant: FastGrant) -> bool:
        """Apply a fast grant, as `decide` applies other decisions. Returns False if it does not fit."""
        key, record, effects = grant.key, grant.record, self.effects
        value = encode(record)
        if not self.has_room(len(value) + len(key) + ENTRY_BYTES):
            self.is_full = True
            return False
        self.events += 1
        self.ledger.grant(key, record, grant.names)
        if key in self.transaction.stepless:
            # liveness does not see that an earlier record was deleted under this key: renew its lease
            effects.renewed[key] = None
        effects.allocations[key] = record
        effects.fast_step(key, self.transaction.grant(grant, value))
        return True

    def apply(self, changes: Sequence[LedgerChange]) -> None:
        """Apply changes to the ledger, and keep the last value of each key for the commit."""
        transaction, effects = self.transaction, self.effects
        for change in changes:
            if type(change) is PutAllocation or type(change) is DropAllocation:
                self._keep_previous(change.key)
            key = self.ledger.change(change)
            if type(change) is PutAllocation:
                record = change.record
                effects.hosts[record.host] = None
                effects.allocations[change.key] = record
                transaction.put(key, record, change.value)
            elif key:
                if type(change) is DropAllocation:
                    effects.allocations[change.key] = None
                elif type(change) is PutRecord or type(change) is DropRecord:
                    effects.announced[change.host] = None
                put = (change.record, change.value) if type(change) is PutRecord else (None, None)
                transaction.put_without_step(key, *put)

    def _keep_previous(self, key: AllocationKey) -> None:
        """Keep the record under a key before this commit changes it."""
        if key not in self.effects.allocations:
            record = self.ledger.allocations.get(key)
            if record is not None:
                self.effects.before[key] = record

    # --- hosts' records ---

    def announce(self, host: str) -> bool:
        """Write into the record of `host` who manages it, and its resources. It counts as an event. Returns False if
        the commit has no room."""
        host_state = self.ledger.host_state(host)
        before = host_state.record or Host(host=host, manager=self._manager, since=self.now)
        record = structs.replace(before, manager=self._manager)
        record = (
            host_record(
                record, self.rules, host_state.devices.inventories, self.now, keeps_names=host_state.keeps_names
            )
            or record
        )
        change = PutRecord(record, encode(record))
        if not self.has_room(_bytes_of(change)):
            self.is_full = True
            return False
        self.apply([change])
        self.events += 1
        return True

    def say_stopped(self, host: str) -> bool:
        """Write into the record of `host`, if it has one, that nobody manages it from now on. Returns False if the
        commit has no room."""
        before = self.ledger.host_state(host).record
        if before is None:
            return True
        record = structs.replace(before, manager=structs.replace(self._manager, stopped_at=self.now))
        value = encode(record)
        if self.transaction.ledger_bytes and self.transaction.ledger_bytes + len(value) > self.full:
            return False
        self.apply([PutRecord(record, value)])
        return True

    # --- dead letters ---

    def refuse(
        self, message: Message, reason: str, field: str | None = None, *, understood: bool = True
    ) -> DeadLetter | None:
        """Make a message a dead letter, or only count it where the quota is used up."""
        self.effects.kinds["dead-letter"] += 1
        self.events += 1
        payer = self._known_host(message), understood
        is_paid = self._quotas.letters.use(payer)
        if not is_paid and payer in self.omitted:
            self.omitted[payer] = self.omitted[payer].with_one(message.offset)
            return None
        letter = dead_letter(message, reason, field, writer=self.rules.writer, at=self.now)
        if not is_paid:
            self.omitted[payer] = Omitted(first=letter, until=message.offset + 1)
            return None
        self._letters[payer] += 1
        self.transaction.add_letter(letter)
        return letter

    def sum_up(self, omitted: Mapping[Payer, Omitted]) -> None:
        """Write one dead letter for each payer's messages beyond its quota in the last minute."""
        for payer, messages in omitted.items():
            self.summed[payer] = messages
            self.transaction.add_letter(messages.summary())

    def _known_host(self, message: Message) -> str:
        """The host of a message if the ledger has it, else an empty text."""
        host = (message.key or b"")[:300].decode("utf-8", "replace")
        return host if host in self.ledger.hosts else ""

    # --- records that are written again ---

    def renumber(self, host: str, full: float) -> bool:
        """Refresh a host's queue positions in records, until the ledger's part has `full` bytes. Returns False if some
        do not fit."""
        for change in renumber(self.ledger, self.rules, host):
            record = change.record
            if not self._rewrite(change.key, record, full):
                return False
            if record.queue_position is not None:
                self.transaction.positions[record.key] = record.queue_position
        return True

    def repeat_waiting(self) -> None:
        """Write the answers that wait, as far as there is room. Each counts as an event."""
        waiting = self._quotas.rewrites.take_waiting()
        while self.events < self._most_events and (key := next(waiting, None)) is not None:
            record = self.ledger.allocations.get(key)
            if record is None or key in self.effects.allocations:
                continue
            if not self._rewrite(key, record, self.full):
                self._quotas.rewrites.postpone(record.host, key)
                return
            self._repeated.append((record.host, key))
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
        """Write a record without a step. Returns False if its host's quota is used up, or the ledger's part would have
        more than `full` bytes."""
        if self._quotas.rewrites.is_spent(record.host):
            return False
        value, written = encode(record), self.transaction.ledger_bytes
        if written and written + len(value) > full:
            return False
        self._use_rewriting(record.host, len(value))
        self.apply([PutAllocation(key, record, value)])
        return True

    def _use_rewriting(self, host: str, size: int) -> None:
        """So many bytes of a host are rewritten."""
        self._quotas.rewrites.use(host, size)
        self.rewritten[host] += size

    # --- its end ---

    def ended(self, trouble: BusError | None, seconds: float) -> None:
        """The bus has answered after so many seconds. The commit is written, or it failed with this `trouble`."""
        self.trouble = trouble
        self.seconds = seconds
        self.done = True

    def note_omitted(self) -> None:
        """It is written, or nothing of it had to be: a later letter sums up what it left out."""
        for payer, omitted in self.omitted.items():
            self._quotas.letters.omit(payer, omitted)

    def refund_quotas(self) -> None:
        """It failed: later commits write its letters, answers and summaries again."""
        quotas = self._quotas
        quotas.letters.refund(self._letters)
        quotas.rewrites.refund(self.rewritten)
        for host, key in self._repeated:
            quotas.rewrites.postpone(host, key)
        for payer, omitted in self.summed.items():
            quotas.letters.omit(payer, omitted)


def _bytes(decision: Decision) -> int:
    """The bytes of a decision in the ledger's part."""
    return sum([_bytes_of(change) for change in decision.changes])


def _bytes_of(change: LedgerChange) -> int:
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
