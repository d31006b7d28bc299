"""The queue: who is granted, who waits and why, in the order of priority and first registration.

Nobody is granted anything while an earlier worker that could be served with what there is on the host wants
any of the same resources. Those who can never be served, and those whose drivers have not reported, block
nobody. Feasibility is looked at anew each time, never remembered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from heapq import heapify, heappop, heappush

from msgspec import UNSET, structs

from outfitter_proto.records import Allocation, ReasonCode, Unavailable
from outfitter_service.core import discovery, explain, policy
from outfitter_service.core import model as m
from outfitter_service.core.book import QueueEntry, Shape, queue_entry
from outfitter_service.core.draft import Draft
from outfitter_service.core.states import PENDING, Step
from outfitter_service.core.terms import terms
from outfitter_service.core.view import View


def admit(draft: Draft, record: Allocation) -> Allocation:
    """Place a new worker, behind those it has to wait for; the record it gets."""
    view = draft.view(record.host)
    discovery.ask_anew(draft, view, record)
    claimed = _claims_before(draft, view, record) if view.book.queue else ()
    record, obstacle = _attempt(draft, view, record, claimed, new=True)
    if obstacle is None:
        return record
    if len(view.book.queue) >= draft.rules.max_waiting:
        told = f"{draft.rules.max_waiting} workers of this host wait already, and no more are let in"
        code = ReasonCode.TOO_MANY_WAITING
        return draft.step(Step.FAIL, told, record, new=True, reason=told, reason_code=code, wait_until=None)
    position = bisect_left(view.book.queue, queue_entry(record)) + 1
    return draft.step(
        Step.REGISTER,
        obstacle.reason,
        record,
        new=True,
        reason=obstacle.reason,
        reason_code=obstacle.code,
        queue_position=position,
    )


def schedule(draft: Draft, host: str, *, whole: bool = False) -> None:
    """Go through a host's queue and grant what can be granted.

    The first of each shape speaks for all of it: where it waits, those behind it that want the same wait, too.
    `whole`: something is known of the devices, so tell everybody why they wait, not only the first ones.
    """
    view = draft.view(host)
    heads: list[tuple[QueueEntry, int, Shape]] = [(alike[0], 0, shape) for shape, alike in view.book.shapes.items()]
    heapify(heads)
    claimed: set[str] = set()
    before = len(draft.decision.changes)
    while heads:
        if len(draft.decision.changes) - before >= draft.rules.chunk:
            draft.again(host)
            return
        (_, _, key), at, shape = heappop(heads)
        alike = view.book.shapes[shape]
        known = draft.record(key)
        if known is not None and known.state == PENDING:
            if known.wait_until is not None and known.wait_until <= draft.now:
                give_up(draft, known)
            else:
                record, obstacle = _attempt(draft, draft.view(host), known, claimed)
                if obstacle is not None:
                    if obstacle.code == ReasonCode.BUSY:
                        claimed |= _exclusive(draft, record.request.amounts)
                    _tell(draft, view, record, obstacle, changed=record is not known)
                    if record is known:
                        if whole and not _tell_others(draft, view, alike[at + 1 :], obstacle, before):
                            draft.again(host)
                            return
                        continue
        if at + 1 < len(alike):
            heappush(heads, (alike[at + 1], at + 1, shape))


def _tell(draft: Draft, view: View, record: Allocation, obstacle: policy.Obstacle, *, changed: bool = False) -> None:
    """Keep the record's reason up to date; that a driver is being asked is no news to one who waits already."""
    told = record.reason_code is not None and view.inventory(obstacle.resource).asking
    news = not told and (obstacle.code != record.reason_code or obstacle.reason != record.reason)
    if news or changed:
        draft.step(Step.REFRESH, obstacle.reason, record, reason=obstacle.reason, reason_code=obstacle.code)


def _tell_others(draft: Draft, view: View, entries: list[QueueEntry], obstacle: policy.Obstacle, before: int) -> bool:
    """Tell those who wait behind the first of their shape; False when it got too much for one decision."""
    for _, _, key in entries:
        record = draft.record(key)
        if record is not None and record.state == PENDING:
            if len(draft.decision.changes) - before >= draft.rules.chunk:
                return False
            _tell(draft, view, record, obstacle)
    return True


