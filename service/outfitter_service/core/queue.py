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


def admit(builder: DecisionBuilder, record: Allocation) -> Allocation:
    """Place a new worker, behind those it has to wait for; the record it gets."""
    overlay = builder.overlay(record.host)
    discovery.ask_anew(builder, overlay, record)
    claimed, unsure = (
        _claimed_before(builder, overlay.host_state, record) if overlay.host_state.queue else (NOTHING, NOTHING)
    )
    record, obstacle = _attempt(builder, overlay, record, claimed | unsure, new=True)
    if obstacle is None:
        return record
    if obstacle.reason == reasons.NEXT_COMMIT:
        _look_from(builder, overlay.host_state, queue_entry(record))
    elif obstacle.code == ReasonCode.BUSY and not unsure <= claimed:
        obstacle = structs.replace(obstacle, reason=reasons.NEXT_LOOK)
    if len(overlay.host_state.queue) >= builder.rules.max_waiting:
        told = f"{builder.rules.max_waiting} workers of this host wait already, and no more are let in"
        code = ReasonCode.TOO_MANY_WAITING
        return builder.step(Step.FAIL, told, record, new=True, reason=told, reason_code=code, wait_until=None)
    position = bisect_left(overlay.host_state.queue, queue_entry(record)) + 1
    try:
        return builder.step(
            Step.REGISTER,
            obstacle.reason,
            record,
            new=True,
            reason=obstacle.reason,
            reason_code=obstacle.code,
            queue_position=position,
        )
    except OversizeError as error:
        return _fail_oversize(builder, record, error, new=True)


def schedule(builder: DecisionBuilder, host: str) -> None:
    """Devices or places in the queue have come free: grant what can be granted now.

    Only the first of those who wait for a resource that is busy can be: the others have to leave it to that one, and
    those who wait for something else are not concerned. So it makes no difference how many wait, nor for how much.
    """
    host_state = builder.overlay(host).host_state
    round_ = _Round(builder, host)
    is_done = round_.look_at_first(host_state, until=host_state.scan_from)
    if _look_at_sharers(builder, host_state) or round_.lacking or not is_done:
        builder.reschedule(host)


def reschedule(builder: DecisionBuilder, host: str) -> None:
    """As `schedule`, but leave it to a decision of its own."""
    _look_at_sharers(builder, builder.host_state(host))
    builder.reschedule(host)


def _look_at_sharers(builder: DecisionBuilder, host_state: HostState) -> bool:
    """Have those looked at who wait for shared resources that show devices which others may have alone, if there are
    any: sharers are in no sharer's way, so that not only the first of them may be served."""
    first = _first_sharer(builder, host_state)
    return first is not None and _look_from(builder, host_state, first)


def _look_from(builder: DecisionBuilder, host_state: HostState, start: QueueEntry) -> bool:
    """Have those looked at anew who wait from `start` on, if they are not to be looked at already."""
    scans = [change.start for change in builder.decision.changes if type(change) is SetScan]
    before = scans[-1] if scans else host_state.scan_from
    if before is not None and before <= start:
        return False
    builder.decision.changes.append(SetScan(host_state.host, start))
    return True


def _first_sharer(builder: DecisionBuilder, host_state: HostState) -> QueueEntry | None:
    specs = builder.rules.specs
    shared = [
        name for name in host_state.overlapping if name in host_state.claims and name in specs and specs[name].shared
    ]
    return min((host_state.claims[name][0] for name in shared), default=None)


def scan(builder: DecisionBuilder, host: str, *, whole: bool) -> bool:
    """Look anew at those who have not been looked at since something was said that may concern them (`whole`: at
    everybody), and tell them why they wait; False: some are left, for another decision."""
    host_state = builder.overlay(host).host_state
    start = host_state.queue[0] if whole and host_state.queue else host_state.scan_from
    round_ = _Round(builder, host)
    if not round_.look_at_first(host_state, until=start):
        if whole:
            builder.decision.changes.append(SetScan(host, start))
        builder.reschedule(host)
        return False
    if round_.has_moved and (first := _first_sharer(builder, host_state)) is not None:
        start = first if start is None else min(start, first)
    left = None
    if start is not None:
        first_place = bisect_left(host_state.queue, start)
        for place in range(first_place, len(host_state.queue)):
            if round_.is_long or place - first_place >= LOOKS * builder.rules.chunk:
                left = host_state.queue[place]
                builder.reschedule(host)
                break
            if not round_.look(host_state.queue[place][2]):
                left = host_state.queue[place]
                builder.reschedule(host)
                break
    if left != host_state.scan_from:
        builder.decision.changes.append(SetScan(host, left))
    if left is None:
        round_.ask(host_state)
    return left is None


