"""The rules: `decide` takes one event and says what changes, what is told, and what is to be done.

Pure and synchronous: it reads the ledger, the rules and the time it is given, and changes none of them. The
caller applies `Decision.changes`, or the plain grant that it was told instead, commits, and only then acts on
`Decision.commands`. The same ledger and the same events give the same decisions.

One event's output is bounded by `Rules.chunk`; what is left is asked for by an event in `Decision.follow_ups`,
and each piece keeps the promises, whatever is decided between the pieces.
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
"""Queue positions are kept exact for this many waiters of a host; further back they are as of some time ago."""

FEWEST = 2
"""Records that a message may have forgotten, however small `Rules.chunk` is: it adds fewer than that to what is over
for good, so that no flood of messages outruns this."""

UNSEEN = -1
"""The offset of a first registration that has not been seen: its deregistration came before it."""


def decide(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision | fast_path.FastGrant:
    """Decide one event. `now` is the wall time (UTC). A plain grant is told as such."""
    if type(event) is not m.Incoming:
        return _internal(ledger, rules, event, now)
    return fast_path.grant(ledger, rules, event, now) or decide_in_full(ledger, rules, event, now)


def decide_in_full(ledger: Ledger, rules: Rules, event: m.Incoming, now: datetime) -> Decision:
    """Decide a message step by step: what `decide` comes to, which knows a short way for most of them."""
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
            if discovery.lend_again(builder, event.host):
                builder.decision.follow_ups.append(event)
            elif queue.scan(builder, event.host, whole=event.whole):
                discovery.refresh_holders(builder, event.host)
        case _:
            raise TypeError(f"no rule for an event of type {type(event).__name__}")
    return builder.decision


def renumber(ledger: Ledger, rules: Rules, host: str) -> list[PutAllocation]:
    """Bring the queue positions that are shown up to date: no step, and nobody's decision."""
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
    """The command that a record implies: issued again after a restart."""
    if record.state == PREPARING:
        return m.Prepare(allocation=record.key, token=record.token or 0)
    if record.state == RELEASING:
        return m.Unprepare(allocation=record.key, token=record.token or 0)
    return None


# --- messages ------------------------------------------------------------------------------------------


def _register(builder: DecisionBuilder, message: Register, source: Source, warnings: Sequence[str]) -> None:
    key = allocation_key(message.host, message.worker, message.incarnation)
    known = builder.record(key)
    if known is not None:
        _register_again(builder, key, known, message)
        return
    newest = builder.host_state(message.host).newest(message.worker)
    if newest is not None:
        _supersede(builder, newest, message.incarnation)  # as it did with those before itself
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
    """Forget those that ended first, where too many of a worker's runs, or of the host's records, are remembered."""
    if not builder.records:
        return
    host_state, rules = builder.host_state(message.host), builder.rules
    runs = len(host_state.incarnations.get(message.worker, ()))
    if runs < rules.max_incarnations and host_state.over < rules.max_over - FEWEST:
        return
    new = sum(key not in builder.ledger.allocations for key in builder.records)
    ended = sum(record.state in FINAL_STATES for record in builder.records.values())
    room = max(FEWEST, rules.chunk - len(builder.decision.changes))
    forgotten = _told(builder, host_state.past.get(message.worker, ()), min(runs + new - rules.max_incarnations, room))
    if ended:
        surplus = host_state.over + ended - len(forgotten) - rules.max_over
        forgotten += [key for key in _told(builder, host_state.endings, min(surplus, room)) if key not in forgotten]
    builder.forget(forgotten[:room])


def _told(builder: DecisionBuilder, endings: Sequence[Ending], most: int) -> list[str]:
    """The first `most` of those that are over, without those whose end is in no commit yet: nobody could read of it."""
    known, sealed = builder.ledger.allocations, builder.ledger.commits
    # those that ended just now are among the first where the clock was set back
    told = (key for _, key in endings if known[key].commit <= sealed and key not in builder.records)
    return list(islice(told, max(most, 0)))


def _register_again(builder: DecisionBuilder, key: str, known: Allocation, message: Register) -> None:
    """The same incarnation once more: its unchanged record is published again, and it lives if it is current."""
    decision = builder.decision
    decision.changes.append(PutAllocation(key, known))
    if known.state == ENDED:
        decision.kind = "late"
        return
    decision.kind = "repeated"
    different = differences(known, message)
    if different:
        decision.refused = (
            f"incarnation {message.incarnation!r} of worker {message.worker!r} registered before with other "
            f"{', '.join(different)}; its grant is unchanged. Deregister first, or register under a new incarnation"
        )
    elif known.state not in FINAL_STATES and _is_current(builder, key, known):
        decision.renewed.append(key)


def _is_current(builder: DecisionBuilder, key: str, record: Allocation) -> bool:
    """No newer incarnation has ever been seen, be it remembered or not."""
    newest = builder.host_state(record.host).newest(record.worker)
    return newest == key and record.reason_code != ReasonCode.SUPERSEDED


def _supersede(builder: DecisionBuilder, key: str, newer: str) -> None:
    """A newer incarnation registered: the older one can renew nothing more, but holds until it is known dead."""
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
        # whom it kept waiting is looked at once the newer one has its place in the queue
        queue.reschedule(builder, older.host)
    elif older.state in HOLDING_STATES:
        builder.decision.cut.append(key)
        if not discovery.lacks_successor(older):
            return
        if len(encode(older)) > builder.rules.max_bytes // 2:
            builder.reschedule(older.host)  # beside it there may be no room for the newer one's record
        else:
            discovery.tell_of_successor(builder, older, newer)


