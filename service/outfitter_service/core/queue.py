"""The queue: which workers are granted, which wait and why, in the order of priority and first registration.

A device stays free for the earliest waiter that it could serve, if the host's healthy devices suffice for that waiter.
Waiters that can never be served, and those whose drivers have not answered, block nobody.

`WaiterIndex.claims` has the result of each waiter's last evaluation. It counts until a driver reports something new.
Then all waiters are evaluated again, some in each decision. A worker behind a waiter that is not evaluated yet gets no
device that this waiter may get. So the time of a decision does not grow with the number of waiters or of different
requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import heapify, heappop, heappush

from msgspec import UNSET, structs

from outfitter_proto.clauses import Clauses, chosen
from outfitter_proto.keys import AllocationKey
from outfitter_proto.records import FINAL_STATES, Allocation, ReasonCode, Token, Unavailable
from outfitter_service.core import discovery, reasons
from outfitter_service.core import model as m
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.placement import policy
from outfitter_service.core.placement.claims import Claims
from outfitter_service.core.request_check import excess, unchoosable
from outfitter_service.core.state import sizes
from outfitter_service.core.state.host_state import HostState, QueueEntry, queue_entry
from outfitter_service.core.state.infos import grant_infos
from outfitter_service.core.state.ledger import SetScan
from outfitter_service.core.state.overlay import HostOverlay
from outfitter_service.core.state.sizes import FullError, OversizeError
from outfitter_service.core.state.wants import Want
from outfitter_service.core.states import PENDING, Step

NOTHING: frozenset[str] = frozenset()
NO_CLAUSES: dict[str, Clauses] = {}
SCANNED_PER_CHANGE = 2
"""How many waiters one decision evaluates for each that it may change."""
MOST_EFFORT = 16_384
"""How many devices one decision compares and tries for waiters, about; which takes some 20 ms. Those with whom each
decision begins anew come on top."""


def admit(builder: DecisionBuilder, record: Allocation) -> Allocation:
    """Grant a new worker what it wants, or queue it. Returns its record."""
    overlay = builder.overlay(record.host)
    host_state = overlay.host_state
    queue = host_state.waiters.queue
    withdrawn = _withdrawn(builder) if builder.records else []
    if items := sizes.items(record.request):
        most = builder.rules.max_items
        others = host_state.items - sum(sizes.items(earlier.request) for earlier in withdrawn)
        if others + items > most:
            return _fail(builder, record, ReasonCode.TOO_MANY_LIVE, reasons.too_many_items(items, most), new=True)
    discovery.ask_for_new_worker(builder, overlay, record)
    claims, unevaluated = _claimed_before(builder, host_state, record) if queue else (None, NOTHING)
    record, obstacle = _attempt(builder, overlay, record, claims, new=True)
    if obstacle is None:
        return record
    if obstacle.reason == reasons.NEXT_COMMIT:
        _rescan_from(builder, host_state, queue_entry(record))
    elif obstacle.code == ReasonCode.BUSY and unevaluated:
        obstacle = structs.replace(obstacle, reason=reasons.NEXT_EVALUATION)
    if len(queue) - len(withdrawn) >= builder.rules.max_waiting:
        reason = f"{builder.rules.max_waiting} workers of this host wait already, which is the limit"
        code = ReasonCode.TOO_MANY_WAITING
        return builder.step(Step.FAIL, reason, record, new=True, reason=reason, reason_code=code, wait_until=None)
    position = bisect_left(queue, queue_entry(record)) + 1
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


def _withdrawn(builder: DecisionBuilder) -> list[Allocation]:
    """The records that wait no longer since this decision: of an earlier run, whose place the new one takes."""
    before = [
        builder.ledger.allocations.get(key) for key, after in builder.records.items() if after.state in FINAL_STATES
    ]
    return [record for record in before if record is not None and record.state == PENDING]


def schedule(builder: DecisionBuilder, host: str) -> None:
    """Devices have come free, or a waiter has left the queue: grant all that can be granted now.

    Of the waiters for a busy resource only the first can be granted, because the others leave it to that one. So the
    effort does not depend on the length of the queue.
    """
    host_state = builder.overlay(host).host_state
    queue_pass = _QueuePass(builder, host)
    is_done = queue_pass.scan_heads(host_state, until=host_state.waiters.scan_from)
    if _rescan_others(builder, host_state) or queue_pass.lacking or not is_done:
        builder.reschedule(host)


def reschedule(builder: DecisionBuilder, host: str) -> None:
    """As `schedule`, in a decision of its own."""
    _rescan_others(builder, builder.host_state(host))
    builder.reschedule(host)


def _rescan_others(builder: DecisionBuilder, host_state: HostState) -> bool:
    """Have the waiters evaluated again of which more than the first one may be granted: those for overlapping shared
    resources and those for which a search took too long do not block each other, and of those that want more different
    things than are kept apart nobody knows who blocks whom. Returns whether that was not due already."""
    first = _first_other(builder, host_state)
    return first is not None and _rescan_from(builder, host_state, first)


def _rescan_from(builder: DecisionBuilder, host_state: HostState, start: QueueEntry) -> bool:
    """Have the waiters from `start` on evaluated again. Returns False if that is due already."""
    scans = [change.start for change in builder.decision.changes if type(change) is SetScan]
    before = scans[-1] if scans else host_state.waiters.scan_from
    if before is not None and before <= start:
        return False
    builder.change(SetScan(host_state.host, start))
    return True


def _first_other(builder: DecisionBuilder, host_state: HostState) -> QueueEntry | None:
    overlapping, waiters, specs = host_state.devices.overlapping, host_state.waiters, builder.rules.specs
    others = [name for name in overlapping if name in specs and specs[name].shared]
    others += [name for name in waiters.wants if waiters.is_crowded(name)]
    firsts = [waiters.first_claim(name) for name in others]
    return min([*[first for first in firsts if first is not None], *waiters.unplaced[:1]], default=None)


def scan(builder: DecisionBuilder, host: str, *, whole: bool) -> bool:
    """Evaluate the waiters whose evaluation is due (`whole`: all), and refresh their reasons. Returns False if some are
    left for another decision."""
    host_state = builder.overlay(host).host_state
    waiters = host_state.waiters
    queue = waiters.queue
    start = queue[0] if whole and queue else waiters.scan_from
    queue_pass = _QueuePass(builder, host)
    if not queue_pass.scan_heads(host_state, until=start):
        if whole:
            builder.change(SetScan(host, start))
        builder.reschedule(host)
        return False
    if queue_pass.has_moved and (first := _first_other(builder, host_state)) is not None:
        start = first if start is None else min(start, first)
    next_start = None
    if start is not None:
        first_index = bisect_left(queue, start)
        for index in range(first_index, len(queue)):
            is_enough = queue_pass.is_full or index - first_index >= SCANNED_PER_CHANGE * builder.rules.chunk
            if is_enough or not queue_pass.evaluate(queue[index][2]):
                next_start = queue[index]
                builder.reschedule(host)
                break
    if next_start != waiters.scan_from:
        builder.change(SetScan(host, next_start))
    if next_start is None:
        queue_pass.ask_drivers(host_state)
    return next_start is None


class _QueuePass:
    """One decision's pass through a host's queue, in order."""

    def __init__(self, builder: DecisionBuilder, host: str) -> None:
        self.claims = Claims(builder.host_state(host).devices, builder.rules.specs)
        """Of those that go on waiting."""
        self.has_moved = False
        """Some waiter waits no longer."""
        self.lacking: list[QueueEntry] = []
        """The waiters for which on-demand drivers must be asked."""
        self._overlay = builder.overlay(host)
        self._spared = self._overlay.effort
        """The decision's effort before this pass, and that for waiters of whom it came to nothing."""
        self._known: set[tuple[str, Clauses]] = set()
        self._builder = builder
        self._host = host
        self._most_changes = len(builder.decision.changes) + builder.rules.chunk
        self._alike: dict[tuple[object, ...], policy.Infeasibility] = {}

    @property
    def is_full(self) -> bool:
        """Whether this decision has changed as much as it may, or has made enough effort."""
        has_changed = len(self._builder.decision.changes) >= self._most_changes
        return has_changed or self._overlay.effort - self._spared >= MOST_EFFORT

    def scan_heads(self, host_state: HostState, *, until: QueueEntry | None) -> bool:
        """Evaluate the first waiter for each busy resource, and after each grant the next one, up to `until`. Returns
        False if some are left for another decision."""
        waiters = host_state.waiters
        lists: list[tuple[str, Want | None, Sequence[QueueEntry]]] = [
            (resource, None, entries) for resource, entries in waiters.claims.items()
        ]
        for resource, wants in waiters.wants.items():
            if not waiters.is_crowded(resource):
                lists += [(resource, want, entries) for want, entries in wants.items()]
            elif until is None or waiters.choosers[resource][0] < until:
                self.claims.add(resource, None)
        heads = [(entries[0], number, 0) for number, (_, _, entries) in enumerate(lists)]
        heapify(heads)
        last = None
        while heads:
            entry, number, index = heappop(heads)
            if until is not None and entry >= until:
                break
            if entry != last:
                changes, effort = len(self._builder.decision.changes), self._overlay.effort
                if self.is_full or not self.evaluate(entry[2]):
                    return False
                if len(self._builder.decision.changes) == changes:
                    # the next decision begins with it again, and must get behind it all the same
                    self._spared += self._overlay.effort - effort
                last = entry
            resource, want, entries = lists[number]
            if not self.claims.has(resource, want) and index + 1 < len(entries):
                heappush(heads, (entries[index + 1], number, index + 1))
        return True

    def evaluate(self, key: AllocationKey) -> bool:
        """Grant a waiter what it wants, or refresh its reason. Returns False if this decision has no room for that."""
        try:
            self._evaluate(key)
        except FullError:
            return False
        return True

    def _count_compared(self, clauses: Iterable[tuple[str, Clauses]]) -> None:
        """Count the devices that are compared with these clauses, as if nobody had done it in another decision."""
        for each in clauses:
            free_list = self._overlay.devices.free_lists.get(each[0])
            if each not in self._known and free_list is not None:
                self._known.add(each)
                self._overlay.effort += len(free_list.devices)

    def ask_drivers(self, host_state: HostState) -> None:
        """Ask on-demand drivers for the waiters that the reported devices could not serve."""
        overlay = self._builder.overlay(self._host)
        unserved = set(self.lacking)
        for resource, entries in host_state.waiters.unanswered.items():
            spec = self._builder.rules.specs.get(resource)
            if spec is not None and spec.on_demand and not overlay.inventory(resource).asking:
                unserved.update(entries[: SCANNED_PER_CHANGE * self._builder.rules.chunk])
        if unserved:
            discovery.ask_next(self._builder, overlay, unserved)

    def _evaluate(self, key: AllocationKey) -> None:
        builder = self._builder
        waiter = builder.record(key)
        if waiter is None or waiter.state != PENDING:
            return
        late = waiter.wait_until is not None and waiter.wait_until <= builder.now
        if late and is_answered(waiter):
            self.has_moved = True
            give_up(builder, waiter)
            return
        request, specs = waiter.request, builder.rules.specs
        if (reason := excess(specs, request.amounts, request.operators)) is not None:
            # it registered when a resource was shared; since a restart of the manager the resource is exclusive
            self.has_moved = True
            _fail(builder, waiter, ReasonCode.INVALID_REQUEST, reason)
            return
        if request.choices is not UNSET and (reason := unchoosable(specs, request)) is not None:
            self.has_moved = True
            _fail(builder, waiter, ReasonCode.INVALID_REQUEST, reason)
            return
        overlay = builder.overlay(self._host)
        amounts: tuple[object, ...] = tuple(sorted(request.amounts.items()))
        if request.choices is not UNSET:
            clauses = sorted(chosen(request).items(), key=lambda item: item[0])
            amounts = (*amounts, *clauses)
            self._count_compared(clauses)
        if request.operators and _specs_for(builder, waiter) is not specs:
            amounts = (*amounts, None)
        obstacle = self._alike.get(amounts)
        record = waiter
        if obstacle is None:
            record, obstacle = _attempt(builder, overlay, waiter, self.claims, later=self.lacking)
            if obstacle is None:
                self.has_moved = True
                return
            if record is waiter and builder.rules.per_worker.isdisjoint(request.amounts):
                # the obstacle is the same for all later waiters with the same request
                self._alike[amounts] = obstacle
        if late and obstacle.code != ReasonCode.NOT_REPORTED:
            self.has_moved = True
            give_up(builder, structs.replace(record, reason=obstacle.reason))
            return
        is_first = not self.claims.touches(obstacle.resource)
        record = _update_reason(builder, overlay, record, obstacle, is_first=is_first, changed=record is not waiter)
        if record.state != PENDING:
            self.has_moved = True
        elif record.reason_code == ReasonCode.BUSY:
            self.claims.add_all_of(record.request)


