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
from outfitter_service.core.state.ledger import DropHost, Ledger, PutAllocation, PutHost
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
        draft = DecisionBuilder(ledger, rules, now, cause="register", source=source)
        _register(draft, message, source, event.warnings)
    elif type(message) is Heartbeat:
        draft = DecisionBuilder(ledger, rules, now, cause="heartbeat")
        _heartbeat(draft, message)
    elif type(message) is Deregister:
        draft = DecisionBuilder(ledger, rules, now, cause="deregister", source=source)
        _deregister(draft, message, source)
    else:
        raise TypeError(f"no rule for a message of type {type(message).__name__}")
    _make_room(draft, message)
    return draft.decision


def _internal(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision:
    match event:
        case m.DriverReport():
            draft = DecisionBuilder(ledger, rules, now, cause="driver-report")
            discovery.report(draft, event)
        case m.DriverRetry():
            draft = DecisionBuilder(ledger, rules, now, cause="driver-retry")
            discovery.retry(draft, event)
        case m.OwnerDied(allocation=key, detail=detail):
            draft = DecisionBuilder(ledger, rules, now, cause="owner-died")
            _end_if_live(draft, key, ReasonCode.OWNER_DIED, detail)
        case m.OwnerUnwatched():
            draft = DecisionBuilder(ledger, rules, now, cause="owner-unwatched")
            _unwatched(draft, event)
        case m.LeaseExpired(allocation=key):
            draft = DecisionBuilder(ledger, rules, now, cause="lease-expired")
            _end_if_live(draft, key, ReasonCode.LEASE_EXPIRED, "no heartbeat within lease and grace")
        case m.Prepared():
            draft = DecisionBuilder(ledger, rules, now, cause="prepared")
            _prepared(draft, event)
        case m.Unprepared():
            draft = DecisionBuilder(ledger, rules, now, cause="unprepared")
            _unprepared(draft, event)
        case m.ReleaseDelayed():
            draft = DecisionBuilder(ledger, rules, now, cause="release-delayed")
            _release_delayed(draft, event)
        case m.Tick():
            draft = DecisionBuilder(ledger, rules, now, cause="tick")
            _tick(draft, event.host)
        case m.Reschedule():
            draft = DecisionBuilder(ledger, rules, now, cause=event.cause)
            draft.decision.kind = "reschedule"
            if discovery.lend_again(draft, event.host):
                draft.decision.follow_ups.append(event)
            elif queue.scan(draft, event.host, whole=event.whole):
                discovery.refresh_holders(draft, event.host)
        case _:
            raise TypeError(f"no rule for an event of type {type(event).__name__}")
    return draft.decision


def renumber(ledger: Ledger, rules: Rules, host: str) -> list[PutAllocation]:
    """Bring the queue positions that are shown up to date: no step, and nobody's decision."""
    changes: list[PutAllocation] = []
    book = ledger.hosts.get(host)
    for position, (_, _, key) in enumerate(book.queue if book is not None else (), start=1):
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


def _register(draft: DecisionBuilder, message: Register, source: Source, warnings: Sequence[str]) -> None:
    key = f"{message.host}/{message.worker}/{message.incarnation}"
    known = draft.record(key)
    if known is not None:
        _register_again(draft, key, known, message)
        return
    newest = draft.book(message.host).newest(message.worker)
    if newest is not None:
        _supersede(draft, newest, message.incarnation)  # as it did with those before itself
    resolved = resolve(draft.rules, message)
    wait_s = message.wait_s if message.wait_s is not None else draft.rules.wait_s
    record = Allocation(
        host=message.host,
        worker=message.worker,
        incarnation=message.incarnation,
        state=PENDING,
        request=resolved.request,
        since=draft.now,
        writer=draft.rules.writer,
        commit=0,
        source=source,
        unavailable=resolved.unavailable,
        warnings=list(warnings) or UNSET,
        wait_until=draft.now + timedelta(seconds=wait_s) if wait_s is not None else None,
    )
    if resolved.problem is not None:
        code, reason = resolved.problem
        draft.step(Step.FAIL, reason, record, new=True, reason=reason, reason_code=code, wait_until=None)
    elif queue.admit(draft, record).state not in FINAL_STATES:
        draft.decision.renewed.append(key)


def _make_room(draft: DecisionBuilder, message: Registration) -> None:
    """Forget those that ended first, where too many of a worker's runs, or of the host's records, are remembered."""
    if not draft.records:
        return
    book, rules = draft.book(message.host), draft.rules
    runs = len(book.incarnations.get(message.worker, ()))
    if runs < rules.max_incarnations and book.over < rules.max_over - FEWEST:
        return
    new = sum(key not in draft.ledger.allocations for key in draft.records)
    ended = sum(record.state in FINAL_STATES for record in draft.records.values())
    room = max(FEWEST, rules.chunk - len(draft.decision.changes))
    forgotten = _told(draft, book.past.get(message.worker, ()), min(runs + new - rules.max_incarnations, room))
    if ended:
        surplus = book.over + ended - len(forgotten) - rules.max_over
        forgotten += [key for key in _told(draft, book.endings, min(surplus, room)) if key not in forgotten]
    draft.forget(forgotten[:room])


def _told(draft: DecisionBuilder, endings: Sequence[Ending], most: int) -> list[str]:
    """The first `most` of those that are over, without those whose end is in no commit yet: nobody could read of it."""
    known, sealed = draft.ledger.allocations, draft.ledger.commits
    # those that ended just now are among the first where the clock was set back
    told = (key for _, key in endings if known[key].commit <= sealed and key not in draft.records)
    return list(islice(told, max(most, 0)))


def _register_again(draft: DecisionBuilder, key: str, known: Allocation, message: Register) -> None:
    """The same incarnation once more: its unchanged record is published again, and it lives if it is current."""
    decision = draft.decision
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
    elif known.state not in FINAL_STATES and _is_current(draft, key, known):
        decision.renewed.append(key)


def _is_current(draft: DecisionBuilder, key: str, record: Allocation) -> bool:
    """No newer incarnation has ever been seen, be it remembered or not."""
    newest = draft.book(record.host).newest(record.worker)
    return newest == key and record.reason_code != ReasonCode.SUPERSEDED


def _supersede(draft: DecisionBuilder, key: str, newer: str) -> None:
    """A newer incarnation registered: the older one can renew nothing more, but holds until it is known dead."""
    older = draft.ledger.allocations[key]
    reason = f"superseded by incarnation {newer}"
    if older.state == PENDING:
        draft.step(
            Step.WITHDRAW,
            reason,
            older,
            reason=reason,
            reason_code=ReasonCode.SUPERSEDED,
            queue_position=None,
            wait_until=None,
        )
        # whom it kept waiting is looked at once the newer one has its place in the queue
        queue.reschedule(draft, older.host)
    elif older.state in HOLDING_STATES:
        draft.decision.cut.append(key)
        if not discovery.lacks_successor(older):
            return
        if len(encode(older)) > draft.rules.max_bytes // 2:
            draft.again(older.host)  # beside it there may be no room for the newer one's record
        else:
            discovery.tell_of_successor(draft, older, newer)


def _unwatched(draft: DecisionBuilder, event: m.OwnerUnwatched) -> None:
    """Nobody would see the owner's end: the worker is told, and has a lease from now on if it asked for none."""
    record = draft.record(event.allocation)
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
    draft.step(Step.REFRESH, told, record, grows=False, request=request, unwatched=event.code)


def _heartbeat(draft: DecisionBuilder, message: Heartbeat) -> None:
    decision = draft.decision
    key = f"{message.host}/{message.worker}/{message.incarnation}"
    record = draft.record(key)
    if record is None:
        decision.refused = f"heartbeat from {key}, which is not registered here; register first"
    elif record.state in FINAL_STATES:
        decision.refused = f"heartbeat from {key}, which is over ({record.state}: {record.reason})"
    elif not _is_current(draft, key, record):
        decision.refused = f"heartbeat from {key}, an older incarnation of its worker: it renews nothing"
    else:
        decision.renewed.append(key)


def _deregister(draft: DecisionBuilder, message: Deregister, source: Source) -> None:
    decision = draft.decision
    key: str | None
    if message.incarnation is None:
        key = draft.book(message.host).newest(message.worker)
    else:
        key = f"{message.host}/{message.worker}/{message.incarnation}"
    record = draft.record(key) if key is not None else None
    text = f"deregistered: {reasons.shortened(message.reason)}" if message.reason else "deregistered"
    if record is None or (message.incarnation is None and record.source.offset == UNSEEN):
        _deregister_unseen(draft, message, source, text)
    elif record.state in FINAL_STATES:
        decision.kind = "late"
    else:
        code = ReasonCode.WITHDRAWN if record.state == PENDING else ReasonCode.DEREGISTERED
        _end(draft, record, code, text)


def _deregister_unseen(draft: DecisionBuilder, message: Deregister, source: Source, text: str) -> None:
    """Nobody is registered under that name. An incarnation that is named is remembered as ended, which is the answer:
    its registration may be late, and a registration after its own deregistration grants nothing."""
    if message.incarnation is None:
        draft.decision.refused = f"deregistration of {message.host}/{message.worker}, which is not registered here"
        return
    told = f"{text} before it was registered"
    draft.step(
        Step.END,
        told,
        Allocation(
            host=message.host,
            worker=message.worker,
            incarnation=message.incarnation,
            state=PENDING,
            request=ResolvedRequest(amounts={}),
            since=draft.now,
            writer=draft.rules.writer,
            commit=0,
            source=Source(partition=source.partition, offset=UNSEEN),
        ),
        new=True,
        reason=told,
        reason_code=ReasonCode.DEREGISTERED,
    )


# --- commands' ends ------------------------------------------------------------------------------------


def _prepared(draft: DecisionBuilder, event: m.Prepared) -> None:
    record = draft.record(event.allocation)
    if record is None or record.state != PREPARING or record.token != event.token:
        return
    if event.error is None:
        draft.step(Step.PREPARED, "prepared", record)
    else:
        _release(draft, record, ReasonCode.PREPARE_FAILED, event.error, outcome=FAILED)


def _unprepared(draft: DecisionBuilder, event: m.Unprepared) -> None:
    record = draft.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token:
        return
    step = Step.GIVE_UP if record.outcome == FAILED else Step.END
    told = "released" if event.confirmed else "released (unconfirmed: no in-use check)"
    draft.step(
        step,
        told,
        record,
        confirmed=event.confirmed,
        outcome=None,
        reason=_settled_reason(record),
        delayed_by=UNSET,
    )
    queue.schedule(draft, record.host)


def _release_delayed(draft: DecisionBuilder, event: m.ReleaseDelayed) -> None:
    """Say in the record what its devices wait for."""
    record = draft.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token or record.delayed_by == event.words:
        return
    why = _settled_reason(record)
    reason = f"{why}; {event.words}" if why else event.words
    draft.step(Step.REFRESH, event.words, record, reason=reason, delayed_by=event.words)


def _settled_reason(record: Allocation) -> str | None:
    """Why a record is being released, without what delays that."""
    if record.reason is None or record.delayed_by is UNSET:
        return record.reason
    return record.reason.removesuffix(record.delayed_by).removesuffix("; ") or None


# --- endings -------------------------------------------------------------------------------------------


def _end_if_live(draft: DecisionBuilder, key: str, code: ReasonCode, reason: str) -> None:
    record = draft.record(key)
    if record is not None and record.state not in FINAL_STATES:
        _end(draft, record, code, reason)


def _end(draft: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str) -> None:
    """Take a record towards `ended`, through `releasing` where a driver has to let go first."""
    state = record.state
    if state == RELEASING:
        draft.decision.kind = "repeated"
        return
    if state == PREPARING or (state == ALLOCATED and _lets_go(draft.rules, record)):
        _release(draft, record, code, reason, outcome=ENDED)
        return
    draft.step(
        Step.WITHDRAW if state == PENDING else Step.END,
        reason,
        record,
        confirmed=False if state == ALLOCATED and record.resources else None,
        reason=reason,
        reason_code=code,
        queue_position=None,
        wait_until=None,
    )
    if draft.book(record.host).queue:
        queue.schedule(draft, record.host)


def _release(
    draft: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, outcome: AllocationState
) -> None:
    draft.step(Step.RELEASE, reason, record, reason=reason, reason_code=code, outcome=outcome)
    draft.decision.commands.append(m.Unprepare(allocation=record.key, token=record.token or 0))


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
    book = ledger.hosts[host]
    over = now - timedelta(seconds=rules.retention_s)
    due = book.has_due(now=now, over_before=over, max_over=rules.max_over)
    return due or (rules.forgets_hosts and book.is_idle(since=over))


def _tick(draft: DecisionBuilder, host: str) -> None:
    """Give up for those who waited too long, and forget those who are over for long."""
    book = draft.book(host)
    rules = draft.rules
    late, full = _give_up_late(draft, book)
    if late:
        queue.reschedule(draft, host)
    if book.scan_from is not None:
        draft.again(host)
    if book.is_ahead(draft.now):
        _set_back(draft, host)
        return
    over_before = draft.now - timedelta(seconds=rules.retention_s)
    if rules.forgets_hosts and book.is_idle(since=over_before):
        draft.decision.changes.append(DropHost(host))
        return
    room = rules.chunk - late
    surplus = max(book.over - rules.max_over, bisect_left(book.endings, (over_before, "")))
    forgotten = _told(draft, book.endings, min(surplus, room))
    left = draft.forget(forgotten)
    if full or left or (forgotten and surplus > room):
        draft.decision.follow_ups.append(m.Tick(host=host))


def _set_back(draft: DecisionBuilder, host: str) -> None:
    """The clock was ahead when some records were written: what is counted from then is counted from now."""
    book, now = draft.book(host), draft.now
    if book.record is not None and book.record.since > now:
        draft.decision.changes.append(PutHost(structs.replace(book.record, since=now)))
    for key in book.ahead(now, draft.rules.chunk - len(draft.decision.changes)):
        record = draft.record(key)
        if record is None or record.since <= now:
            continue  # it was given up for in this decision
        until = record.wait_until
        if until is not None:
            until = now + max(until - record.since, timedelta())
        try:
            draft.step(Step.REFRESH, "the clock was set back", record, grows=False, since=now, wait_until=until)
        except FullError:
            break
    draft.decision.follow_ups.append(m.Tick(host=host))


def _give_up_late(draft: DecisionBuilder, book: HostState) -> tuple[int, bool]:
    """Give up for those who waited too long: for how many, and whether that is as much as one decision may be."""
    late = 0
    with suppress(FullError):
        for at, key in islice(book.deadlines, draft.rules.chunk):
            if at > draft.now:
                return late, False
            waiter = draft.ledger.allocations[key]
            if queue.is_told(waiter):
                queue.give_up(draft, waiter)
                late += 1
        return late, late == draft.rules.chunk
    return late, True
