"""The queue: who is granted, who waits and why, in the order of priority and first registration.

Nobody is granted a device that could serve an earlier worker which waits and could be served with what there is on
the host. Those who can never be served, and those whose drivers have not answered, block nobody.

What each waiter was told last is remembered (`HostState.claims`), and holds until a driver says something else: then
all
are looked at anew, some in each decision, and until somebody has been, nobody behind is granted what may be theirs.
So no decision takes longer the more workers wait, or the more different things they want.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence, Set
from heapq import heapify, heappop, heappush

from msgspec import UNSET, structs

from outfitter_proto.records import Allocation, ReasonCode, Unavailable
from outfitter_service.core import discovery, reasons
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.placement import policy
from outfitter_service.core.request_check import excess
from outfitter_service.core.state import sizes
from outfitter_service.core.state.host_state import HostState, QueueEntry, queue_entry
from outfitter_service.core.state.infos import grant_infos
from outfitter_service.core.state.ledger import SetScan
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import FullError, OversizeError
from outfitter_service.core.states import PENDING, Step

NOTHING: frozenset[str] = frozenset()
LOOKS = 2
"""How many waiters one decision looks at for each that it may change."""


def admit(draft: DecisionBuilder, record: Allocation) -> Allocation:
    """Place a new worker, behind those it has to wait for; the record it gets."""
    view = draft.view(record.host)
    discovery.ask_anew(draft, view, record)
    claimed, unsure = _claimed_before(draft, view.book, record) if view.book.queue else (NOTHING, NOTHING)
    record, obstacle = _attempt(draft, view, record, claimed | unsure, new=True)
    if obstacle is None:
        return record
    if obstacle.reason == reasons.NEXT_COMMIT:
        _look_from(draft, view.book, queue_entry(record))
    elif obstacle.code == ReasonCode.BUSY and not unsure <= claimed:
        obstacle = structs.replace(obstacle, reason=reasons.NEXT_LOOK)
    if len(view.book.queue) >= draft.rules.max_waiting:
        told = f"{draft.rules.max_waiting} workers of this host wait already, and no more are let in"
        code = ReasonCode.TOO_MANY_WAITING
        return draft.step(Step.FAIL, told, record, new=True, reason=told, reason_code=code, wait_until=None)
    position = bisect_left(view.book.queue, queue_entry(record)) + 1
    try:
        return draft.step(
            Step.REGISTER,
            obstacle.reason,
            record,
            new=True,
            reason=obstacle.reason,
            reason_code=obstacle.code,
            queue_position=position,
        )
    except OversizeError as error:
        return _fail_oversize(draft, record, error, new=True)


def schedule(draft: DecisionBuilder, host: str) -> None:
    """Devices or places in the queue have come free: grant what can be granted now.

    Only the first of those who wait for a resource that is busy can be: the others have to leave it to that one, and
    those who wait for something else are not concerned. So it makes no difference how many wait, nor for how much.
    """
    book = draft.view(host).book
    round_ = _Round(draft, host)
    is_done = round_.look_at_first(book, until=book.scan_from)
    if _look_at_sharers(draft, book) or round_.lacking or not is_done:
        draft.again(host)


def reschedule(draft: DecisionBuilder, host: str) -> None:
    """As `schedule`, but leave it to a decision of its own."""
    _look_at_sharers(draft, draft.book(host))
    draft.again(host)


def _look_at_sharers(draft: DecisionBuilder, book: HostState) -> bool:
    """Have those looked at who wait for shared resources that show devices which others may have alone, if there are
    any: sharers are in no sharer's way, so that not only the first of them may be served."""
    first = _first_sharer(draft, book)
    return first is not None and _look_from(draft, book, first)


