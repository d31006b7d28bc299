"""The rules: `decide` takes one event and returns what changes, what is published, and what drivers must do.

Pure and synchronous: it reads the ledger, the rules and the time, and changes none of them. The caller applies
`Decision.changes`, or the `FastGrant` that it gets instead, commits, and only then acts on `Decision.commands`. The
same ledger and the same events give the same decisions.

`Rules.chunk` bounds one event's output. An event in `Decision.follow_ups` continues the rest. Each piece keeps the
promises, whatever is decided between the pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice

from msgspec import UNSET, structs

from outfitter_proto.codec import encode
from outfitter_proto.keys import allocation_key, host_key
from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Deregister,
    Heartbeat,
    ReasonCode,
    Register,
    Registration,
    ResolvedRequest,
    Source,
)
from outfitter_service.core import discovery, fast_path, queue, reasons
from outfitter_service.core import model as m
from outfitter_service.core.decision import Decision, DecisionBuilder, Rules
from outfitter_service.core.request_check import differences, resolve
from outfitter_service.core.state.host_state import Ending, HostState
from outfitter_service.core.state.ledger import DropRecord, Ledger, PutAllocation, PutRecord
from outfitter_service.core.state.sizes import FullError
from outfitter_service.core.states import ALLOCATED, ENDED, FAILED, PENDING, PREPARING, RELEASING, Step

__all__ = ["SHOWN_POSITIONS", "Decision", "Rules", "decide", "decide_in_full", "implied", "is_due", "renumber"]

SHOWN_POSITIONS = 32
"""The first waiters of a host have exact queue positions; positions behind these may be out of date."""

MIN_FORGOTTEN = 2
"""A message may delete this many final records, however small `Rules.chunk` is. It adds fewer, so that no flood of
messages outruns the deletion."""

UNSEEN = -1
"""The source offset of a record whose deregistration came before its registration."""


def decide(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision | fast_path.FastGrant:
    """Decide one event. `now` is the wall time (UTC)."""
    if type(event) is not m.Incoming:
        return _internal(ledger, rules, event, now)
    return fast_path.grant(ledger, rules, event, now) or decide_in_full(ledger, rules, event, now)


def decide_in_full(ledger: Ledger, rules: Rules, event: m.Incoming, now: datetime) -> Decision:
    """Decide a message step by step, without the fast path of `decide`. The result is the same."""
    message, source = event.message, event.source
    # `type is`: isinstance costs a microsecond where the answer is no
    if type(message) is Register:
        builder = DecisionBuilder(ledger, rules, now, cause="register", source=source)
        _register(builder, message, source, event.warnings)
    elif type(message) is Heartbeat:
        builder = DecisionBuilder(ledger, rules, now, cause="heartbeat")
        _heartbeat(builder, message)
    elif type(message) is Deregister:
        builder = DecisionBuilder(ledger, rules, now, cause="deregister", source=source)
        _deregister(builder, message, source)
    else:
        raise TypeError(f"no rule for a message of type {type(message).__name__}")
    _make_room(builder, message)
    return builder.decision


def _internal(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision:
    match event:
        case m.DriverReport():
            builder = DecisionBuilder(ledger, rules, now, cause="driver-report")
            discovery.report(builder, event)
        case m.DriverRetry():
            builder = DecisionBuilder(ledger, rules, now, cause="driver-retry")
            discovery.retry(builder, event)
        case m.OwnerDied(allocation=key, detail=detail):
            builder = DecisionBuilder(ledger, rules, now, cause="owner-died")
            _end_if_live(builder, key, ReasonCode.OWNER_DIED, detail)
        case m.OwnerUnwatched():
            builder = DecisionBuilder(ledger, rules, now, cause="owner-unwatched")
            _unwatched(builder, event)
        case m.LeaseExpired(allocation=key):
            builder = DecisionBuilder(ledger, rules, now, cause="lease-expired")
            _end_if_live(builder, key, ReasonCode.LEASE_EXPIRED, "no heartbeat within lease and grace")
        case m.Prepared():
            builder = DecisionBuilder(ledger, rules, now, cause="prepared")
            _prepared(builder, event)
        case m.Unprepared():
            builder = DecisionBuilder(ledger, rules, now, cause="unprepared")
            _unprepared(builder, event)
        case m.ReleaseDelayed():
            builder = DecisionBuilder(ledger, rules, now, cause="release-delayed")
            _release_delayed(builder, event)
        case m.Tick():
            builder = DecisionBuilder(ledger, rules, now, cause="tick")
            _tick(builder, event.host)
        case m.Reschedule():
            builder = DecisionBuilder(ledger, rules, now, cause=event.cause)
            builder.decision.kind = "reschedule"
            if discovery.release_held_back(builder, event.host):
                builder.decision.follow_ups.append(event)
            elif queue.scan(builder, event.host, whole=event.whole):
                discovery.refresh_holders(builder, event.host)
        case _:
            raise TypeError(f"no rule for an event of type {type(event).__name__}")
    return builder.decision


def renumber(ledger: Ledger, rules: Rules, host: str) -> list[PutAllocation]:
    """Refresh the queue positions that are shown. This is no step of an allocation."""
    changes: list[PutAllocation] = []
    host_state = ledger.hosts.get(host)
    for position, (_, _, key) in enumerate(host_state.queue if host_state is not None else (), start=1):
        record = ledger.allocations[key]
        shown = record.queue_position
        if position > SHOWN_POSITIONS and (shown is None or shown > SHOWN_POSITIONS):
            break
        if shown != position:
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
        return m.Prepare(allocation=record.key, token=record.token or 0)
    if record.state == RELEASING:
        return m.Unprepare(allocation=record.key, token=record.token or 0)
    return None


# --- messages ------------------------------------------------------------------------------------------


def _register(builder: DecisionBuilder, message: Register, source: Source, warnings: Sequence[str]) -> None:
    key = allocation_key(message.host, message.worker, message.incarnation)
    earlier = builder.record(key)
    if earlier is not None:
        _register_again(builder, key, earlier, message)
        return
    newest = builder.host_state(message.host).newest(message.worker)
    if newest is not None:
        _supersede(builder, newest, message.incarnation)  # it superseded the earlier ones itself
    resolved = resolve(builder.rules, message)
    wait_s = message.wait_s if message.wait_s is not None else builder.rules.wait_s
    record = Allocation(
        host=message.host,
        worker=message.worker,
        incarnation=message.incarnation,
        state=PENDING,
        request=resolved.request,
        since=builder.now,
        writer=builder.rules.writer,
        commit=0,
        source=source,
        unavailable=resolved.unavailable,
        warnings=list(warnings) or UNSET,
        wait_until=builder.now + timedelta(seconds=wait_s) if wait_s is not None else None,
    )
    if resolved.problem is not None:
        code, reason = resolved.problem
        builder.step(Step.FAIL, reason, record, new=True, reason=reason, reason_code=code, wait_until=None)
    elif queue.admit(builder, record).state not in FINAL_STATES:
        builder.decision.renewed.append(key)


def _make_room(builder: DecisionBuilder, message: Registration) -> None:
    """Delete the oldest final records where a worker has too many incarnations, or the host too many records."""
    if not builder.records:
        return
    host_state, rules = builder.host_state(message.host), builder.rules
    runs = len(host_state.incarnations.get(message.worker, ()))
    if runs < rules.max_incarnations and host_state.final_count < rules.max_final - MIN_FORGOTTEN:
        return
    new = sum(key not in builder.ledger.allocations for key in builder.records)
    ended = sum(record.state in FINAL_STATES for record in builder.records.values())
    room = max(MIN_FORGOTTEN, rules.chunk - len(builder.decision.changes))
    surplus = runs + new - rules.max_incarnations
    forgotten = _forgettable(builder, host_state.past.get(message.worker, ()), min(surplus, room))
    if ended:
        surplus = host_state.final_count + ended - len(forgotten) - rules.max_final
        oldest = _forgettable(builder, host_state.endings, min(surplus, room))
        forgotten += [key for key in oldest if key not in forgotten]
    builder.forget(forgotten[:room])


def _forgettable(builder: DecisionBuilder, endings: Sequence[Ending], most: int) -> list[str]:
    """The first `most` final records whose end is in a commit: before that, nobody can have read it."""
    allocations, sealed = builder.ledger.allocations, builder.ledger.commits
    # where the clock was set back, records that ended just now are among the first
    keys = (key for _, key in endings if allocations[key].commit <= sealed and key not in builder.records)
    return list(islice(keys, max(most, 0)))


def _register_again(builder: DecisionBuilder, key: str, record: Allocation, message: Register) -> None:
    """The same incarnation again: publish its record unchanged, and renew its lease if it is current."""
    decision = builder.decision
    decision.changes.append(PutAllocation(key, record))
    if record.state == ENDED:
        decision.kind = "late"
        return
    decision.kind = "repeated"
    fields = differences(record, message)
    if fields:
        decision.refused = (
            f"incarnation {message.incarnation!r} of worker {message.worker!r} registered before with other "
            f"{', '.join(fields)}; its grant is unchanged. Deregister first, or register under a new incarnation"
        )
    elif record.state not in FINAL_STATES and _is_current(builder, key, record):
        decision.renewed.append(key)


def _is_current(builder: DecisionBuilder, key: str, record: Allocation) -> bool:
    """No newer incarnation has ever registered, whether its record is retained or not."""
    newest = builder.host_state(record.host).newest(record.worker)
    return newest == key and record.reason_code != ReasonCode.SUPERSEDED


def _supersede(builder: DecisionBuilder, key: str, newer: str) -> None:
    """A newer incarnation registered: the older one can renew nothing, but holds its devices until it is dead."""
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
        builder.decision.final_leases.append(key)
        if not discovery.lacks_superseded_mark(older):
            return
        if len(encode(older)) > builder.rules.max_bytes // 2:
            builder.reschedule(older.host)  # the newer record may not fit into the commit beside it
        else:
            discovery.mark_superseded(builder, older, newer)


def _unwatched(builder: DecisionBuilder, event: m.OwnerUnwatched) -> None:
    """The manager cannot see the owner's end: say so in the record, and set a lease if the worker asked for none."""
    record = builder.record(event.allocation)
    if record is None or record.state in FINAL_STATES or record.state == RELEASING:
        return
    if record.reason_code == ReasonCode.SUPERSEDED:
        return  # it has a last lease already, and no heartbeat renews it
    request, explanation = record.request, f"its owner process is not watched: {event.reason}"
    if request.lease_s is None:
        request = structs.replace(request, lease_s=event.lease_s)
        explanation = f"{explanation}; a lease of {event.lease_s:g} s applies instead"
    elif record.unwatched == event.code:
        return
    builder.step(Step.REFRESH, explanation, record, grows=False, request=request, unwatched=event.code)


