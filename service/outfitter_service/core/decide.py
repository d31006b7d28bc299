"""The rules: `decide` takes one event and returns what changes, what is published, and what drivers must do.

`decide` is pure and synchronous: it reads the ledger, the rules and the time, and changes none of them. The caller
applies `Decision.changes`, or the `FastGrant` that it gets instead. It commits, and only then acts on
`Decision.commands`. The same ledger and the same events give the same decisions.

`Rules.chunk` bounds one event's output. An event in `Decision.follow_ups` continues the rest. Each piece keeps the
promises, whatever is decided between the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from msgspec import structs

from outfitter_proto.records import NO_TOKEN, Allocation, Deregister, Heartbeat, ReasonCode, Register
from outfitter_service.core import discovery, ending, fast_path, orders, queue, registration
from outfitter_service.core import model as m
from outfitter_service.core.decision import Decision, DecisionBuilder, Rules
from outfitter_service.core.ending import is_due
from outfitter_service.core.state.ledger import Ledger, PutAllocation
from outfitter_service.core.states import PREPARING, RELEASING

__all__ = ["SHOWN_POSITIONS", "Decision", "Rules", "decide", "decide_in_full", "implied", "is_due", "renumber"]

SHOWN_POSITIONS = 32
"""The first waiters of a host have exact queue positions; positions behind these may be out of date."""


def decide(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision | fast_path.FastGrant:
    """Decide one event. `now`: the wall time in UTC."""
    if type(event) is not m.Incoming:
        return _internal(ledger, rules, event, now)  # type: ignore[arg-type]  # `type is` does not narrow a union
    return fast_path.grant(ledger, rules, event, now) or decide_in_full(ledger, rules, event, now)


def decide_in_full(ledger: Ledger, rules: Rules, event: m.Incoming, now: datetime) -> Decision:
    """Decide a message step by step, without the fast path of `decide`. The result is the same."""
    message, source = event.message, event.source
    # `type is`: isinstance costs a microsecond where the answer is no
    if type(message) is Register:
        builder = DecisionBuilder(ledger, rules, now, cause="register", source=source)
        registration.register(builder, message, source, event.warnings)
    elif type(message) is Heartbeat:
        builder = DecisionBuilder(ledger, rules, now, cause="heartbeat")
        registration.heartbeat(builder, message)
    elif type(message) is Deregister:
        builder = DecisionBuilder(ledger, rules, now, cause="deregister", source=source)
        registration.deregister(builder, message, source, event.warnings)
    else:
        raise TypeError(f"no rule for a message of type {type(message).__name__}")
    registration.make_room(builder, message)
    return builder.decision


def _reschedule(builder: DecisionBuilder, event: m.Reschedule) -> None:
    builder.set_kind(event.kind)
    if discovery.release_held_back(builder, event.host):
        builder.follow_up(event)
    elif queue.scan(builder, event.host, whole=event.whole):
        discovery.refresh_holders(builder, event.host)


def _owner_died(builder: DecisionBuilder, event: m.OwnerDied) -> None:
    ending.end_if_live(builder, event.allocation, ReasonCode.OWNER_DIED, event.detail)


def _lease_expired(builder: DecisionBuilder, event: m.LeaseExpired) -> None:
    silence = "no heartbeat within lease and grace"
    ending.end_if_live(builder, event.allocation, ReasonCode.LEASE_EXPIRED, silence)


_INTERNAL: Mapping[type, Callable[[DecisionBuilder, Any], object]] = {
    m.DriverReport: discovery.report,
    m.DriverRetry: discovery.retry,
    m.OwnerDied: _owner_died,
    m.OwnerUnwatched: registration.unwatched,
    m.LeaseExpired: _lease_expired,
    m.Prepared: ending.prepared,
    m.Unprepared: ending.unprepared,
    m.ReleaseDelayed: ending.release_delayed,
    m.OrderRead: orders.read,
    m.Tick: ending.tick,
    m.Reschedule: _reschedule,
}
"""The rule of each internal event."""


def _internal(ledger: Ledger, rules: Rules, event: m.InternalEvent, now: datetime) -> Decision:
    if type(event) not in _INTERNAL:
        raise TypeError(f"no rule for an event of type {type(event).__name__}")
    builder = DecisionBuilder(ledger, rules, now, cause=event.cause if type(event) is m.Reschedule else event.kind)
    _INTERNAL[type(event)](builder, event)
    return builder.decision


def renumber(ledger: Ledger, rules: Rules, host: str) -> list[PutAllocation]:
    """The changes that refresh a host's queue positions in records. They are no steps of allocations."""
    changes: list[PutAllocation] = []
    host_state = ledger.hosts.get(host)
    for position, (_, _, key) in enumerate(host_state.waiters.queue if host_state is not None else (), start=1):
        record = ledger.allocations[key]
        recorded = record.queue_position
        if position > SHOWN_POSITIONS and (recorded is None or recorded > SHOWN_POSITIONS):
            break
        if recorded != position:
            changes.append(
                PutAllocation(
                    key,
                    structs.replace(record, queue_position=position, writer=rules.writer, commit=ledger.commits + 1),
                )
            )
    return changes


def implied(record: Allocation) -> m.Command | None:
    """The command that a record implies. The manager issues it again after a restart."""
    if record.state == PREPARING:
        return m.Prepare(allocation=record.key, token=record.token or NO_TOKEN)
    if record.state == RELEASING:
        return m.Unprepare(allocation=record.key, token=record.token or NO_TOKEN)
    return None
