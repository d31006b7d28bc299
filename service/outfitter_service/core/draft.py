"""One decision in the making: the ledger as it will be, without touching it, and what the decision comes to."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from msgspec import Struct, structs

from outfitter_proto.records import HOLDING_STATES, Allocation, Refresh, Source, Transition
from outfitter_service.core import model as m
from outfitter_service.core.book import HostBook
from outfitter_service.core.ledger import Change, Ledger, PutAllocation
from outfitter_service.core.states import Step, advance
from outfitter_service.core.view import View


class Rules(Struct, frozen=True, kw_only=True):
    """What decisions are made by, besides the ledger: the configured resources and limits, and who writes.

    `lease_s` and `wait_s` are what a registration has that does not say (None: no lease, no end of waiting),
    `retention_s` how long final records stay, `chunk` about how many allocations one decision changes at most. With
    `forgets_hosts` a host of which nobody is remembered is forgotten.

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


class Draft:
    """The ledger as it will be. `cause` and `source` are what history says of each step."""

    __slots__ = ("_moved", "_view", "cause", "decision", "ledger", "now", "records", "rules", "source", "token")

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
        self.records: dict[str, Allocation] = {}
        self._view: View | None = None
        self._moved: list[tuple[Allocation, int]] = []

    def book(self, host: str) -> HostBook:
        """The host's book as it is before the decision."""
        return self.ledger.hosts.get(host) or HostBook(host)

    def view(self, host: str) -> View:
        """The host's book with every step so far. A decision is about one host."""
        view = self._view
        if view is None:
            view = self._view = View(self.book(host))
        if self._moved:
            for record, count in self._moved:
                view.count(record, count)
            self._moved.clear()
        return view

    def record(self, key: str) -> Allocation | None:
        return self.records.get(key) or self.ledger.allocations.get(key)

    def again(self, host: str) -> None:
        """The rest of a larger effect is left to an event of its own."""
        event = m.Reschedule(host=host, cause=self.cause, whole=False)
        if event not in self.decision.follow_ups:
            self.decision.follow_ups.append(event)

    def step(
        self,
        step: Step,
        explanation: str,
        base: Allocation,
        *,
        new: bool = False,
        confirmed: bool | None = None,
        **fields: Any,
    ) -> Allocation:
        """Take one row of the table: `base`, with `fields` replaced, in the state that follows from its own.

        A record that is `new` comes from no state. History is told of each step, of repeats (`Step.REFRESH`) what
        changed by them.

        Raises:
            IllegalStepError: there is no such row; nothing has changed.
        """
        now = self.now
        before = None if new else base.state
        state = advance(before, step)
        if fields:
            base = structs.replace(base, **fields)
        since = base.since if before == state else now
        after = structs.replace(
            base, state=state, since=since, writer=self.rules.writer, commit=self.ledger.commits + 1
        )
        key = after.key
        decision = self.decision
        decision.changes.append(PutAllocation(key, after))
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
            self._moved.append((after, -1 if held else 1))
        return after


def _changed(before: Allocation, after: Allocation) -> dict[str, Any]:
    """The fields of `after` that are not as before."""
    changed: dict[str, Any] = {}
    for field in after.__struct_fields__:
        value, old = getattr(after, field), getattr(before, field)
        if value is not old and value != old:
            changed[field] = value
    return changed
