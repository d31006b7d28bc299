"""The rules: `decide` takes one event and says what changes, what is told, and what is to be done.

Pure and synchronous: it reads the ledger, the rules and the time it is given, and changes none of them. The
caller applies `Decision.changes`, commits, and only then acts on `Decision.commands`. The same ledger and the
same events give the same decisions.

One event's output is bounded by `Rules.chunk` allocations; what is left is asked for by an event in
`Decision.follow_ups`, and each piece keeps the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from msgspec import UNSET, Struct, structs

from outfitter_proto.records import (
    FINAL_STATES,
    HOLDING_STATES,
    Allocation,
    AllocationState,
    Deregister,
    Heartbeat,
    ReasonCode,
    Register,
    ResolvedRequest,
    Source,
    Transition,
    Unavailable,
)
from outfitter_service.core import explain, policy
from outfitter_service.core import model as m
from outfitter_service.core.hosts import host_record, refreshed
from outfitter_service.core.ledger import (
    Change,
    DropAllocation,
    HostBook,
    Inventory,
    Ledger,
    PutAllocation,
    PutHost,
    SetInventory,
    SetToken,
    exclusive_ids,
    queue_entry,
)
from outfitter_service.core.states import Step, advance

SHOWN_POSITIONS = 32
"""Queue positions are kept exact for this many waiters of a host; further back they are upper bounds."""


class Rules(Struct, frozen=True, kw_only=True):
    """What decisions are made by, besides the ledger: the configured resources and limits, and who writes.

    `retention_s` is how long final records stay; `lease_s` and `wait_s` are what a registration has that does not
    say (None: no lease, no end of waiting).
    """

    writer: str
    specs: Mapping[str, m.ResourceSpec]
    lease_s: float | None = 30.0
    wait_s: float | None = None
    retention_s: float = 3600.0
    chunk: int = 256


class Decision(Struct, kw_only=True):
    """What one event leads to.

    `refused` is why a message goes to the dead letters. `renewed` are the allocations whose lease starts anew;
    `cut` those whose lease must now run out although they had none or renewed it (their worker has a newer
    incarnation). `kind` says what the event was, for metrics.
    """

    kind: str
    changes: list[Change] = []
    history: list[Transition] = []
    commands: list[m.Command] = []
    follow_ups: list[m.Event] = []
    renewed: list[str] = []
    cut: list[str] = []
    refused: str | None = None


def decide(ledger: Ledger, rules: Rules, event: m.Event, now: datetime) -> Decision:
    """Decide one event. `now` is the wall time (UTC)."""
    draft = _Draft(ledger, rules, now)
    match event:
        case m.Incoming(message=Register() as message, source=source):
            draft.register(message, source)
        case m.Incoming(message=Heartbeat() as message):
            draft.heartbeat(message)
        case m.Incoming(message=Deregister() as message, source=source):
            draft.deregister(message, source)
        case m.DriverReport():
            draft.report(event)
        case m.DriverRetry():
            draft.retry(event)
        case m.OwnerDied():
            draft.end_if_live(event.allocation, "owner-died", ReasonCode.OWNER_DIED, event.detail)
        case m.LeaseExpired():
            draft.end_if_live(
                event.allocation, "lease-expired", ReasonCode.LEASE_EXPIRED, "no heartbeat within lease and grace"
            )
        case m.Prepared():
            draft.prepared(event)
        case m.Unprepared():
            draft.unprepared(event)
        case m.Tick():
            draft.tick(event.host)
        case m.Reschedule():
            draft.reschedule(event.host)
    return draft.decision


def renumber(ledger: Ledger, rules: Rules, host: str) -> list[Change]:
    """Bring the queue positions that are shown up to date: no transition, hence no history."""
    changes: list[Change] = []
    book = ledger.book(host)
    for position, (_, _, key) in enumerate(book.queue[:SHOWN_POSITIONS], start=1):
        record = ledger.allocations[key]
        if record.queue_position != position:
            changes.append(
                PutAllocation(
                    structs.replace(record, queue_position=position, writer=rules.writer, commit=ledger.commits + 1)
                )
            )
    return changes


class _Draft:
    """One decision in the making: the ledger as it will be, without touching it."""

    def __init__(self, ledger: Ledger, rules: Rules, now: datetime) -> None:
        self.ledger = ledger
        self.rules = rules
        self.now = now
        self.decision = Decision(kind="")
        self.token = ledger.token
        self._records: dict[str, Allocation] = {}
        self._views: dict[str, policy.View] = {}
        self._event = ""
        self._source: Source | None = None

    # --- the state as it will be ---

    def view(self, host: str) -> policy.View:
        found = self._views.get(host)
        if found is None:
            found = self._views[host] = policy.View(self.ledger.book(host))
        return found

    def record(self, key: str) -> Allocation | None:
        return self._records.get(key) or self.ledger.allocations.get(key)

    def step(
        self, before: Allocation | None, step: Step, explanation: str, after: Allocation, **history: Any
    ) -> Allocation:
        """Take one step of the table: the record after it, its history, and what it holds or lets go."""
        state = advance(AllocationState(before.state) if before is not None else None, step)
        after = structs.replace(
            after,
            state=state,
            since=self.now if before is None or before.state != state else before.since,
            writer=self.rules.writer,
            commit=self.ledger.commits + 1,
        )
        key = after.key
        self._records[key] = after
        self.decision.changes.append(PutAllocation(after))
        if step != Step.REFRESH:
            self.decision.history.append(
                Transition(
                    at=self.now,
                    host=after.host,
                    worker=after.worker,
                    incarnation=after.incarnation,
                    event=self._event,
                    from_=before.state if before is not None else None,
                    to=state,
                    explanation=explanation,
                    record=after,
                    source=self._source,
                    **history,
                )
            )
        if before is not None and before.state in HOLDING_STATES and state in FINAL_STATES:
            view = self.view(after.host)
            for device_id in exclusive_ids(before):
                view.freed.add(device_id)
                view.taken.discard(device_id)
        return after

    # --- messages ---

    def register(self, message: Register, source: Source) -> None:
        self._begin("register", source)
        key = f"{message.host}/{message.worker}/{message.incarnation}"
        known = self.record(key)
        if known is not None:
            self._register_again(known, message)
            return
        for older in sorted(self.ledger.book(message.host).incarnations.get(message.worker, ())):
            self._supersede(self.ledger.allocations[older], message.incarnation)
        request, unavailable, problem = self._resolve(message)
        record = Allocation(
            host=message.host,
            worker=message.worker,
            incarnation=message.incarnation,
            state=AllocationState.PENDING,
            request=request,
            since=self.now,
            writer=self.rules.writer,
            commit=0,
            source=source,
            unavailable=unavailable,
            wait_until=self.now + timedelta(seconds=request.wait_s) if request.wait_s is not None else None,
        )
        if problem is not None:
            code, reason = problem
            self.step(None, Step.FAIL, reason, structs.replace(record, reason=reason, reason_code=code))
            return
        self.decision.renewed.append(key)
        self._ask_drivers(record)
        self._admit(record)

    def _register_again(self, known: Allocation, message: Register) -> None:
        """The same incarnation once more: its unchanged record is published again, unless it has ended."""
        if known.state == AllocationState.ENDED:
            self.decision.kind = "late"
            return
        self.decision.kind = "repeated"
        if _asks_otherwise(known.request, message):
            self.decision.refused = (
                f"incarnation {message.incarnation!r} of worker {message.worker!r} already asked for something else; "
                "its grant is unchanged. Deregister first, or register under a new incarnation"
            )
        else:
            self.decision.renewed.append(known.key)
        self.decision.changes.append(PutAllocation(known))

    def _supersede(self, older: Allocation, newer: str) -> None:
        """A newer incarnation registered: the older one can renew nothing more, but holds until it is known dead."""
        reason = f"superseded by incarnation {newer}"
        if older.state == AllocationState.PENDING:
            self._end(older, ReasonCode.SUPERSEDED, reason)
        elif older.state in HOLDING_STATES:
            self.decision.cut.append(older.key)
            if older.reason_code != ReasonCode.SUPERSEDED and older.state != AllocationState.RELEASING:
                self.step(
                    older,
                    Step.REFRESH,
                    reason,
                    structs.replace(
                        older,
                        reason_code=ReasonCode.SUPERSEDED,
                        reason=f"{reason}; held until its owner is dead or its lease has ended",
                    ),
                )

    def heartbeat(self, message: Heartbeat) -> None:
        self._begin("heartbeat", None)
        key = f"{message.host}/{message.worker}/{message.incarnation}"
        record = self.record(key)
        if record is None:
            self.decision.refused = f"heartbeat from {key}, which is not registered here; register first"
        elif record.state in FINAL_STATES:
            self.decision.refused = f"heartbeat from {key}, which is over ({record.state}: {record.reason})"
        elif self.ledger.book(message.host).current.get(message.worker) != key:
            self.decision.refused = f"heartbeat from {key}, an older incarnation of its worker: it renews nothing"
        else:
            self.decision.renewed.append(key)

    def deregister(self, message: Deregister, source: Source) -> None:
        self._begin("deregister", source)
        key: str | None
        if message.incarnation is None:
            key = self.ledger.book(message.host).current.get(message.worker)
        else:
            key = f"{message.host}/{message.worker}/{message.incarnation}"
        record = self.record(key) if key is not None else None
        if record is None:
            named = f"{message.host}/{message.worker}" + (f"/{message.incarnation}" if message.incarnation else "")
            self.decision.refused = f"deregistration of {named}, which is not registered here"
        elif record.state == AllocationState.ENDED:
            self.decision.kind = "late"
        else:
            text = f"deregistered: {message.reason}" if message.reason else "deregistered"
            code = ReasonCode.WITHDRAWN if record.state == AllocationState.PENDING else ReasonCode.DEREGISTERED
            self._end(record, code, text)

    # --- what a request comes to ---

    def _resolve(
        self, message: Register
    ) -> tuple[ResolvedRequest, dict[str, Unavailable], tuple[ReasonCode, str] | None]:
        """Amounts per resource, resources that stay without infos, and why the request fails at once, if it does."""
        specs = self.rules.specs
        amounts: dict[str, int] = {}
        unavailable: dict[str, Unavailable] = {}
        problem: tuple[ReasonCode, str] | None = None
        if message.resources is not None:
            for name, asked in message.resources.items():
                spec = specs.get(name)
                if spec is None:
                    problem = problem or (ReasonCode.UNKNOWN_RESOURCE, explain.unknown_resource(name, specs))
                elif spec.state != m.SpecState.OK:
                    problem = self._not_in_effect(spec, unavailable) or problem
                amounts[name] = asked.amount
        else:
            for name, spec in specs.items():
                if spec.state == m.SpecState.OK and spec.amount is not None:
                    amounts[name] = spec.amount
                elif spec.state == m.SpecState.MISCONFIGURED:
                    problem = self._not_in_effect(spec, unavailable) or problem
                else:
                    unavailable[name] = Unavailable(code=spec.state, reason=explain.not_in_effect(spec))
        for name in unavailable:
            amounts.pop(name, None)
        problem = problem or _operators_problem(message, amounts)
        request = ResolvedRequest(
            amounts=amounts,
            resources=message.resources,
            operators=message.operators,
            owner=message.owner,
            lease_s=self.rules.lease_s if message.lease_s is UNSET else message.lease_s,
            wait_s=message.wait_s if message.wait_s is not None else self.rules.wait_s,
            priority=message.priority,
            labels=message.labels,
        )
        return request, unavailable, problem

    @staticmethod
    def _not_in_effect(spec: m.ResourceSpec, unavailable: dict[str, Unavailable]) -> tuple[ReasonCode, str] | None:
        """A resource that is asked for and not in effect fails the worker, unless its failures mean no infos."""
        reason = explain.not_in_effect(spec)
        if spec.on_failure == m.OnFailure.NO_INFO:
            unavailable[spec.name] = Unavailable(code=spec.state, reason=reason)
            return None
        return ReasonCode(spec.state), reason

    def _ask_drivers(self, record: Allocation) -> None:
        """Have the on-demand drivers of a request asked: each worker is served what was discovered for it."""
        view = self.view(record.host)
        for resource, amount in record.request.amounts.items():
            spec = self.rules.specs.get(resource)
            if spec is not None and spec.on_demand and not view.inventory(resource).asking:
                self._ask(view, resource, amount, record.key)

    def _ask(self, view: policy.View, resource: str, amount: int, key: str) -> None:
        host = view.book.host
        wanted = view.held_count(resource) + amount
        self._set_inventory(view, resource, structs.replace(view.inventory(resource), asking=wanted))
        self.decision.commands.append(
            m.Discover(host=host, resource=resource, amount=wanted, least=amount, allocation=key)
        )

    def _set_inventory(self, view: policy.View, resource: str, inventory: Inventory) -> None:
        view.set_inventory(resource, inventory)
        self.decision.changes.append(SetInventory(view.book.host, resource, inventory))

    # --- the queue ---

    def _admit(self, record: Allocation) -> None:
        """Place a new request, behind those it has to wait for."""
        book = self.ledger.book(record.host)
        outcome = self._place(record, self._claims_before(book, record))
        if isinstance(outcome, policy.Obstacle) and outcome.final:
            if not self._without(None, record, outcome):
                self._fail(None, record, outcome)
            return
        if isinstance(outcome, policy.Obstacle):
            position = len(book.queue) + 1
            waiting = structs.replace(record, reason=outcome.reason, reason_code=outcome.code, queue_position=position)
            self.step(None, Step.REGISTER, outcome.reason, waiting)
            return
        self._grant(None, record, outcome)

    def _claims_before(self, book: HostBook, record: Allocation) -> set[str]:
        """The exclusive resources that feasible waiters before `record` want."""
        if not any(book.busy.get(resource) for resource in record.request.amounts):
            return set()
        own = queue_entry(record)
        claimed: set[str] = set()
        wanted = set(record.request.amounts)
        for entry in book.queue:
            if entry >= own or wanted <= claimed:
                break
            waiter = self.record(entry[2])
            if waiter is not None and waiter.reason_code == ReasonCode.BUSY:
                claimed |= self._exclusive(waiter)
        return claimed

    def _exclusive(self, record: Allocation) -> set[str]:
        specs = self.rules.specs
        return {name for name in record.request.amounts if (spec := specs.get(name)) is not None and not spec.shared}

    def _place(self, record: Allocation, claimed: set[str]) -> dict[str, tuple[m.KnownDevice, ...]] | policy.Obstacle:
        view = self.view(record.host)
        outcome = policy.place(view, self.rules.specs, record.request, claimed)
        if isinstance(outcome, policy.Obstacle) and outcome.code in (ReasonCode.BUSY, ReasonCode.NOT_REPORTED):
            self._ask_for_more(view, record)
        return outcome

    def _ask_for_more(self, view: policy.View, record: Allocation) -> None:
        """An on-demand driver was asked before others took what it named: ask again for what is held now."""
        for resource, amount in record.request.amounts.items():
            spec = self.rules.specs.get(resource)
            if spec is not None and spec.on_demand:
                inventory = view.inventory(resource)
                if inventory.asking or (inventory.failure is not None and amount >= inventory.failure.at_least):
                    continue
                if not inventory.reported or inventory.asked < view.held_count(resource) + amount:
                    self._ask(view, resource, amount, record.key)

    def schedule(self, host: str, *, whole: bool) -> None:
        """Go through a host's queue and grant what can be granted.

        `whole`: look at every waiter (an inventory has changed), else stop where nothing free is left unclaimed.
        """
        view = self.view(host)
        claimed: set[str] = set()
        steps = 0
        for entry in view.book.queue:
            record = self.record(entry[2])
            if record is None or record.state != AllocationState.PENDING:
                continue
            if steps >= self.rules.chunk:
                self.decision.follow_ups.append(m.Reschedule(host=host))
                break
            if not whole and not self._anything_free(view, claimed):
                break
            outcome = self._place(record, claimed)
            if not isinstance(outcome, policy.Obstacle):
                self._grant(record, record, outcome)
                steps += 1
                continue
            if outcome.final:
                if not self._without(record, record, outcome):
                    self._fail(record, record, outcome)
                steps += 1
                continue
            if outcome.code == ReasonCode.BUSY:
                claimed |= self._exclusive(record)
            if outcome.code != record.reason_code or (whole and outcome.reason != record.reason):
                steps += 1
                self.step(
                    record,
                    Step.REFRESH,
                    outcome.reason,
                    structs.replace(record, reason=outcome.reason, reason_code=outcome.code),
                )

    def _anything_free(self, view: policy.View, claimed: set[str]) -> bool:
        return any(
            name not in claimed and (spec.shared or view.free_count(name, 1))
            for name, spec in self.rules.specs.items()
            if spec.state == m.SpecState.OK
        )

    def _grant(
        self, before: Allocation | None, record: Allocation, devices: dict[str, tuple[m.KnownDevice, ...]]
    ) -> None:
        specs = self.rules.specs
        self.token += 1
        self.decision.changes.append(SetToken(self.token))
        taken = self.view(record.host).taken
        shared = []
        for resource, chosen in devices.items():
            if specs[resource].shared:
                shared.append(resource)
            else:
                taken.update(device.id for device in chosen)
        env, cdi = policy.environment(devices)
        prepares = any(specs[resource].prepares for resource in devices)
        granted = self.step(
            before,
            Step.PREPARE if prepares else Step.GRANT,
            "granted" if devices else "granted: nothing was asked for",
            structs.replace(
                record,
                token=self.token,
                resources=policy.infos(devices),
                operators=policy.shares(record.request, devices),
                env=env,
                cdi=cdi,
                shared=shared,
                reason=None,
                reason_code=None,
                queue_position=None,
                wait_until=None,
            ),
        )
        if prepares:
            self.decision.commands.append(m.Prepare(allocation=granted.key, token=self.token))

    def _fail(self, before: Allocation | None, record: Allocation, obstacle: policy.Obstacle) -> None:
        failed = structs.replace(
            record, reason=obstacle.reason, reason_code=obstacle.code, queue_position=None, wait_until=None
        )
        self.step(before, Step.FAIL, obstacle.reason, failed)

    def _without(self, before: Allocation | None, record: Allocation, obstacle: policy.Obstacle) -> bool:
        """Flink's way (`on-failure = no-info`): go on without the resource that failed. False: not configured so."""
        spec = self.rules.specs.get(obstacle.resource)
        if spec is None or spec.on_failure != m.OnFailure.NO_INFO:
            return False
        request = structs.replace(
            record.request, amounts={k: v for k, v in record.request.amounts.items() if k != obstacle.resource}
        )
        lighter = structs.replace(
            record,
            request=request,
            unavailable={
                **record.unavailable,
                obstacle.resource: Unavailable(code=obstacle.code, reason=obstacle.reason),
            },
        )
        if before is None:
            self._admit(lighter)
        else:
            self.step(before, Step.REFRESH, obstacle.reason, lighter)
            self.decision.follow_ups.append(m.Reschedule(host=record.host))
        return True

    # --- drivers ---

    def report(self, event: m.DriverReport) -> None:
        self._begin("driver-report", None)
        view = self.view(event.host)
        before = view.inventory(event.resource)
        if event.failure is not None:
            inventory = structs.replace(before, failure=event.failure, asking=0)
        else:
            inventory = Inventory.of(event.devices, asked=event.asked)
        self._set_inventory(view, event.resource, inventory)
        book = view.book
        if book.record is not None:
            after = host_record(
                book.record, self.rules.specs, {**book.inventories, event.resource: inventory}, self.now
            )
            if after is not None:
                self.decision.changes.append(PutHost(after))
        if event.failure is None:
            self._refresh_holders(view, event.resource, inventory)
        self.schedule(event.host, whole=True)

    def _refresh_holders(self, view: policy.View, resource: str, inventory: Inventory) -> None:
        """Tell those who hold a device what has changed about it; what they hold stays theirs."""
        by_id = {device.id: device for device in inventory.devices}
        for key in sorted(set(view.book.held.values())):
            record = self.record(key)
            if record is None or resource not in record.resources or record.state == AllocationState.RELEASING:
                continue
            told = [refreshed(info, by_id.get(info["id"])) for info in record.resources[resource]]
            if told != record.resources[resource]:
                self.step(
                    record,
                    Step.REFRESH,
                    "infos changed",
                    structs.replace(record, resources={**record.resources, resource: told}),
                )

    def retry(self, event: m.DriverRetry) -> None:
        """An on-demand driver failed for now: ask it again if anybody still waits for it."""
        self._begin("driver-retry", None)
        view = self.view(event.host)
        if view.inventory(event.resource).asking:
            return
        for _, _, key in view.book.queue:
            record = self.ledger.allocations[key]
            amount = record.request.amounts.get(event.resource)
            if amount is not None:
                self._ask(view, event.resource, amount, key)
                return

    def prepared(self, event: m.Prepared) -> None:
        self._begin("prepared", None)
        record = self.record(event.allocation)
        if record is None or record.state != AllocationState.PREPARING or record.token != event.token:
            return
        if event.error is None:
            self.step(record, Step.PREPARED, "prepared", record)
            return
        after = self.step(
            record,
            Step.RELEASE,
            event.error,
            structs.replace(
                record, reason=event.error, reason_code=ReasonCode.PREPARE_FAILED, outcome=AllocationState.FAILED
            ),
        )
        self.decision.commands.append(m.Unprepare(allocation=after.key, token=event.token))

    def unprepared(self, event: m.Unprepared) -> None:
        self._begin("unprepared", None)
        record = self.record(event.allocation)
        if record is None or record.state != AllocationState.RELEASING or record.token != event.token:
            return
        step = Step.GIVE_UP if record.outcome == AllocationState.FAILED else Step.END
        told = "released" if event.confirmed else "released (unconfirmed: no in-use check)"
        self.step(record, step, told, structs.replace(record, outcome=None), confirmed=event.confirmed)
        self.schedule(record.host, whole=False)

    # --- endings ---

    def end_if_live(self, key: str, event: str, code: ReasonCode, reason: str) -> None:
        self._begin(event, None)
        record = self.record(key)
        if record is not None and record.state not in FINAL_STATES:
            self._end(record, code, reason)

    def _end(self, record: Allocation, code: ReasonCode, reason: str) -> None:
        """Take a record towards `ended`, through `releasing` where a driver has to let go first."""
        told = structs.replace(record, reason=reason, reason_code=code, queue_position=None, wait_until=None)
        if record.state == AllocationState.PENDING:
            self.step(record, Step.WITHDRAW, reason, told)
            self.schedule(record.host, whole=False)
        elif record.state == AllocationState.RELEASING:
            self.decision.kind = "repeated"
        elif record.state == AllocationState.FAILED:
            self.step(record, Step.END, reason, told)
        elif record.state == AllocationState.PREPARING or self._confirms(record):
            after = self.step(record, Step.RELEASE, reason, structs.replace(told, outcome=AllocationState.ENDED))
            self.decision.commands.append(m.Unprepare(allocation=after.key, token=record.token or 0))
        else:
            self.step(record, Step.END, reason, told, confirmed=False if record.resources else None)
            self.schedule(record.host, whole=False)

    def _confirms(self, record: Allocation) -> bool:
        specs = self.rules.specs
        return any((spec := specs.get(name)) is not None and spec.confirms for name in record.resources)

    # --- time ---

    def tick(self, host: str) -> None:
        self._begin("tick", None)
        book = self.ledger.book(host)
        steps = 0
        for _, _, key in book.queue:
            record = self.ledger.allocations[key]
            if record.wait_until is not None and record.wait_until <= self.now:
                reason = explain.too_long(record.request.wait_s, record.reason)
                self._fail(record, record, policy.Obstacle(ReasonCode.WAITED_TOO_LONG, reason, ""))
                steps += 1
                if steps >= self.rules.chunk:
                    self.decision.follow_ups.append(m.Tick(host=host))
                    break
        if steps:
            self.schedule(host, whole=False)
        limit = self.now - timedelta(seconds=self.rules.retention_s)
        for key in book.finals:
            if self.ledger.allocations[key].since > limit or steps >= self.rules.chunk:
                break
            self.decision.changes.append(DropAllocation(key))
            steps += 1

    def reschedule(self, host: str) -> None:
        self._begin("reschedule", None)
        view = self.view(host)
        for _, _, key in view.book.queue:
            record = self.ledger.allocations[key]
            for resource, amount in record.request.amounts.items():
                spec = self.rules.specs.get(resource)
                inventory = view.inventory(resource)
                if spec is not None and spec.on_demand and not (inventory.reported or inventory.asking):
                    self._ask(view, resource, amount, key)
        self.schedule(host, whole=True)

    def _begin(self, kind: str, source: Source | None) -> None:
        self.decision.kind = kind
        self._event = kind
        self._source = source


def _operators_problem(message: Register, amounts: Mapping[str, int]) -> tuple[ReasonCode, str] | None:
    """Operators may ask for no more than their worker does, and for nothing else."""
    total: dict[str, int] = {}
    for operator, wanted in (message.operators or {}).items():
        for resource, asked in wanted.items():
            if resource not in amounts:
                return ReasonCode.INVALID_REQUEST, explain.operator_without(operator, resource)
            total[resource] = total.get(resource, 0) + asked.amount
    for resource, wanted_sum in total.items():
        if wanted_sum > amounts[resource]:
            return ReasonCode.INVALID_REQUEST, explain.operator_sum(resource, wanted_sum, amounts[resource])
    return None


def _asks_otherwise(request: ResolvedRequest, message: Register) -> bool:
    same: list[Callable[[Any], Any]] = [lambda r: r.resources, lambda r: r.operators]
    return any(part(request) != part(message) for part in same)