def _claims_before(draft: Draft, view: View, record: Allocation) -> set[str]:
    """The exclusive resources that feasible waiters before `record` want."""
    own = queue_entry(record)
    wanted = set(record.request.amounts)
    claimed: set[str] = set()
    for shape, alike in view.book.shapes.items():
        if wanted.isdisjoint(name for name, _ in shape):
            continue
        for entry in alike:
            if entry >= own:
                break
            waiter = draft.records.get(entry[2])
            if waiter is None or waiter.state == PENDING:
                amounts = dict(shape) if waiter is None else waiter.request.amounts
                if policy.hindrance(view, draft.rules.specs, amounts) is None:
                    claimed |= _exclusive(draft, amounts)
                if waiter is None:
                    break
    return claimed


def _exclusive(draft: Draft, resources: Collection[str]) -> set[str]:
    specs = draft.rules.specs
    return {name for name in resources if (spec := specs.get(name)) is not None and not spec.shared}


def _attempt(
    draft: Draft, view: View, record: Allocation, claimed: Collection[str], *, new: bool = False
) -> tuple[Allocation, policy.Obstacle | None]:
    """Grant a worker what it wants, or fail it. If it has to wait: its record as it is then, and the obstacle."""
    while True:
        outcome = policy.place(view, draft.rules.specs, record.request.amounts, claimed)
        if isinstance(outcome, dict):
            if view.without >= draft.rules.max_live and not _exclusive(draft, outcome):
                told = explain.too_many_live(draft.rules.max_live)
                return _fail(draft, record, ReasonCode.TOO_MANY_LIVE, told, new=new), None
            return _grant(draft, record, outcome, new=new), None
        if not outcome.final:
            discovery.ask_for_more(draft, view, record)
            return record, outcome
        spec = draft.rules.specs.get(outcome.resource)
        if spec is None or spec.on_failure != m.OnFailure.NO_INFO:
            return _fail(draft, record, outcome.code, outcome.reason, new=new), None
        record = _without(record, outcome)


def _without(record: Allocation, obstacle: policy.Obstacle) -> Allocation:
    """Flink's way (`on-failure = no-info`): go on without the resource that failed."""
    amounts = {name: amount for name, amount in record.request.amounts.items() if name != obstacle.resource}
    missing = Unavailable(code=obstacle.code, reason=obstacle.reason)
    return structs.replace(
        record,
        request=structs.replace(record.request, amounts=amounts),
        unavailable={**record.unavailable, obstacle.resource: missing},
    )


def _grant(draft: Draft, record: Allocation, devices: policy.Devices, *, new: bool) -> Allocation:
    specs = draft.rules.specs
    draft.token += 1
    told = terms(devices, draft.book(record.host).classes)
    shared: list[str] = []
    prepared: list[str] = []
    prepares = False
    for resource in devices:
        spec = specs[resource]
        prepares = prepares or spec.prepares
        if spec.prepares or spec.confirms:
            prepared.append(resource)
        if spec.shared:
            shared.append(resource)
    granted = draft.step(
        Step.PREPARE if prepares else Step.GRANT,
        "granted" if devices else "granted: nothing was asked for",
        structs.replace(
            record,
            token=draft.token,
            resources=told.infos,
            operators=policy.shares(record.request, devices, shared) if record.request.operators else m.NO_ITEMS,
            env=told.env,
            cdi=told.cdi,
            shared=shared or m.NO_NAMES,
            prepared=prepared or UNSET,
            aliases=told.aliases,
            reason=None,
            reason_code=None,
            queue_position=None,
            wait_until=None,
        ),
        new=new,
    )
    if prepares:
        draft.decision.commands.append(m.Prepare(allocation=granted.key, token=draft.token))
    return granted


def _fail(draft: Draft, record: Allocation, code: ReasonCode, reason: str, *, new: bool = False) -> Allocation:
    return draft.step(
        Step.FAIL, reason, record, new=new, reason=reason, reason_code=code, queue_position=None, wait_until=None
    )


def give_up(draft: Draft, record: Allocation) -> None:
    """A pending record's `wait_s` is over."""
    _fail(draft, record, ReasonCode.WAITED_TOO_LONG, explain.too_long(record.request.wait_s, record.reason))
