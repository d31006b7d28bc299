"""The rules by which allocations end.

A message, a death or time ends an allocation. A driver may first take its devices back. The final record is deleted
after its retention.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice

from msgspec import UNSET, structs

from outfitter_proto.keys import AllocationKey, host_key
from outfitter_proto.records import FINAL_STATES, NO_TOKEN, Allocation, AllocationState, ReasonCode
from outfitter_service.core import delays, discovery, orders, queue
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder, Rules
from outfitter_service.core.state.host_state import Ending, HostState
from outfitter_service.core.state.ledger import DropRecord, Ledger
from outfitter_service.core.state.sizes import FullError
from outfitter_service.core.states import ALLOCATED, ENDED, FAILED, PENDING, PREPARING, RELEASING, Step

LOOKED_AT = 8
"""How many final records a decision looks at that it may not delete yet. In a flood there are thousands of them."""

_ENDS_WAIT = (ReasonCode.DEREGISTERED, ReasonCode.OWNER_DIED)
"""What ends the wait for processes that a manager does not see. It knows the death of an owner there by one thing only:
the end of the owner's boot, with which all processes have ended."""


def end_if_live(builder: DecisionBuilder, key: AllocationKey, code: ReasonCode, reason: str) -> None:
    """End the record under `key`, unless it is gone or final."""
    record = builder.record(key)
    if record is not None and record.state not in FINAL_STATES:
        end(builder, record, code, reason)


def end(builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str) -> None:
    """End a record, through `releasing` where a driver must take the devices back first."""
    state = record.state
    if state == RELEASING:
        if code in _ENDS_WAIT and delays.is_out_of_sight(record, builder.rules.sees):
            _end_wait(builder, record, reason)
        else:
            builder.set_kind("repeated")
        return
    if state == PREPARING or (state == ALLOCATED and needs_unprepare(builder.rules, record)):
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
    if builder.host_state(record.host).waiters.queue:
        queue.schedule(builder, record.host)


def _end_wait(builder: DecisionBuilder, record: Allocation, reason: str) -> None:
    """Go on with a release that waits for processes that nobody here sees."""
    builder.step(
        Step.REFRESH,
        f"the devices wait no longer for processes that this manager does not see: {reason}",
        record,
        grows=False,
        reason=_release_reason(record),
        delayed_by="",
    )
    builder.command(m.Unprepare(allocation=record.key, token=record.token or NO_TOKEN))


def _release(
    builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, outcome: AllocationState
) -> None:
    builder.step(Step.RELEASE, reason, record, reason=reason, reason_code=code, outcome=outcome)
    builder.command(m.Unprepare(allocation=record.key, token=record.token or NO_TOKEN))


def needs_unprepare(rules: Rules, record: Allocation) -> bool:
    """Whether a driver must take back some of the record's devices, by the configuration of now or of the grant, or the
    worker's survivors keep them."""
    if record.prepared or (record.request.survivors and record.request.owner is not None and record.resources):
        return True
    for resource in record.resources:
        spec = rules.specs.get(resource)
        if resource not in record.shared and spec is not None and (spec.confirms or spec.prepares):
            return True
    return False


def prepared(builder: DecisionBuilder, event: m.Prepared) -> None:
    """A driver has prepared the devices, or failed to: keep the grant, or release its devices."""
    record = builder.record(event.allocation)
    if record is None or record.state != PREPARING or record.token != event.token:
        return
    if event.error is None:
        builder.step(Step.PREPARED, "prepared", record)
    else:
        _release(builder, record, ReasonCode.PREPARE_FAILED, event.error, outcome=FAILED)


def unprepared(builder: DecisionBuilder, event: m.Unprepared) -> None:
    """The drivers have taken the devices back, and no survivor has them: make the record final and the devices free."""
    record = builder.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token:
        return
    step = Step.GIVE_UP if record.outcome == FAILED else Step.END
    explanation = "released" if event.confirmed else f"released (unconfirmed: {event.untold or 'no in-use check'})"
    builder.step(
        step,
        f"{explanation}; {event.survivors}" if event.survivors else explanation,
        record,
        confirmed=event.confirmed,
        outcome=None,
        reason=_release_reason(record),
        delayed_by=UNSET,
    )
    queue.schedule(builder, record.host)