def _heartbeat(builder: DecisionBuilder, message: Heartbeat) -> None:
    decision = builder.decision
    key = allocation_key(message.host, message.worker, message.incarnation)
    record = builder.record(key)
    if record is None:
        decision.refused = f"heartbeat from {key}, which is not registered here; register first"
    elif record.state in FINAL_STATES:
        decision.refused = f"heartbeat from {key}, which is over ({record.state}: {record.reason})"
    elif not _is_current(builder, key, record):
        decision.refused = f"heartbeat from {key}, an older incarnation of its worker: it renews nothing"
    else:
        decision.renewed.append(key)


def _deregister(builder: DecisionBuilder, message: Deregister, source: Source) -> None:
    decision = builder.decision
    key: str | None
    if message.incarnation is None:
        key = builder.host_state(message.host).newest(message.worker)
    else:
        key = allocation_key(message.host, message.worker, message.incarnation)
    record = builder.record(key) if key is not None else None
    text = f"deregistered: {reasons.shortened(message.reason)}" if message.reason else "deregistered"
    if record is None or (message.incarnation is None and record.source.offset == UNSEEN):
        _deregister_unseen(builder, message, source, text)
    elif record.state in FINAL_STATES:
        decision.kind = "late"
    else:
        code = ReasonCode.WITHDRAWN if record.state == PENDING else ReasonCode.DEREGISTERED
        _end(builder, record, code, text)