def _update_reason(
    builder: DecisionBuilder,
    overlay: HostOverlay,
    record: Allocation,
    obstacle: policy.Infeasibility,
    *,
    is_first: bool,
    changed: bool,
) -> Allocation:
    """The waiter's record with its current reason. A question to a driver is no news for a worker that waits, if what
    it waits for has it evaluated again: a device, an answer, or the end of a failure. Else it waits for the answer.

    `is_first`: nobody before it waits for this resource. How many devices are free is news for the first one only. Else
    each device that comes free would have the records of all waiters for a shared resource written again.
    """
    inventory = overlay.inventory(obstacle.resource)
    returns = record.reason_code in (ReasonCode.BUSY, ReasonCode.NOT_REPORTED) or inventory.failure is not None
    is_asking = inventory.asking and record.reason_code is not None and returns
    may_tell = builder.rules.news or record.reason in reasons.UNDECIDED
    is_news = obstacle.code != record.reason_code or (
        may_tell and reasons.differ(obstacle.reason, record.reason, free=is_first)
    )
    if (is_news and not is_asking) or changed:
        try:
            return builder.step(
                Step.REFRESH, obstacle.reason, record, reason=obstacle.reason, reason_code=obstacle.code
            )
        except OversizeError as error:
            return _fail_oversize(builder, record, error)
    return record


