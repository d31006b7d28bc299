"""The rules of workers' messages: register, heartbeat and deregister, and what they mean for other incarnations."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.keys import AllocationKey, allocation_key
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    NO_COMMIT,
    Allocation,
    Deregister,
    Heartbeat,
    ReasonCode,
    Register,
    Registration,
    ResolvedRequest,
    Source,
)
from outfitter_service.core import discovery, ending, queue, reasons
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.request_check import differences, resolve, unknown_properties
from outfitter_service.core.states import ENDED, PENDING, RELEASING, Step

MIN_FORGOTTEN = 2
"""A message may delete this many final records, however small `Rules.chunk` is. It adds fewer, so that no flood of
messages outruns the deletion."""

UNSEEN = -1
"""The source offset of a record whose deregistration came before its registration."""


def register(builder: DecisionBuilder, message: Register, source: Source, warnings: Sequence[str]) -> None:
    """Answer a registration: grant it, queue it or refuse it. `warnings` go into the record."""
    key = allocation_key(message.host, message.worker, message.incarnation)
    earlier = builder.record(key)
    if earlier is not None:
        register_again(builder, key, earlier, message)
        return
    newest = builder.host_state(message.host).runs.newest(message.worker)
    if newest is not None:
        _supersede(builder, newest, message.incarnation)  # that one has superseded all earlier ones
    resolved = resolve(builder.rules, message)
    wait_s = message.wait_s if message.wait_s is not None else builder.rules.wait_s
    if resolved.request.choices is not UNSET:
        warnings = [*warnings, *unknown_properties(builder.host_state(message.host), resolved.request)]
    record = Allocation(
        host=message.host,
        worker=message.worker,
        incarnation=message.incarnation,
        state=PENDING,
        request=resolved.request,
        since=builder.now,
        writer=builder.rules.writer,
        commit=NO_COMMIT,
        source=source,
        unavailable=resolved.unavailable,
        warnings=list(warnings) or UNSET,
        wait_until=builder.now + timedelta(seconds=wait_s) if wait_s is not None else None,
    )
    if resolved.problem is not None:
        code, reason = resolved.problem
        builder.step(Step.FAIL, reason, record, new=True, reason=reason, reason_code=code, wait_until=None)
    elif queue.admit(builder, record).state not in FINAL_STATES:
        builder.renew(key)


def make_room(builder: DecisionBuilder, message: Registration) -> None:
    """Delete the oldest final records where a worker has too many incarnations, or the host too many records."""
    if not builder.records:
        return
    host_state, rules = builder.host_state(message.host), builder.rules
    runs = len(host_state.runs.incarnations.get(message.worker, ()))
    if runs < rules.max_incarnations and host_state.runs.final_count < rules.max_final - MIN_FORGOTTEN:
        return
    new = sum(key not in builder.ledger.allocations for key in builder.records)
    ended = sum(record.state in FINAL_STATES for record in builder.records.values())
    room = max(MIN_FORGOTTEN, rules.chunk - len(builder.decision.changes))
    surplus = runs + new - rules.max_incarnations
    forgotten = ending.forgettable(builder, host_state.runs.past.get(message.worker, ()), min(surplus, room))
    if ended:
        surplus = host_state.runs.final_count + ended - len(forgotten) - rules.max_final
        oldest = ending.forgettable(builder, host_state.runs.endings, min(surplus, room))
        forgotten += [key for key in oldest if key not in forgotten]
    builder.forget(forgotten[:room])


def register_again(builder: DecisionBuilder, key: AllocationKey, record: Allocation, message: Register) -> None:
    """The same incarnation registers again: publish its record unchanged, and renew its lease if it is current."""
    builder.repeat(key)
    if record.state == ENDED:
        builder.set_kind("late")
        return
    builder.set_kind("repeated")
    fields = differences(record, message)
    if fields:
        builder.refuse(
            f"incarnation {message.incarnation!r} of worker {message.worker!r} registered before with other "
            f"{', '.join(fields)}; its grant is unchanged. Deregister first, or register under a new incarnation"
        )
    elif record.state not in FINAL_STATES and _is_current(builder, key, record):
        builder.renew(key)


def _is_current(builder: DecisionBuilder, key: AllocationKey, record: Allocation) -> bool:
    """Whether no newer incarnation has ever registered, even one whose record is deleted by now."""
    newest = builder.host_state(record.host).runs.newest(record.worker)
    return newest == key and record.reason_code != ReasonCode.SUPERSEDED


def _supersede(builder: DecisionBuilder, key: AllocationKey, newer: str) -> None:
    """A newer incarnation registered. The older one can renew nothing, but holds its devices until it is dead."""
    older = builder.ledger.allocations[key]
    reason = f"superseded by incarnation {newer}"
    if older.state == PENDING:
        builder.step(
            Step.WITHDRAW,
            reason,
            older,
            reason=reason,
            reason_code=ReasonCode.SUPERSEDED,
            queue_position=None,
            wait_until=None,
        )
        # workers behind it are evaluated once the newer incarnation has its place in the queue
        queue.reschedule(builder, older.host)
    elif older.state in HOLDING_STATES:
        builder.start_final_lease(key)
        if not discovery.lacks_superseded_mark(older) or not builder.rules.news:
            return
        if len(encode(older)) > builder.rules.max_bytes // 2:
            builder.reschedule(older.host)  # the newer record may not fit into the commit beside it
        else:
            discovery.mark_superseded(builder, older, newer)


def unwatched(builder: DecisionBuilder, event: m.OwnerUnwatched) -> None:
    """The manager cannot see the owner's end. Say so in the record, and set a lease if the worker asked for none."""
    record = builder.record(event.allocation)
    if record is None or record.state in FINAL_STATES or record.state == RELEASING:
        return
    if record.reason_code == ReasonCode.SUPERSEDED:
        return  # it has a last lease already, and no heartbeat renews it
    request, explanation = record.request, f"its owner process is not watched: {event.reason}"
    if record.unwatched == event.code and (request.lease_s is not None or request.waits_for_owner):
        return
    if request.waits_for_owner:
        explanation = f"{explanation}; nobody sends heartbeats for it, so no lease applies instead"
    elif request.lease_s is None:
        request = structs.replace(request, lease_s=event.lease_s)
        explanation = f"{explanation}; a lease of {event.lease_s:g} s applies instead"
    builder.step(Step.REFRESH, explanation, record, grows=False, request=request, unwatched=event.code)