class _Round:
    """One decision's way through a host's queue, in order: `claimed` is what those want that have to go on waiting,
    `has_moved` whether anybody waits no longer, and `lacking` are those for whom on-demand drivers are to be asked."""

    def __init__(self, builder: DecisionBuilder, host: str) -> None:
        self.claimed: set[str] = set()
        self.has_moved = False
        self.lacking: list[QueueEntry] = []
        self._builder = builder
        self._host = host
        self._most_changes = len(builder.decision.changes) + builder.rules.chunk
        self._alike: dict[tuple[tuple[str, int], ...], policy.Infeasibility] = {}

    @property
    def is_long(self) -> bool:
        """Whether what is left to change is left to another decision."""
        return len(self._builder.decision.changes) >= self._most_changes

    def look_at_first(self, host_state: HostState, *, until: QueueEntry | None) -> bool:
        """Look at who is first for any resource that is busy, as long as that one is granted at the next; those from
        `until` on are left out. False: some are left, for another decision."""
        heads = [(entries[0], resource, 0) for resource, entries in host_state.claims.items()]
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
            if resource not in self.claimed and place + 1 < len(host_state.claims[resource]):
                heappush(heads, (host_state.claims[resource][place + 1], resource, place + 1))
        return True

    def look(self, key: str) -> bool:
        """Grant a waiter what it wants, or tell it why it waits; False: there is no room for that in this decision."""
        try:
            self._look(key)
        except FullError:
            return False
        return True

    def ask(self, host_state: HostState) -> None:
        """What is known has served whom it serves: ask on-demand drivers for the others."""
        overlay = self._builder.overlay(self._host)
        waiting = set(self.lacking)
        for resource, entries in host_state.unanswered.items():
            spec = self._builder.rules.specs.get(resource)
            if spec is not None and spec.on_demand and not overlay.inventory(resource).asking:
                waiting.update(entries[: LOOKS * self._builder.rules.chunk])
        if waiting:
            discovery.ask_next(self._builder, overlay, waiting)

    def _look(self, key: str) -> None:
        builder = self._builder
        known = builder.record(key)
        if known is None or known.state != PENDING:
            return
        late = known.wait_until is not None and known.wait_until <= builder.now
        if late and is_told(known):
            self.has_moved = True
            give_up(builder, known)
            return
        request, specs = known.request, builder.rules.specs
        if (reason := excess(specs, request.amounts, request.operators)) is not None:
            # it registered when a resource was shared, and the manager was started again with an exclusive one
            self.has_moved = True
            _fail(builder, known, ReasonCode.INVALID_REQUEST, reason)
            return
        overlay = builder.overlay(self._host)
        wanted = tuple(sorted(request.amounts.items()))
        obstacle = self._alike.get(wanted)
        record = known
        if obstacle is None:
            record, obstacle = _attempt(builder, overlay, known, self.claimed, later=self.lacking)
            if obstacle is None:
                self.has_moved = True
                return
            if record is known:
                # whoever wants the same meets the same from here on
                self._alike[wanted] = obstacle
        if late and obstacle.code != ReasonCode.NOT_REPORTED:
            self.has_moved = True
            give_up(builder, structs.replace(record, reason=obstacle.reason))
            return
        record = _tell(builder, overlay, record, obstacle, changed=record is not known)
        if record.state != PENDING:
            self.has_moved = True
        elif record.reason_code == ReasonCode.BUSY:
            self.claimed.update(record.request.amounts)


def _tell(
    builder: DecisionBuilder,
    overlay: HostOverlay,
    record: Allocation,
    obstacle: policy.Infeasibility,
    *,
    changed: bool = False,
) -> Allocation:
    """Keep the record's reason up to date; that a driver is being asked is no news to one who waits already."""
    told = record.reason_code is not None and overlay.inventory(obstacle.resource).asking
    news = not told and (obstacle.code != record.reason_code or obstacle.reason != record.reason)
    if news or changed:
        try:
            return builder.step(
                Step.REFRESH, obstacle.reason, record, reason=obstacle.reason, reason_code=obstacle.code
            )
        except OversizeError as error:
            return _fail_oversize(builder, record, error)
    return record