def _deregister_unseen(builder: DecisionBuilder, message: Deregister, source: Source, text: str) -> None:
    """Nobody is registered under that name. A named incarnation gets an `ended` record as the answer: its registration
    may be late, and a registration after its own deregistration grants nothing."""
    if message.incarnation is None:
        builder.decision.refused = f"deregistration of {message.host}/{message.worker}, which is not registered here"
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
            commit=0,
            source=Source(partition=source.partition, offset=UNSEEN),
        ),
        new=True,
        reason=reason,
        reason_code=ReasonCode.DEREGISTERED,
    )


# --- commands' ends ------------------------------------------------------------------------------------


def _prepared(builder: DecisionBuilder, event: m.Prepared) -> None:
    record = builder.record(event.allocation)
    if record is None or record.state != PREPARING or record.token != event.token:
        return
    if event.error is None:
        builder.step(Step.PREPARED, "prepared", record)
    else:
        _release(builder, record, ReasonCode.PREPARE_FAILED, event.error, outcome=FAILED)


def _unprepared(builder: DecisionBuilder, event: m.Unprepared) -> None:
    record = builder.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token:
        return
    step = Step.GIVE_UP if record.outcome == FAILED else Step.END
    builder.step(
        step,
        "released" if event.confirmed else "released (unconfirmed: no in-use check)",
        record,
        confirmed=event.confirmed,
        outcome=None,
        reason=_release_reason(record),
        delayed_by=UNSET,
    )
    queue.schedule(builder, record.host)


def _release_delayed(builder: DecisionBuilder, event: m.ReleaseDelayed) -> None:
    """Say in the record what delays the release."""
    record = builder.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token or record.delayed_by == event.reason:
        return
    why = _release_reason(record)
    reason = f"{why}; {event.reason}" if why else event.reason
    builder.step(Step.REFRESH, event.reason, record, reason=reason, delayed_by=event.reason)


