"""Rules, decisions, and the builder that makes a decision and changes no ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct, UnsetType, structs
from msgspec.structs import force_setattr

from outfitter_proto.codec import encode
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    Note,
    Refresh,
    ResolvedRequest,
    Source,
    StateRecord,
    Token,
    Transition,
)
from outfitter_service.core import model as m
from outfitter_service.core.delays import Sight
from outfitter_service.core.state import sizes
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import DropAllocation, Ledger, LedgerChange, PutAllocation, PutRecord
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import ENTRY_BYTES, FullError, OversizeError
from outfitter_service.core.states import RELEASING, Step, advance

_REFUSABLE = frozenset({Step.GRANT, Step.PREPARE, Step.REFRESH, Step.REGISTER, Step.FAIL})
"""Steps that a decision may postpone or refuse. All others end or release something, and a decision always takes them.
"""
_ENDING = (*FINAL_STATES, RELEASING)


class Rules(Struct, frozen=True, kw_only=True):
    """What a decision depends on besides the ledger.

    The limits per host stand against a flood of names. Beyond those of final records the oldest ones are deleted early,
    but not those of the last seconds.
    """

    writer: str
    """The name of the writer whose records are decided."""
    specs: Mapping[str, m.ResourceSpec]
    """The configured resources by name."""
    lease_s: float | None = 30.0
    """The lease of a registration that says none, in seconds. None: no lease."""
    wait_s: float | None = None
    """How long a registration that does not say it waits, in seconds. None: without an end."""
    retention_s: float = 3600.0
    """How many seconds final records stay."""
    chunk: int = 256
    """About how many allocations one decision changes at most."""
    max_bytes: int = sizes.MAX_BYTES
    """How many bytes one decision writes at most. The bus takes somewhat more in one commit."""
    news: bool = True
    """A record is written again where it only says more: that a newer incarnation registered, why a worker waits, what
    delays a release. Else that is left to a later look at the host, and final records lack long labels and operators.
    """
    forgets_hosts: bool = False
    """Delete a host's record once no allocation of it is retained."""
    sees: Sight = (None, None)
    """Whose processes the manager can find."""
    max_waiting: int = 10_000
    """So many workers of a host wait at most."""
    max_live: int = 10_000
    """So many live workers of a host have no exclusive device at most."""
    max_items: int = 100_000
    """The requests of both and their shared devices are at most so many; see `sizes.items`."""
    max_final: int = 10_000
    """So many final records of a host are retained at most."""
    max_incarnations: int = 64
    """So many records of one worker are retained at most."""
    per_worker: frozenset[str] = frozenset()
    """The resources that say so in `specs`. It follows from these."""
    choosing: frozenset[str] = frozenset()
    """The resources of which workers take certain devices if they do not say it. It follows from `specs`."""

    def __post_init__(self) -> None:
        force_setattr(self, "choosing", frozenset(name for name, spec in self.specs.items() if spec.clauses))
        force_setattr(self, "per_worker", frozenset(name for name, spec in self.specs.items() if spec.per_worker))


class Decision(Struct, kw_only=True, gc=False):
    """What one event leads to."""

    kind: str
    """The event's label in metrics."""
    changes: list[LedgerChange] = []
    """Of the ledger, in order."""
    history: list[tuple[str, Transition | Refresh]] = []
    """Each step, with its allocation's key."""
    commands: list[m.Command] = []
    """What drivers must do after the commit."""
    follow_ups: list[m.Event] = []
    """Events that must be decided, too."""
    renewed: list[AllocationKey] = []
    """Allocations whose lease starts anew."""
    final_leases: list[AllocationKey] = []
    """Superseded allocations whose last lease starts."""
    repeats: list[AllocationKey] = []
    """Allocations whose unchanged records are published again."""
    refused: str | None = None
    """Why the message becomes a dead letter, or None."""
    notes: list[Note] = []
    """Words for people in history."""


