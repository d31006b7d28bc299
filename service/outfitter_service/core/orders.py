"""The rules of operators' orders: which of them are in effect, and what follows for devices and waiting workers.

An order is a level: `read` puts the ledger's record into agreement with it, however often it is read. It is one more
block of devices (`state.cordons`). Whoever has a device keeps it.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import UNSET

from outfitter_proto.records import MAX_REASON, Cordon, CordonOrder
from outfitter_service.core import discovery, reasons
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.state import cordons
from outfitter_service.core.state.host_state import HostState
from outfitter_service.core.state.ledger import DropRecord, Ledger


def is_news(ledger: Ledger, order: CordonOrder, now: datetime) -> bool:
    """Whether the ledger has a record of the order's host and does not agree with the order."""
    host_state = ledger.hosts.get(order.host)
    if host_state is None or host_state.record is None:
        return False
    before = host_state.cordons.get(order.id)
    return _wanted(order, before, now) != before


def read(builder: DecisionBuilder, event: m.OrderRead) -> None:
    """An order was read: it begins, changes or ends."""
    order = event.order
    host_state = builder.host_state(order.host)
    before = host_state.cordons.get(order.id)
    if host_state.record is None:
        return
    after = _wanted(order, before, builder.now)
    if after == before:
        return
    remaining = {id_: cordon for id_, cordon in host_state.cordons.items() if id_ != order.id}
    if after is not None:
        builder.put_record(after)
        _note(builder, "cordoned", after, f"takes {reasons.what_of(after)} out: {after.reason}")
        _apply(builder, host_state, {**remaining, after.order: after})
    elif before is not None:
        _end(
            builder, before, f"was ended by {order.ended_by or 'somebody'}" if order.ended_at else "has ended by itself"
        )
        _apply(builder, host_state, remaining)


def end_due(builder: DecisionBuilder, host_state: HostState) -> None:
    """End orders whose time is over, at most as many as one decision may change."""
    remaining = dict(host_state.cordons)
    due = [one for one in remaining.values() if one.until is not UNSET and one.until <= builder.now]
    for cordon in due[: builder.rules.chunk]:
        _end(builder, cordon, "has ended by itself")
        del remaining[cordon.order]
    _apply(builder, host_state, remaining)


def _wanted(order: CordonOrder, before: Cordon | None, now: datetime) -> Cordon | None:
    """What the ledger must have of an order; None: nothing, because it does not stand. `before`: what it has."""
    if not order.stands(now):
        return None
    return Cordon(
        host=order.host,
        order=order.id,
        author=order.author[:MAX_REASON],
        reason=reasons.shortened(order.reason),
        since=before.since if before is not None else now,
        resource=order.resource or UNSET,
        device=order.device or UNSET,
        until=order.until.astimezone(UTC) if order.until else UNSET,
    )


def _end(builder: DecisionBuilder, cordon: Cordon, how: str) -> None:
    builder.change(DropRecord(cordon.key))
    builder.reschedule(cordon.host)
    _note(builder, "uncordoned", cordon, f"for {reasons.what_of(cordon)} {how}; it said: {cordon.reason}")


def _note(builder: DecisionBuilder, event: str, cordon: Cordon, what: str) -> None:
    explanation = f"order {cordon.order} by {cordon.author} {what}"
    builder.note(event, explanation, host=cordon.host, device=cordon.device)


def _apply(builder: DecisionBuilder, host_state: HostState, in_effect: cordons.Cordons) -> None:
    """From now on these orders are in effect: mark the host's devices, and have waiting workers looked at."""
    changed = cordons.reassessed(host_state, in_effect, host_state.devices.inventories)
    if changed:
        discovery.put_inventories(builder, host_state, changed, host_state.waiters.queue)