def heartbeat(builder: DecisionBuilder, message: Heartbeat) -> None:
    """Renew the lease of a current incarnation."""
    key = allocation_key(message.host, message.worker, message.incarnation)
    record = builder.record(key)
    if record is None:
        builder.refuse(f"heartbeat from {key}, which is not registered here; register first")
    elif record.state in FINAL_STATES and _was_under_way(builder, record):
        builder.set_kind("late")
    elif record.state in FINAL_STATES:
        builder.refuse(f"heartbeat from {key}, which is over ({record.state}: {record.reason})")
    elif not _is_current(builder, key, record):
        builder.refuse(f"heartbeat from {key}, an older incarnation of its worker: it renews nothing")
    else:
        builder.renew(key)


def _was_under_way(builder: DecisionBuilder, record: Allocation) -> bool:
    """Whether a worker may not know yet that its run is over: it ended less than a lease ago, and not by its word."""
    lease_s = record.request.lease_s
    if lease_s is None or record.reason_code in (ReasonCode.DEREGISTERED, ReasonCode.WITHDRAWN):
        return False
    return builder.now < record.since + timedelta(seconds=lease_s)


def deregister(builder: DecisionBuilder, message: Deregister, source: Source, warnings: Sequence[str]) -> None:
    """End the named incarnation, or the worker's newest one. The record's reason has the `warnings`: a misspelt
    incarnation, for example, ends the newest one."""
    key: AllocationKey | None
    if message.incarnation is None:
        key = builder.host_state(message.host).runs.newest(message.worker)
    else:
        key = allocation_key(message.host, message.worker, message.incarnation)
    record = builder.record(key) if key is not None else None
    said = "; ".join([message.reason, *warnings] if message.reason else warnings)
    text = f"deregistered: {reasons.shortened(said)}" if said else "deregistered"
    if record is None or (message.incarnation is None and record.source.offset == UNSEEN):
        _deregister_unseen(builder, message, source, text)
    elif record.state in FINAL_STATES:
        builder.set_kind("late")
    else:
        code = ReasonCode.WITHDRAWN if record.state == PENDING else ReasonCode.DEREGISTERED
        ending.end(builder, record, code, text)


def _deregister_unseen(builder: DecisionBuilder, message: Deregister, source: Source, text: str) -> None:
    """Answer a deregistration of a worker that is not registered. A named incarnation gets an `ended` record: its
    registration may be late, and a registration after its own deregistration grants nothing."""
    if message.incarnation is None:
        builder.refuse(f"deregistration of {message.host}/{message.worker}, which is not registered here")
        return
    reason = f"{text} before it was registered"
    builder.step(
        Step.END,
        reason,
        Allocation(
            host=message.host,
            worker=message.worker,
            incarnation=message.incarnation,
            state=PENDING,
            request=ResolvedRequest(amounts={}),
            since=builder.now,
            writer=builder.rules.writer,
            commit=NO_COMMIT,
            source=Source(partition=source.partition, offset=UNSEEN),
        ),
        new=True,
        reason=reason,
        reason_code=ReasonCode.DEREGISTERED,
    )