class DecisionBuilder:
    """Makes one decision, and shows the ledger as it will be after the steps so far. History has `cause` and `source`
    with each step. Only the builder writes into the decision."""

    __slots__ = (
        "_moved", "_overlay", "bytes", "cause", "decision", "ledger", "now", "records", "rules", "source", "token",
    )  # fmt: skip

    def __init__(
        self, ledger: Ledger, rules: Rules, now: datetime, *, cause: str, source: Source | None = None
    ) -> None:
        self.ledger = ledger
        self.rules = rules
        self.now = now
        self.cause = cause
        self.source = source
        self.decision = Decision(kind=cause)
        """The result."""
        self.token = ledger.token
        """The last fencing token, including the decision's grants."""
        self.bytes = 0
        """The size of the steps so far in a commit."""
        self.records: dict[AllocationKey, Allocation] = {}
        """The allocations that it changes, by key."""
        self._overlay: HostOverlay | None = None
        self._moved: list[tuple[Allocation, int]] = []

    def host_state(self, host: str) -> HostState:
        """The host's state before the decision."""
        return self.ledger.hosts.get(host) or HostState(host)

    def overlay(self, host: str) -> HostOverlay:
        """The host's state with every step so far. A decision is about one host."""
        overlay = self._overlay
        if overlay is None:
            overlay = self._overlay = HostOverlay(self.host_state(host))
        if self._moved:
            for record, count in self._moved:
                overlay.count(record, count)
            self._moved.clear()
        return overlay

    def record(self, key: AllocationKey) -> Allocation | None:
        """The record under a key after the steps so far."""
        return self.records.get(key) or self.ledger.allocations.get(key)

    # --- what is no step of an allocation ---

    def change(self, change: LedgerChange) -> None:
        """Change the ledger."""
        self.decision.changes.append(change)

    def put_record(self, record: StateRecord) -> None:
        """Put a record that is no allocation's.

        Raises:
            FullError: the decision has other steps, and this record would make it too large.
        """
        value = encode(record)
        size = len(record.key) + len(value) + ENTRY_BYTES
        if self.bytes and self.bytes + size > self.rules.max_bytes:
            raise FullError
        self.bytes += size
        self.decision.changes.append(PutRecord(record, value))

    def command(self, command: m.Command) -> None:
        """Give a driver something to do after the commit."""
        self.decision.commands.append(command)

    def follow_up(self, event: m.Event) -> None:
        """Have another event decided after this one."""
        self.decision.follow_ups.append(event)

    def reschedule(self, host: str) -> None:
        """Leave the rest of a larger effect to an event of its own."""
        event = m.Reschedule(host=host, cause=self.cause, whole=False)
        if event not in self.decision.follow_ups:
            self.decision.follow_ups.append(event)

    def renew(self, key: AllocationKey) -> None:
        """Start an allocation's lease anew."""
        self.decision.renewed.append(key)

    def start_final_lease(self, key: AllocationKey) -> None:
        """Start the last lease of a superseded allocation."""
        self.decision.final_leases.append(key)

    def repeat(self, key: AllocationKey) -> None:
        """Have an allocation's unchanged record published again."""
        self.decision.repeats.append(key)

    def refuse(self, reason: str) -> None:
        """Make the message a dead letter."""
        self.decision.refused = reason

    def note(self, event: str, explanation: str, *, host: str, device: str | UnsetType) -> None:
        """Say something in history that is no step of an allocation."""
        note = Note(
            at=self.now, writer=self.rules.writer, event=event, explanation=explanation, host=host, device=device
        )
        self.decision.notes.append(note)

    def set_kind(self, kind: str) -> None:
        """Label the event in metrics by what came of it."""
        self.decision.kind = kind

    def use_token(self, token: Token) -> None:
        """The decision has granted devices with this token."""
        self.token = token

    def forget(self, keys: Sequence[AllocationKey]) -> int:
        """Delete records, as many as fit into this decision. Returns how many do not fit."""
        for done, key in enumerate(keys):
            size = len(key) + ENTRY_BYTES
            if self.bytes and self.bytes + size > self.rules.max_bytes:
                return len(keys) - done
            self.bytes += size
            self.decision.changes.append(DropAllocation(key))
        return 0

    # --- steps of allocations ---

    def step(
        self,
        step: Step,
        explanation: str,
        base: Allocation,
        *,
        new: bool = False,
        grows: bool = True,
        confirmed: bool | None = None,
        **fields: Any,
    ) -> Allocation:
        """Take one row of the table: `base` with `fields` replaced, in the state that follows from its own.

        `explanation`: the reason in history, for people. `new`: the record comes from no state. `grows`: whether the
        step can make the record larger; else its size is not limited. `confirmed`: whether a check found released
        devices unused; False also of granted ones, if it could not tell; None: neither. History gets each step; of a
        repeat (`Step.REFRESH`) only what it changed.

        Raises:
            IllegalStepError: the table has no row for the step.
            OversizeError: the record would exceed its limit.
            FullError: the decision has other steps, and this one would make it too large.

        After an error nothing has changed.
        """
        now = self.now
        explanation = sizes.shortened(explanation)
        if reason := fields.get("reason"):
            fields["reason"] = sizes.shortened(reason)
        before = None if new else base.state
        state = advance(before, step)
        if before != state:
            fields["since"] = now
        after = structs.replace(base, state=state, writer=self.rules.writer, commit=self.ledger.commits + 1, **fields)
        key = after.key
        unshortened = after
        if state in FINAL_STATES and self._is_left_out(after.request, new=new):
            after = sizes.without_request(after)
        if state in FINAL_STATES and sizes.shared_devices(after) > sizes.FINAL_ITEMS:
            after = sizes.without_devices(after)
        after, value = self._measured(key, after, step, new=new, grows=grows)
        decision = self.decision
        decision.changes.append(PutAllocation(key, after, value))
        entry: Transition | Refresh
        if step is Step.REFRESH:
            entry = Refresh(
                at=now,
                host=after.host,
                worker=after.worker,
                incarnation=after.incarnation,
                writer=after.writer,
                event=self.cause,
                explanation=explanation,
                changed=_changed(self.record(key) or base, after),
                source=self.source,
            )
        else:
            entry = Transition(
                at=now,
                host=after.host,
                worker=after.worker,
                incarnation=after.incarnation,
                event=self.cause,
                from_=before,
                to=state,
                explanation=explanation,
                record=after,
                source=self.source,
                confirmed=confirmed,
            )
        decision.history.append((key, entry))
        self.records[key] = after
        held = before in HOLDING_STATES
        if held != (state in HOLDING_STATES):
            self._moved.append((unshortened, -1 if held else 1))
            host_state = self.host_state(after.host)
            if held and (
                key in host_state.devices.suspects or host_state.devices.has_refused or host_state.devices.has_old_names
            ):
                self.reschedule(after.host)
        return after

    def _is_left_out(self, request: ResolvedRequest, *, new: bool) -> bool:
        """Whether a final record lacks its request."""
        return sizes.items(request) > sizes.FINAL_ITEMS or not (new or self.rules.news or not sizes.is_long(request))

    def _measured(
        self, key: AllocationKey, after: Allocation, step: Step, *, new: bool, grows: bool
    ) -> tuple[Allocation, bytes]:
        """The record as it can be written, and its encoded value. Adds its size to `bytes`.

        A message must be answered, and a worker's end written. So a final record can always be written, if need be
        without its devices. The end of an allocation can be written without what its registration said, too.
        """
        value = encode(after)
        size = len(key) + len(value) + ENTRY_BYTES
        most = self.rules.max_bytes
        if size + self.bytes > most or size > most // 4:
            if step in _REFUSABLE:
                bound = sizes.most_bytes(most, step, after)
                if grows and bound is not None and size > bound:
                    raise OversizeError(size, bound)
                if self.bytes and self.bytes + size > most and (not new or step in (Step.GRANT, Step.PREPARE)):
                    raise FullError
            if size > most and after.state in FINAL_STATES:
                after = sizes.without_devices(after)
                value = encode(after)
                size = len(key) + len(value) + ENTRY_BYTES
            if size > most and not new and after.state in _ENDING:
                after = sizes.shortest(after)
                value = encode(after)
                size = len(key) + len(value) + ENTRY_BYTES
        self.bytes += size
        return after, value


def _changed(before: Allocation, after: Allocation) -> dict[str, Any]:
    """The fields of `after` that differ from `before`."""
    changed: dict[str, Any] = {}
    for field in after.__struct_fields__:
        value, old = getattr(after, field), getattr(before, field)
        if value is not old and value != old:
            changed[field] = value
    return changed
