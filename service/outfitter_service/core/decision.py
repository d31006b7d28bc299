"""One decision in the making: the ledger as it will be, without touching it, and what the decision comes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct, structs

from outfitter_proto.codec import encode
from outfitter_proto.records import FINAL_STATES, HOLDING_STATES, Allocation, Refresh, Source, Transition
from outfitter_service.core import model as m
from outfitter_service.core.state import sizes
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import Change, DropAllocation, Ledger, PutAllocation
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import ENTRY_BYTES, FullError, OversizeError
from outfitter_service.core.states import Step, advance

_REFUSABLE = frozenset({Step.GRANT, Step.PREPARE, Step.REFRESH, Step.REGISTER, Step.FAIL})
"""What may be put off, or not be done at all. All else ends something or gives something back, and is always done."""


class Rules(Struct, frozen=True, kw_only=True):
    """What decisions are made by, besides the ledger: the configured resources and limits, and who writes.

    `lease_s` and `wait_s` are what a registration has that does not say (None: no lease, no end of waiting),
    `retention_s` how long final records stay, `chunk` about how many allocations one decision changes at most, and
    `max_bytes` how much it writes: what the bus takes with one commit, some of it kept back. With `forgets_hosts` a
    host of which nobody is remembered is forgotten.

    What a flood of names costs is bounded: `max_waiting` workers of a host may wait, `max_live` may live that have no
    device to themselves, `max_over` of its records that are
    over are kept, and `max_incarnations` of one worker; then those that ended first are forgotten before their time
    (not those of the last seconds).
    """

    writer: str
    specs: Mapping[str, m.ResourceSpec]
    lease_s: float | None = 30.0
    wait_s: float | None = None
    retention_s: float = 3600.0
    chunk: int = 256
    max_bytes: int = 800_000
    forgets_hosts: bool = False
    max_waiting: int = 10_000
    max_live: int = 10_000
    max_over: int = 10_000
    max_incarnations: int = 64


class Decision(Struct, kw_only=True, gc=False):
    """What one event leads to.

    `history` has each step with its allocation's key. `refused` is why a message goes to the dead letters. `renewed`
    are the allocations whose lease starts anew; `cut` those whose lease must now run out although they had none or
    renewed it (their worker has a newer incarnation). `kind` says what the event was, for metrics. Each event in
    `follow_ups` must be decided, too.
    """

    kind: str
    changes: list[Change] = []
    history: list[tuple[str, Transition | Refresh]] = []
    commands: list[m.Command] = []
    follow_ups: list[m.Event] = []
    renewed: list[str] = []
    cut: list[str] = []
    refused: str | None = None


class DecisionBuilder:
    """The ledger as it will be. `cause` and `source` are what history says of each step, `bytes` what the steps so far
    will take of a commit."""

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
        self.token = ledger.token
        self.bytes = 0
        self.records: dict[str, Allocation] = {}
        self._overlay: HostOverlay | None = None
        self._moved: list[tuple[Allocation, int]] = []

    def host_state(self, host: str) -> HostState:
        """The host as it is before the decision."""
        return self.ledger.hosts.get(host) or HostState(host)

    def overlay(self, host: str) -> HostOverlay:
        """The host with every step so far. A decision is about one host."""
        overlay = self._overlay
        if overlay is None:
            overlay = self._overlay = HostOverlay(self.host_state(host))
        if self._moved:
            for record, count in self._moved:
                overlay.count(record, count)
            self._moved.clear()
        return overlay

    def record(self, key: str) -> Allocation | None:
        return self.records.get(key) or self.ledger.allocations.get(key)

    def reschedule(self, host: str) -> None:
        """The rest of a larger effect is left to an event of its own."""
        event = m.Reschedule(host=host, cause=self.cause, whole=False)
        if event not in self.decision.follow_ups:
            self.decision.follow_ups.append(event)

    def forget(self, keys: Sequence[str]) -> int:
        """Forget records, as many as this decision may be large; how many are left."""
        for done, key in enumerate(keys):
            size = len(key) + ENTRY_BYTES
            if self.bytes + size > self.rules.max_bytes and self.bytes:
                return len(keys) - done
            self.bytes += size
            self.decision.changes.append(DropAllocation(key))
        return 0

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
        """Take one row of the table: `base`, with `fields` replaced, in the state that follows from its own. Not
        `grows`: its record becomes no larger than it is, whatever it may have.

        A record that is `new` comes from no state. History is told of each step, of repeats (`Step.REFRESH`) what
        changed by them.

        Raises:
            IllegalStepError: there is no such row; nothing has changed.
            OversizeError: the record would be larger than it may be; nothing has changed.
            FullError: the decision has other steps, and this one would make it too large; nothing has changed.
        """
        now = self.now
        explanation = sizes.shortened(explanation)
        if reason := fields.get("reason"):
            fields["reason"] = sizes.shortened(reason)
        before = None if new else base.state
        state = advance(before, step)
        if fields:
            base = structs.replace(base, **fields)
        since = base.since if before == state else now
        after = structs.replace(
            base, state=state, since=since, writer=self.rules.writer, commit=self.ledger.commits + 1
        )
        key = after.key
        whole = after
        after, value = self._measured(key, after, step, new=new, grows=grows)
        decision = self.decision
        decision.changes.append(PutAllocation(key, after, value))
        told: Transition | Refresh
        if step is Step.REFRESH:
            told = Refresh(
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
            told = Transition(
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
        decision.history.append((key, told))
        self.records[key] = after
        held = before in HOLDING_STATES
        if held != (state in HOLDING_STATES):
            self._moved.append((whole, -1 if held else 1))
            if held and key in self.host_state(after.host).suspects:
                self.reschedule(after.host)
        return after

    def _measured(self, key: str, after: Allocation, step: Step, *, new: bool, grows: bool) -> tuple[Allocation, bytes]:
        """The record as it can be written, and its bytes, which are counted.

        A message must be answered, and what is over can always be written: if need be, without its devices.
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
                after = sizes.bare(after)
                value = encode(after)
                size = len(key) + len(value) + ENTRY_BYTES
        self.bytes += size
        return after, value


def _changed(before: Allocation, after: Allocation) -> dict[str, Any]:
    """The fields of `after` that are not as before."""
    changed: dict[str, Any] = {}
    for field in after.__struct_fields__:
        value, old = getattr(after, field), getattr(before, field)
        if value is not old and value != old:
            changed[field] = value
    return changed