def _look_from(draft: DecisionBuilder, book: HostState, start: QueueEntry) -> bool:
    """Have those looked at anew who wait from `start` on, if they are not to be looked at already."""
    scans = [change.start for change in draft.decision.changes if type(change) is SetScan]
    before = scans[-1] if scans else book.scan_from
    if before is not None and before <= start:
        return False
    draft.decision.changes.append(SetScan(book.host, start))
    return True


def _first_sharer(draft: DecisionBuilder, book: HostState) -> QueueEntry | None:
    specs = draft.rules.specs
    shared = [name for name in book.overlapping if name in book.claims and name in specs and specs[name].shared]
    return min((book.claims[name][0] for name in shared), default=None)


def scan(draft: DecisionBuilder, host: str, *, whole: bool) -> bool:
    """Look anew at those who have not been looked at since something was said that may concern them (`whole`: at
    everybody), and tell them why they wait; False: some are left, for another decision."""
    book = draft.view(host).book
    start = book.queue[0] if whole and book.queue else book.scan_from
    round_ = _Round(draft, host)
    if not round_.look_at_first(book, until=start):
        if whole:
            draft.decision.changes.append(SetScan(host, start))
        draft.again(host)
        return False
    if round_.has_moved and (first := _first_sharer(draft, book)) is not None:
        start = first if start is None else min(start, first)
    left = None
    if start is not None:
        first_place = bisect_left(book.queue, start)
        for place in range(first_place, len(book.queue)):
            if round_.is_long or place - first_place >= LOOKS * draft.rules.chunk:
                left = book.queue[place]
                draft.again(host)
                break
            if not round_.look(book.queue[place][2]):
                left = book.queue[place]
                draft.again(host)
                break
    if left != book.scan_from:
        draft.decision.changes.append(SetScan(host, left))
    if left is None:
        round_.ask(book)
    return left is None


class _Round:
    """One decision's way through a host's queue, in order: `claimed` is what those want that have to go on waiting,
    `has_moved` whether anybody waits no longer, and `lacking` are those for whom on-demand drivers are to be asked."""

    def __init__(self, draft: DecisionBuilder, host: str) -> None:
        self.claimed: set[str] = set()
        self.has_moved = False
        self.lacking: list[QueueEntry] = []
        self._draft = draft
        self._host = host
        self._most_changes = len(draft.decision.changes) + draft.rules.chunk
        self._alike: dict[tuple[tuple[str, int], ...], policy.Infeasibility] = {}

    @property
    def is_long(self) -> bool:
        """Whether what is left to change is left to another decision."""
        return len(self._draft.decision.changes) >= self._most_changes

    def look_at_first(self, book: HostState, *, until: QueueEntry | None) -> bool:
        """Look at who is first for any resource that is busy, as long as that one is granted at the next; those from
        `until` on are left out. False: some are left, for another decision."""
        heads = [(entries[0], resource, 0) for resource, entries in book.claims.items()]
        heapify(heads)
        last = None
        while heads:
            entry, resource, place = heappop(heads)
            if until is not None and entry >= until:
                break
            if entry != last:
                if self.is_long or not self.look(entry[2]):
                    return False
                last = entry
            if resource not in self.claimed and place + 1 < len(book.claims[resource]):
                heappush(heads, (book.claims[resource][place + 1], resource, place + 1))
        return True

    def look(self, key: str) -> bool:
        """Grant a waiter what it wants, or tell it why it waits; False: there is no room for that in this decision."""
        try:
            self._look(key)
        except FullError:
            return False
        return True

    def ask(self, book: HostState) -> None:
        """What is known has served whom it serves: ask on-demand drivers for the others."""
        view = self._draft.view(self._host)
        waiting = set(self.lacking)
        for resource, entries in book.unanswered.items():
            spec = self._draft.rules.specs.get(resource)
            if spec is not None and spec.on_demand and not view.inventory(resource).asking:
                waiting.update(entries[: LOOKS * self._draft.rules.chunk])
        if waiting:
            discovery.ask_next(self._draft, view, waiting)

    def _look(self, key: str) -> None:
        draft = self._draft
        known = draft.record(key)
        if known is None or known.state != PENDING:
            return
        late = known.wait_until is not None and known.wait_until <= draft.now
        if late and is_told(known):
            self.has_moved = True
            give_up(draft, known)
            return
        request, specs = known.request, draft.rules.specs
        if (reason := excess(specs, request.amounts, request.operators)) is not None:
            # it registered when a resource was shared, and the manager was started again with an exclusive one
            self.has_moved = True
            _fail(draft, known, ReasonCode.INVALID_REQUEST, reason)
            return
        view = draft.view(self._host)
        wanted = tuple(sorted(request.amounts.items()))
        obstacle = self._alike.get(wanted)
        record = known
        if obstacle is None:
            record, obstacle = _attempt(draft, view, known, self.claimed, later=self.lacking)
            if obstacle is None:
                self.has_moved = True
                return
            if record is known:
                # whoever wants the same meets the same from here on
                self._alike[wanted] = obstacle
        if late and obstacle.code != ReasonCode.NOT_REPORTED:
            self.has_moved = True
            give_up(draft, structs.replace(record, reason=obstacle.reason))
            return
        record = _tell(draft, view, record, obstacle, changed=record is not known)
        if record.state != PENDING:
            self.has_moved = True
        elif record.reason_code == ReasonCode.BUSY:
            self.claimed.update(record.request.amounts)