def _claimed_before(builder: DecisionBuilder, host_state: HostState, record: Allocation) -> tuple[Claims, Set[str]]:
    """What waiters before `record` claim of devices that its request may get. The set has those of the resources that
    waiters claim only because their evaluation is due, and so may get them."""
    own = queue_entry(record)
    amounts, waiters = record.request.amounts, host_state.waiters
    names = (
        amounts.keys()
        if host_state.devices.overlapping.isdisjoint(amounts)
        else host_state.devices.overlapping | amounts.keys()
    )
    claims = Claims(host_state.devices, builder.rules.specs)
    unevaluated: set[str] = set()
    for name in names:
        as_a_whole = [waiters.claims.get(name, ()), waiters.choosers[name] if waiters.is_crowded(name) else ()]
        if any(_any_waits(builder, entries, own) for entries in as_a_whole):
            claims.add(name, None)
        elif waiters.scan_from is not None and _any_waits(
            builder, waiters.waiting.get(name, ()), own, waiters.scan_from
        ):
            unevaluated.add(name)
            claims.add(name, None)
        else:
            for want, entries in waiters.wants.get(name, {}).items():
                if _any_waits(builder, entries, own):
                    claims.add(name, want)
    return claims, unevaluated


def _any_waits(
    builder: DecisionBuilder, entries: Sequence[QueueEntry], before: QueueEntry, start: QueueEntry | None = None
) -> bool:
    """Whether any waiter from `start` on and `before` the given one still waits after the decision so far."""
    for index in range(0 if start is None else bisect_left(entries, start), len(entries)):
        if entries[index] >= before:
            return False
        record = builder.records.get(entries[index][2])
        if record is None or record.state == PENDING:
            return True
    return False