def release_delayed(builder: DecisionBuilder, event: m.ReleaseDelayed) -> None:
    """Say in the record what delays the release."""
    record = builder.record(event.allocation)
    if record is None or record.state != RELEASING or record.token != event.token or record.delayed_by == event.reason:
        return
    if not builder.rules.news:
        return  # whoever reports the delay reports it again
    why = _release_reason(record)
    reason = f"{why}; {event.reason}" if why else event.reason
    builder.step(Step.REFRESH, event.reason, record, grows=False, reason=reason, delayed_by=event.reason)


def _release_reason(record: Allocation) -> str | None:
    """Why a record is being released, without the reason of its delay."""
    if record.reason is None or record.delayed_by is UNSET:
        return record.reason
    return record.reason.removesuffix(record.delayed_by).removesuffix("; ") or None


def is_due(ledger: Ledger, rules: Rules, host: str, now: datetime) -> bool:
    """Whether a tick of `host` would change anything."""
    host_state = ledger.hosts[host]
    over_before = now - timedelta(seconds=rules.retention_s)
    due = host_state.has_due(now=now, over_before=over_before, max_final=rules.max_final)
    return due or (rules.forgets_hosts and host_state.is_idle(since=over_before))


def tick(builder: DecisionBuilder, event: m.Tick) -> None:
    """Time has passed: end orders whose time is over, lend devices that have been well for long enough, fail the
    waiters whose `wait_s` is over, and delete final records after their retention."""
    host, rules = event.host, builder.rules
    host_state = builder.host_state(host)
    if host_state.has_ended_cordon(builder.now):
        orders.end_due(builder, host_state)
        builder.follow_up(event)
        return
    if host_state.has_recovered(builder.now):
        discovery.recover(builder, host_state)
        builder.follow_up(event)
        return
    late, full = _give_up_late(builder, host_state)
    if late:
        queue.reschedule(builder, host)
    if host_state.waiters.scan_from is not None:
        builder.reschedule(host)
    if host_state.is_ahead(builder.now):
        _correct_clock(builder, host)
        return
    over_before = builder.now - timedelta(seconds=rules.retention_s)
    if rules.forgets_hosts and host_state.is_idle(since=over_before):
        builder.change(DropRecord(host_key(host)))
        return
    room = rules.chunk - late
    surplus = max(
        host_state.runs.final_count - rules.max_final, bisect_left(host_state.runs.endings, (over_before, ""))
    )
    forgotten = forgettable(builder, host_state.runs.endings, min(surplus, room))
    left_over = builder.forget(forgotten)
    if full or left_over or (forgotten and surplus > room):
        builder.follow_up(m.Tick(host=host))


def _correct_clock(builder: DecisionBuilder, host: str) -> None:
    """The clock was ahead when some records were written: count their times from now."""
    host_state, now = builder.host_state(host), builder.now
    with suppress(FullError):
        if host_state.record is not None and host_state.record.since > now:
            builder.put_record(structs.replace(host_state.record, since=now))
            discovery.recover(builder, host_state)
        for key in host_state.from_future(now, builder.rules.chunk - len(builder.decision.changes)):
            record = builder.record(key)
            if record is None or record.since <= now:
                continue  # this decision has failed it already
            until = record.wait_until
            if until is not None:
                until = now + max(until - record.since, timedelta())
            builder.step(Step.REFRESH, "the clock was set back", record, grows=False, since=now, wait_until=until)
    builder.follow_up(m.Tick(host=host))


def _give_up_late(builder: DecisionBuilder, host_state: HostState) -> tuple[int, bool]:
    """Fail the waiters whose `wait_s` is over. Returns how many, and whether the decision is full."""
    late = 0
    with suppress(FullError):
        for at, key in islice(host_state.waiters.deadlines, builder.rules.chunk):
            if at > builder.now:
                return late, False
            waiter = builder.ledger.allocations[key]
            if queue.is_answered(waiter):
                queue.give_up(builder, waiter)
                late += 1
        return late, late == builder.rules.chunk
    return late, True


def forgettable(builder: DecisionBuilder, endings: Sequence[Ending], most: int) -> list[AllocationKey]:
    """The first `most` final records whose end is in a commit: before that, nobody can have read it."""
    if most <= 0:
        return []
    allocations, last_begun = builder.ledger.allocations, builder.ledger.commits
    keys: list[AllocationKey] = []
    kept = 0
    for _, key in endings:
        if allocations[key].commit <= last_begun and key not in builder.records:
            keys.append(key)
            if len(keys) == most:
                break
            continue
        # where the clock was set back, records that ended just now are among the first; the others wait for the next
        # commit
        kept += 1
        if kept == LOOKED_AT:
            break
    return keys