def _tell(
    draft: DecisionBuilder,
    view: HostOverlay,
    record: Allocation,
    obstacle: policy.Infeasibility,
    *,
    changed: bool = False,
) -> Allocation:
    """Keep the record's reason up to date; that a driver is being asked is no news to one who waits already."""
    told = record.reason_code is not None and view.inventory(obstacle.resource).asking
    news = not told and (obstacle.code != record.reason_code or obstacle.reason != record.reason)
    if news or changed:
        try:
            return draft.step(Step.REFRESH, obstacle.reason, record, reason=obstacle.reason, reason_code=obstacle.code)
        except OversizeError as error:
            return _fail_oversize(draft, record, error)
    return record


def _claimed_before(draft: DecisionBuilder, book: HostState, record: Allocation) -> tuple[Set[str], Set[str]]:
    """The resources that waiters before `record` want, as far as they may show what it wants: those of which somebody
    has been told that they are busy, and those of which somebody is to be looked at anew, who may be granted them."""
    own = queue_entry(record)
    wanted = record.request.amounts
    names = wanted.keys() if book.overlapping.isdisjoint(wanted) else book.overlapping | wanted.keys()
    claimed = {name for name in names if _any_waits(draft, book.claims.get(name, ()), own)}
    if book.scan_from is None or book.scan_from >= own:
        return claimed, NOTHING
    return claimed, {name for name in names if _any_waits(draft, book.waiting.get(name, ()), own, book.scan_from)}


def _any_waits(
    draft: DecisionBuilder, entries: Sequence[QueueEntry], before: QueueEntry, start: QueueEntry | None = None
) -> bool:
    """Whether any from `start` on that comes `before` waits on after the decision so far."""
    for place in range(0 if start is None else bisect_left(entries, start), len(entries)):
        if entries[place] >= before:
            return False
        record = draft.records.get(entries[place][2])
        if record is None or record.state == PENDING:
            return True
    return False