def _attempt(
    builder: DecisionBuilder,
    overlay: HostOverlay,
    record: Allocation,
    claims: Claims | None,
    *,
    new: bool = False,
    later: list[QueueEntry] | None = None,
) -> tuple[Allocation, policy.Infeasibility | None]:
    """Grant a worker what it wants, or fail it. Returns its record, and the obstacle if it must wait.

    `claims`: of earlier waiters. `new`: the worker has no record yet. `later`: a list for workers
    that claim nothing and need an on-demand driver. While the manager asks a driver, its devices serve nobody. So the
    driver is asked after the pass, and its reported devices may serve other workers first.
    """
    most = builder.rules.max_bytes
    if (least := policy.least_bytes(overlay, record.request.amounts)) > most:
        return _fail_oversize(builder, record, OversizeError(least, most), new=new), None
    while True:
        outcome = _placed(builder, overlay, record, claims)
        if isinstance(outcome, dict):
            shares_all = all(builder.rules.specs[name].shared for name in outcome)
            if overlay.without_exclusive >= builder.rules.max_live and shares_all:
                reason = reasons.too_many_live(builder.rules.max_live)
                return _fail(builder, record, ReasonCode.TOO_MANY_LIVE, reason, new=new), None
            devices = sum(len(chosen) for name, chosen in outcome.items() if builder.rules.specs[name].shared)
            others = overlay.items + (sizes.items(record.request) if new else 0)
            if devices > sizes.FEW_ITEMS and others + devices > builder.rules.max_items:
                reason = reasons.too_many_shared(devices, builder.rules.max_items)
                return _fail(builder, record, ReasonCode.TOO_MANY_LIVE, reason, new=new), None
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
                spec = discovery.ask_for_more(builder, overlay, record)
            elif (spec := discovery.next_to_ask(builder, overlay, record)) is not None:
                later.append(queue_entry(record))
            if spec is not None:
                outcome = policy.Infeasibility(ReasonCode.NOT_REPORTED, reasons.not_reported(spec), spec.name)
            return record, outcome
        spec = builder.rules.specs.get(outcome.resource)
        if spec is None or spec.on_failure != m.OnFailure.NO_INFO:
            return _fail(builder, record, outcome.code, outcome.reason, new=new), None
        record = _without(record, outcome)