def _release_reason(record: Allocation) -> str | None:
    """Why a record is being released, without the reason of its delay."""
    if record.reason is None or record.delayed_by is UNSET:
        return record.reason
    return record.reason.removesuffix(record.delayed_by).removesuffix("; ") or None


# --- endings -------------------------------------------------------------------------------------------


def _end_if_live(builder: DecisionBuilder, key: str, code: ReasonCode, reason: str) -> None:
    record = builder.record(key)
    if record is not None and record.state not in FINAL_STATES:
        _end(builder, record, code, reason)


def _end(builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str) -> None:
    """End a record, through `releasing` where a driver must take the devices back first."""
    state = record.state
    if state == RELEASING:
        builder.decision.kind = "repeated"
        return
    if state == PREPARING or (state == ALLOCATED and _lets_go(builder.rules, record)):
        _release(builder, record, code, reason, outcome=ENDED)
        return
    builder.step(
        Step.WITHDRAW if state == PENDING else Step.END,
        reason,
        record,
        confirmed=False if state == ALLOCATED and record.resources else None,
        reason=reason,
        reason_code=code,
        queue_position=None,
        wait_until=None,
    )
    if builder.host_state(record.host).queue:
        queue.schedule(builder, record.host)


def _release(
    builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, outcome: AllocationState
) -> None:
    builder.step(Step.RELEASE, reason, record, reason=reason, reason_code=code, outcome=outcome)
    builder.decision.commands.append(m.Unprepare(allocation=record.key, token=record.token or 0))


def _lets_go(rules: Rules, record: Allocation) -> bool:
    """A driver must take back some of the record's devices, by the configuration of now or of the grant."""
    if record.prepared:
        return True
    for resource in record.resources:
        spec = rules.specs.get(resource)
        if spec is not None and (spec.confirms or spec.prepares):
            return True
    return False


# --- time ----------------------------------------------------------------------------------------------


def is_due(ledger: Ledger, rules: Rules, host: str, now: datetime) -> bool:
    """Whether a tick of `host` would change anything."""
    host_state = ledger.hosts[host]
    over = now - timedelta(seconds=rules.retention_s)
    due = host_state.has_due(now=now, over_before=over, max_final=rules.max_final)
    return due or (rules.forgets_hosts and host_state.is_idle(since=over))


def _tick(builder: DecisionBuilder, host: str) -> None:
    """Fail the waiters whose `wait_s` is over, and delete final records after their retention."""
    host_state = builder.host_state(host)
    rules = builder.rules
    late, full = _give_up_late(builder, host_state)
    if late:
        queue.reschedule(builder, host)
    if host_state.scan_from is not None:
        builder.reschedule(host)
    if host_state.is_ahead(builder.now):
        _correct_clock(builder, host)
        return
    over_before = builder.now - timedelta(seconds=rules.retention_s)
    if rules.forgets_hosts and host_state.is_idle(since=over_before):
        builder.decision.changes.append(DropRecord(host_key(host)))
        return
    room = rules.chunk - late
    surplus = max(host_state.final_count - rules.max_final, bisect_left(host_state.endings, (over_before, "")))
    forgotten = _forgettable(builder, host_state.endings, min(surplus, room))
    left = builder.forget(forgotten)
    if full or left or (forgotten and surplus > room):
        builder.decision.follow_ups.append(m.Tick(host=host))


def _correct_clock(builder: DecisionBuilder, host: str) -> None:
    """The clock was ahead when some records were written: count their times from now."""
    host_state, now = builder.host_state(host), builder.now
    if host_state.record is not None and host_state.record.since > now:
        builder.decision.changes.append(PutRecord(structs.replace(host_state.record, since=now)))
    for key in host_state.ahead(now, builder.rules.chunk - len(builder.decision.changes)):
        record = builder.record(key)
        if record is None or record.since <= now:
            continue  # this decision has failed it already
        until = record.wait_until
        if until is not None:
            until = now + max(until - record.since, timedelta())
        try:
            builder.step(Step.REFRESH, "the clock was set back", record, grows=False, since=now, wait_until=until)
        except FullError:
            break
    builder.decision.follow_ups.append(m.Tick(host=host))


def _give_up_late(builder: DecisionBuilder, host_state: HostState) -> tuple[int, bool]:
    """Fail the waiters whose `wait_s` is over. Returns how many, and whether the decision is full."""
    late = 0
    with suppress(FullError):
        for at, key in islice(host_state.deadlines, builder.rules.chunk):
            if at > builder.now:
                return late, False
            waiter = builder.ledger.allocations[key]
            if queue.is_answered(waiter):
                queue.give_up(builder, waiter)
                late += 1
        return late, late == builder.rules.chunk
    return late, True