def _attempt(
    draft: DecisionBuilder,
    view: HostOverlay,
    record: Allocation,
    claimed: Collection[str],
    *,
    new: bool = False,
    later: list[QueueEntry] | None = None,
) -> tuple[Allocation, policy.Infeasibility | None]:
    """Grant a worker what it wants, or fail it. If it has to wait: its record as it is then, and the obstacle.

    One that claims nothing and for which an on-demand driver is to be asked is put into `later`, if that is given: a
    driver that is being asked serves nobody, and others may be served with what is known.
    """
    most = sizes.most_granted(draft.rules.max_bytes)
    if (least := policy.least_bytes(view, record.request.amounts)) > most:
        return _fail_oversize(draft, record, OversizeError(least, most), new=new), None
    while True:
        outcome = policy.place(view, draft.rules.specs, record.request.amounts, claimed)
        if isinstance(outcome, dict):
            if view.without >= draft.rules.max_live and all(draft.rules.specs[name].shared for name in outcome):
                told = reasons.too_many_live(draft.rules.max_live)
                return _fail(draft, record, ReasonCode.TOO_MANY_LIVE, told, new=new), None
            try:
                return _grant(draft, record, outcome, new=new), None
            except OversizeError as error:
                return _fail_oversize(draft, record, error, new=new), None
            except FullError:
                if not new:
                    raise
                draft.again(record.host)
                return record, policy.Infeasibility(ReasonCode.BUSY, reasons.NEXT_COMMIT, "")
        if not outcome.final:
            if later is None or outcome.code == ReasonCode.BUSY:
                asked = discovery.ask_for_more(draft, view, record)
            elif (asked := discovery.may_be_served(draft, view, record)) is not None:
                later.append(queue_entry(record))
            if asked is not None:
                outcome = policy.Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(asked), asked.name)
            return record, outcome
        spec = draft.rules.specs.get(outcome.resource)
        if spec is None or spec.on_failure != m.OnFailure.NO_INFO:
            return _fail(draft, record, outcome.code, outcome.reason, new=new), None
        record = _without(record, outcome)


def _without(record: Allocation, obstacle: policy.Infeasibility) -> Allocation:
    """Flink's way (`on-failure = no-info`): go on without the resource that failed."""
    amounts = {name: amount for name, amount in record.request.amounts.items() if name != obstacle.resource}
    missing = Unavailable(code=obstacle.code, reason=obstacle.reason)
    return structs.replace(
        record,
        request=structs.replace(record.request, amounts=amounts),
        unavailable={**record.unavailable, obstacle.resource: missing},
    )


def _grant(draft: DecisionBuilder, record: Allocation, devices: m.Devices, *, new: bool) -> Allocation:
    specs = draft.rules.specs
    token = draft.token + 1
    told = grant_infos(devices, draft.book(record.host).classes)
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
    operators, common = policy.shares(record.request, devices, shared)
    granted = draft.step(
        Step.PREPARE if prepares else Step.GRANT,
        "granted" if devices else "granted: nothing was asked for",
        structs.replace(
            record,
            token=token,
            resources=told.infos,
            operators=operators,
            common=common,
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
    draft.token = token
    if prepares:
        draft.decision.commands.append(m.Prepare(allocation=granted.key, token=token))
    return granted


def _fail(
    draft: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, new: bool = False
) -> Allocation:
    return draft.step(
        Step.FAIL, reason, record, new=new, reason=reason, reason_code=code, queue_position=None, wait_until=None
    )


def _fail_oversize(
    draft: DecisionBuilder, record: Allocation, error: OversizeError, *, new: bool = False
) -> Allocation:
    """What it wants can be written in no record: waiting would not help, and nobody else is concerned."""
    reason = reasons.too_large(record.request.amounts, error.size, error.most)
    return _fail(draft, structs.replace(record, unavailable=m.NO_ITEMS), ReasonCode.TOO_LARGE, reason, new=new)


def is_told(record: Allocation) -> bool:
    """A waiter knows what it waits for: its drivers have answered, and it has been looked at since."""
    return record.reason_code != ReasonCode.NOT_REPORTED and record.reason not in reasons.UNDECIDED


def give_up(draft: DecisionBuilder, record: Allocation) -> None:
    """A pending record's `wait_s` is over."""
    _fail(draft, record, ReasonCode.WAITED_TOO_LONG, reasons.too_long(record.request.wait_s, record.reason))