def _placed(
    builder: DecisionBuilder, overlay: HostOverlay, record: Allocation, claims: Claims | None
) -> m.Devices | policy.Infeasibility:
    """The devices for a worker, or the obstacle. A driver that answers for one worker at a time is only asked once
    nothing else is in the way."""
    specs, amounts = _specs_for(builder, record), record.request.amounts
    clauses = NO_CLAUSES if record.request.choices is UNSET else chosen(record.request)
    unanswered = discovery.without_answer(overlay, builder.rules, record)
    if not unanswered:
        return policy.place(overlay, specs, amounts, claims, clauses)
    answered = {name: amounts[name] for name in amounts if name not in unanswered}
    outcome = policy.place(overlay, specs, answered, claims, clauses)
    if not isinstance(outcome, dict):
        return outcome
    return policy.unanswered(overlay, {name: (specs[name], amounts[name]) for name in amounts if name in unanswered})


def _specs_for(builder: DecisionBuilder, record: Allocation) -> Mapping[str, m.ResourceSpec]:
    """The resources as a worker may have them. Operators divide a worker's devices by their ids, so these have replicas
    of different devices."""
    specs = builder.rules.specs
    named = {name for requests in (record.request.operators or {}).values() for name in requests}
    divided = [name for name in named if name in specs and specs[name].replicas_same_device]
    if not divided:
        return specs  # nearly always
    return {**specs, **{name: structs.replace(specs[name], replicas_same_device=False) for name in divided}}