def _unwatched(builder: DecisionBuilder, event: m.OwnerUnwatched) -> None:
    """Nobody would see the owner's end: the worker is told, and has a lease from now on if it asked for none."""
    record = builder.record(event.allocation)
    if record is None or record.state in FINAL_STATES or record.state == RELEASING:
        return
    if record.reason_code == ReasonCode.SUPERSEDED:
        return  # it has a last lease already, and no heartbeat renews it
    request, told = record.request, f"its owner process is not watched: {event.reason}"
    if request.lease_s is None:
        request = structs.replace(request, lease_s=event.lease_s)
        told = f"{told}; a lease of {event.lease_s:g} s decides instead"
    elif record.unwatched == event.code:
        return
    builder.step(Step.REFRESH, told, record, grows=False, request=request, unwatched=event.code)


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
    """Nobody is registered under that name. An incarnation that is named is remembered as ended, which is the answer:
    its registration may be late, and a registration after its own deregistration grants nothing."""
    if message.incarnation is None:
        builder.decision.refused = f"deregistration of {message.host}/{message.worker}, which is not registered here"
        return
    told = f"{text} before it was registered"
    builder.step(
        Step.END,
        told,
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
        reason=told,
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
    told = "released" if event.confirmed else "released (unconfirmed: no in-use check)"
    builder.step(
        step,
        told,
        record,
        confirmed=event.confirmed,
        outcome=None,
        reason=_settled_reason(record),
        delayed_by=UNSET,
    )
    queue.schedule(builder, record.host)


def _release_delayed(builder: DecisionBuilder, event: m.ReleaseDelayed) -> None:
    """Say in the record what its devices wait for."""
    record = builder.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token or record.delayed_by == event.words:
        return
    why = _settled_reason(record)
    reason = f"{why}; {event.words}" if why else event.words
    builder.step(Step.REFRESH, event.words, record, reason=reason, delayed_by=event.words)


def _settled_reason(record: Allocation) -> str | None:
    """Why a record is being released, without what delays that."""
    if record.reason is None or record.delayed_by is UNSET:
        return record.reason
    return record.reason.removesuffix(record.delayed_by).removesuffix("; ") or None


# --- endings -------------------------------------------------------------------------------------------


def _end_if_live(builder: DecisionBuilder, key: str, code: ReasonCode, reason: str) -> None:
    record = builder.record(key)
    if record is not None and record.state not in FINAL_STATES:
        _end(builder, record, code, reason)


def _end(builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str) -> None:
    """Take a record towards `ended`, through `releasing` where a driver has to let go first."""
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
    """A driver of the record's resources has a say before its devices are lent again: as things are configured
    now, or as they were when they were granted."""
    if record.prepared:
        return True
    for resource in record.resources:
        spec = rules.specs.get(resource)
        if spec is not None and (spec.confirms or spec.prepares):
            return True
    return False


# --- time ----------------------------------------------------------------------------------------------


def is_due(ledger: Ledger, rules: Rules, host: str, now: datetime) -> bool:
    """Whether a tick of `host` would come to anything."""
    host_state = ledger.hosts[host]
    over = now - timedelta(seconds=rules.retention_s)
    due = host_state.has_due(now=now, over_before=over, max_over=rules.max_over)
    return due or (rules.forgets_hosts and host_state.is_idle(since=over))


def _tick(builder: DecisionBuilder, host: str) -> None:
    """Give up for those who waited too long, and forget those who are over for long."""
    host_state = builder.host_state(host)
    rules = builder.rules
    late, full = _give_up_late(builder, host_state)
    if late:
        queue.reschedule(builder, host)
    if host_state.scan_from is not None:
        builder.reschedule(host)
    if host_state.is_ahead(builder.now):
        _set_back(builder, host)
        return
    over_before = builder.now - timedelta(seconds=rules.retention_s)
    if rules.forgets_hosts and host_state.is_idle(since=over_before):
        builder.decision.changes.append(DropRecord(host_key(host)))
        return
    room = rules.chunk - late
    surplus = max(host_state.over - rules.max_over, bisect_left(host_state.endings, (over_before, "")))
    forgotten = _told(builder, host_state.endings, min(surplus, room))
    left = builder.forget(forgotten)
    if full or left or (forgotten and surplus > room):
        builder.decision.follow_ups.append(m.Tick(host=host))


def _set_back(builder: DecisionBuilder, host: str) -> None:
    """The clock was ahead when some records were written: what is counted from then is counted from now."""
    host_state, now = builder.host_state(host), builder.now
    if host_state.record is not None and host_state.record.since > now:
        builder.decision.changes.append(PutRecord(structs.replace(host_state.record, since=now)))
    for key in host_state.ahead(now, builder.rules.chunk - len(builder.decision.changes)):
        record = builder.record(key)
        if record is None or record.since <= now:
            continue  # it was given up for in this decision
        until = record.wait_until
        if until is not None:
            until = now + max(until - record.since, timedelta())
        try:
            builder.step(Step.REFRESH, "the clock was set back", record, grows=False, since=now, wait_until=until)
        except FullError:
            break
    builder.decision.follow_ups.append(m.Tick(host=host))


def _give_up_late(builder: DecisionBuilder, host_state: HostState) -> tuple[int, bool]:
    """Give up for those who waited too long: for how many, and whether that is as much as one decision may be."""
    late = 0
    with suppress(FullError):
        for at, key in islice(host_state.deadlines, builder.rules.chunk):
            if at > builder.now:
                return late, False
            waiter = builder.ledger.allocations[key]
            if queue.is_told(waiter):
                queue.give_up(builder, waiter)
                late += 1
        return late, late == builder.rules.chunk
    return late, True