def _claimed_before(builder: DecisionBuilder, host_state: HostState, record: Allocation) -> tuple[Set[str], Set[str]]:
    """The resources that waiters before `record` want, as far as they may show what it wants: those of which somebody
    has been told that they are busy, and those of which somebody is to be looked at anew, who may be granted them."""
    own = queue_entry(record)
    wanted = record.request.amounts
    names = wanted.keys() if host_state.overlapping.isdisjoint(wanted) else host_state.overlapping | wanted.keys()
    claimed = {name for name in names if _any_waits(builder, host_state.claims.get(name, ()), own)}
    if host_state.scan_from is None or host_state.scan_from >= own:
        return claimed, NOTHING
    return claimed, {
        name for name in names if _any_waits(builder, host_state.waiting.get(name, ()), own, host_state.scan_from)
    }


def _any_waits(
    builder: DecisionBuilder, entries: Sequence[QueueEntry], before: QueueEntry, start: QueueEntry | None = None
) -> bool:
    """Whether any from `start` on that comes `before` waits on after the decision so far."""
    for place in range(0 if start is None else bisect_left(entries, start), len(entries)):
        if entries[place] >= before:
            return False
        record = builder.records.get(entries[place][2])
        if record is None or record.state == PENDING:
            return True
    return False


def _attempt(
    builder: DecisionBuilder,
    overlay: HostOverlay,
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
    most = sizes.most_granted(builder.rules.max_bytes)
    if (least := policy.least_bytes(overlay, record.request.amounts)) > most:
        return _fail_oversize(builder, record, OversizeError(least, most), new=new), None
    while True:
        outcome = policy.place(overlay, builder.rules.specs, record.request.amounts, claimed)
        if isinstance(outcome, dict):
            if overlay.without >= builder.rules.max_live and all(builder.rules.specs[name].shared for name in outcome):
                told = reasons.too_many_live(builder.rules.max_live)
                return _fail(builder, record, ReasonCode.TOO_MANY_LIVE, told, new=new), None
            try:
                return _grant(builder, record, outcome, new=new), None
            except OversizeError as error:
                return _fail_oversize(builder, record, error, new=new), None
            except FullError:
                if not new:
                    raise
                builder.reschedule(record.host)
                return record, policy.Infeasibility(ReasonCode.BUSY, reasons.NEXT_COMMIT, "")
        if not outcome.final:
            if later is None or outcome.code == ReasonCode.BUSY:
                asked = discovery.ask_for_more(builder, overlay, record)
            elif (asked := discovery.may_be_served(builder, overlay, record)) is not None:
                later.append(queue_entry(record))
            if asked is not None:
                outcome = policy.Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(asked), asked.name)
            return record, outcome
        spec = builder.rules.specs.get(outcome.resource)
        if spec is None or spec.on_failure != m.OnFailure.NO_INFO:
            return _fail(builder, record, outcome.code, outcome.reason, new=new), None
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


def _grant(builder: DecisionBuilder, record: Allocation, devices: m.Devices, *, new: bool) -> Allocation:
    specs = builder.rules.specs
    token = builder.token + 1
    told = grant_infos(devices, builder.host_state(record.host).classes)
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
    granted = builder.step(
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
    builder.token = token
    if prepares:
        builder.decision.commands.append(m.Prepare(allocation=granted.key, token=token))
    return granted


def _fail(
    builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, new: bool = False
) -> Allocation:
    return builder.step(
        Step.FAIL, reason, record, new=new, reason=reason, reason_code=code, queue_position=None, wait_until=None
    )


def _fail_oversize(
    builder: DecisionBuilder, record: Allocation, error: OversizeError, *, new: bool = False
) -> Allocation:
    """What it wants can be written in no record: waiting would not help, and nobody else is concerned."""
    reason = reasons.too_large(record.request.amounts, error.size, error.most)
    return _fail(builder, structs.replace(record, unavailable=m.NO_ITEMS), ReasonCode.TOO_LARGE, reason, new=new)


def is_told(record: Allocation) -> bool:
    """A waiter knows what it waits for: its drivers have answered, and it has been looked at since."""
    return record.reason_code != ReasonCode.NOT_REPORTED and record.reason not in reasons.UNDECIDED


def give_up(builder: DecisionBuilder, record: Allocation) -> None:
    """A pending record's `wait_s` is over."""
    _fail(builder, record, ReasonCode.WAITED_TOO_LONG, reasons.too_long(record.request.wait_s, record.reason))