def _without(record: Allocation, obstacle: policy.Infeasibility) -> Allocation:
    """Continue without the resource that failed, as Flink does (`on-failure = no-info`)."""
    amounts = {name: amount for name, amount in record.request.amounts.items() if name != obstacle.resource}
    unavailable = Unavailable(code=obstacle.code, reason=obstacle.reason)
    return structs.replace(
        record,
        request=structs.replace(record.request, amounts=amounts),
        unavailable={**record.unavailable, obstacle.resource: unavailable},
    )


def _grant(builder: DecisionBuilder, record: Allocation, devices: m.Devices, *, new: bool) -> Allocation:
    specs = builder.rules.specs
    token: Token = builder.token + 1  # type: ignore[assignment]  # calling a NewType takes longer than the sum
    infos = grant_infos(devices, builder.host_state(record.host).devices.classes)
    shared: list[str] = []
    prepared: list[str] = []
    prepares = False
    for resource in devices:
        spec = specs[resource]
        prepares = prepares or spec.prepares
        if spec.shared:
            shared.append(resource)
        elif spec.prepares or spec.confirms:
            prepared.append(resource)
    operators, common = policy.shares(record.request, devices, shared)
    untold = _untold(specs, devices)
    explanation = "granted" if untold is None else f"granted (unconfirmed: {untold})"
    granted = builder.step(
        Step.PREPARE if prepares else Step.GRANT,
        explanation if devices else "granted: no devices requested",
        record,
        new=new,
        confirmed=None if untold is None else False,
        token=token,
        resources=infos.infos,
        operators=operators,
        common=common,
        env=infos.env,
        cdi=infos.cdi,
        shared=shared or m.NO_NAMES,
        prepared=prepared or UNSET,
        aliases=infos.aliases,
        uses=builder.host_state(record.host).devices.granted_uses(devices, shared),
        reason=None,
        reason_code=None,
        queue_position=None,
        wait_until=None,
    )
    builder.use_token(token)
    if prepares:
        builder.command(m.Prepare(allocation=granted.key, token=token))
    return granted


def _untold(specs: Mapping[str, m.ResourceSpec], devices: m.Devices) -> str | None:
    """Why nobody could tell who uses some of the devices when their driver last looked; None: it could, or there is no
    such check."""
    checked = (chosen for resource, chosen in devices.items() if specs[resource].confirms)
    return next((device.untold for chosen in checked for device in chosen if device.untold is not None), None)


def _fail(
    builder: DecisionBuilder, record: Allocation, code: ReasonCode, reason: str, *, new: bool = False
) -> Allocation:
    return builder.step(
        Step.FAIL, reason, record, new=new, reason=reason, reason_code=code, queue_position=None, wait_until=None
    )


def _fail_oversize(
    builder: DecisionBuilder, record: Allocation, error: OversizeError, *, new: bool = False
) -> Allocation:
    """Fail a worker whose grant no record can hold: waiting would not help."""
    reason = reasons.too_large(record.request.amounts, error.size, error.most)
    return _fail(builder, structs.replace(record, unavailable=m.NO_ITEMS), ReasonCode.TOO_LARGE, reason, new=new)


def is_answered(record: Allocation) -> bool:
    """Whether a waiter's drivers have answered and it has been evaluated since."""
    return record.reason_code != ReasonCode.NOT_REPORTED and record.reason not in reasons.UNDECIDED


def give_up(builder: DecisionBuilder, record: Allocation) -> None:
    """Fail a pending record whose `wait_s` is over."""
    _fail(builder, record, ReasonCode.WAITED_TOO_LONG, reasons.too_long(record.request.wait_s, record.reason))
