"""Drives the core in tests: one host, decisions applied at once, follow-ups decided, no bus."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from outfitter_proto.keys import host_writer
from outfitter_proto.records import (
    Allocation,
    CordonOrder,
    Deregister,
    Health,
    Heartbeat,
    Host,
    ManagerIdentity,
    Register,
    ResourceRequest,
    Source,
)
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide, decide_in_full, renumber
from outfitter_service.core.hosts import host_record
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from support.core.decided import apply, change_all, decision_of

HOST = "h"
START = datetime(2026, 1, 1, tzinfo=UTC)


def asks(**amounts: int) -> dict[str, ResourceRequest]:
    return {name: ResourceRequest(amount=amount) for name, amount in amounts.items()}


def specs(*resources: m.ResourceSpec) -> dict[str, m.ResourceSpec]:
    return {spec.name: spec for spec in resources}


def device(name: str, **fields: Any) -> m.KnownDevice:
    return m.KnownDevice(id=name, properties={"index": name}, **fields)


def ill(name: str, reason: str = "overheated") -> m.KnownDevice:
    return device(name, health=Health.UNHEALTHY, reason=reason)


class CoreDriver:
    """Says events to the core and shows what came of them. Times are virtual, offsets count up."""

    def __init__(self, *resources: m.ResourceSpec, ledger: Ledger | None = None, **rules: Any) -> None:
        self.rules = Rules(writer=host_writer(HOST), specs=specs(*resources or (m.ResourceSpec(name="gpu"),)), **rules)
        self.ledger = ledger or Ledger()
        self.now = START
        self.offset = 0
        self.decisions: list[Decision] = []
        if self.host_state.record is None:
            manager = ManagerIdentity(instance="one", version="0", since=START)
            self.ledger.change(PutRecord(Host(host=HOST, manager=manager, since=START)))

    @property
    def host_state(self) -> Any:
        return self.ledger.host_state(HOST)

    def say(self, event: m.Event) -> Decision:
        """Decide one event and, right after it, all that follows from it. The event's own decision."""
        decision = self.only(event)
        waiting = list(decision.follow_ups)
        for _ in range(1000):
            if not waiting:
                return decision
            waiting += self.only(waiting.pop(0)).follow_ups
        raise AssertionError("follow-ups do not end")

    def only(self, event: m.Event) -> Decision:
        """Decide one event and leave its follow-ups alone."""
        decided = decide(self.ledger, self.rules, event, self.now)
        decision = decision_of(decided)
        if isinstance(event, m.Incoming):
            assert decide_in_full(self.ledger, self.rules, event, self.now) == decision, (
                "the short way says something else"
            )
        apply(decided, self.ledger)
        change_all(self.ledger, renumber(self.ledger, self.rules, HOST))
        self.decisions.append(decision)
        return decision

    def commit(self) -> None:
        """What was decided so far is in the ledger, and somebody can read it."""
        self.ledger.begin_commit()
        self.ledger.end_commit()

    def announce(self) -> None:
        """What a manager writes first: the host's record, by its configuration."""
        record = host_record(self.host_state.record, self.rules, {}, self.now, keeps_names=self.host_state.keeps_names)
        if record is not None:
            self.ledger.change(PutRecord(record))

    def restarted(self) -> CoreDriver:
        """Another manager that knows the records and the numbers alone, and looks at the queue anew."""
        ledger = Ledger()
        for other in self.ledger.records.values():
            ledger.restore(PutRecord(other))
        for record in self.ledger.allocations.values():
            ledger.restore(PutAllocation(record.key, record))
        ledger.resume(commit=self.ledger.commits, token=self.ledger.token)
        again = CoreDriver(ledger=ledger)
        again.rules, again.now, again.offset = self.rules, self.now, self.offset
        again.say(m.Reschedule(host=HOST))
        return again

    def pass_time(self, seconds: float) -> Decision:
        self.commit()
        self.now += timedelta(seconds=seconds)
        return self.say(m.Tick(host=HOST))

    # --- what workers say ---

    def message(self, message: Register | Heartbeat | Deregister) -> Decision:
        self.offset += 1
        return self.say(m.Incoming(message, Source(partition=0, offset=self.offset)))

    def register(self, worker: str, amount: int | None = None, *, incarnation: str = "1", **fields: Any) -> Allocation:
        """Register a worker (`amount`: of gpu) and return its record."""
        if amount is not None:
            fields["resources"] = asks(gpu=amount)
        self.message(Register(host=HOST, worker=worker, incarnation=incarnation, **fields))
        return self[worker, incarnation]

    def heartbeat(self, worker: str, incarnation: str = "1") -> Decision:
        return self.message(Heartbeat(host=HOST, worker=worker, incarnation=incarnation))

    def deregister(self, worker: str, incarnation: str | None = "1", reason: str | None = None) -> Decision:
        return self.message(Deregister(host=HOST, worker=worker, incarnation=incarnation, reason=reason))

    # --- what drivers and watchers say ---

    def report(self, *devices: str | m.KnownDevice, resource: str = "gpu", asked: int = 0) -> Decision:
        known = tuple(device(one) if isinstance(one, str) else one for one in devices)
        return self.say(m.DriverReport(host=HOST, resource=resource, devices=known, asked=asked))

    def fail(self, reason: str, *, permanent: bool = False, resource: str = "gpu", at_least: int = 0) -> Decision:
        failure = m.DriverFailure(reason=reason, permanent=permanent, at_least=at_least)
        return self.say(m.DriverReport(host=HOST, resource=resource, failure=failure))

    def be_silent(self, *devices: m.KnownDevice, permanent: bool = False) -> Decision:
        """The driver of gpu has failed for so long that nobody knows how its devices are."""
        failure = m.DriverFailure(reason="no answer", permanent=permanent)
        return self.say(m.DriverReport(host=HOST, resource="gpu", devices=devices, failure=failure))

    def die(self, worker: str, incarnation: str = "1") -> Decision:
        return self.say(m.OwnerDied(allocation=f"{HOST}/{worker}/{incarnation}", detail="its process is gone"))

    def expire(self, worker: str, incarnation: str = "1") -> Decision:
        return self.say(m.LeaseExpired(allocation=f"{HOST}/{worker}/{incarnation}"))

    # --- what operators say ---

    def cordon(self, order: str = "o1", *, author: str = "ada", reason: str = "why", **fields: Any) -> Decision:
        """Read an order of an operator, with these fields of `CordonOrder`."""
        wanted = CordonOrder(id=order, host=HOST, author=author, reason=reason, at=self.now, **fields)
        return self.say(m.OrderRead(order=wanted))

    # --- looking ---

    def __getitem__(self, worker: str | tuple[str, str]) -> Allocation:
        name, incarnation = (worker, "1") if isinstance(worker, str) else worker
        return self.ledger.allocations[f"{HOST}/{name}/{incarnation}"]

    def state(self, worker: str, incarnation: str = "1") -> str:
        return str(self[worker, incarnation].state)

    def has(self, worker: str, resource: str = "gpu", incarnation: str = "1") -> list[str]:
        return [info["id"] for info in self[worker, incarnation].resources.get(resource, [])]


def restarted(core: CoreDriver, *, configured: Iterable[m.ResourceSpec] | None = None, **rules: Any) -> CoreDriver:
    """The core after a crash: from the ledger alone, no driver having reported. `configured`: the resources that there
    are now, if others."""
    ledger = Ledger()
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    for other in core.ledger.records.values():
        ledger.restore(PutRecord(other))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    again = CoreDriver(*(core.rules.specs.values() if configured is None else configured), ledger=ledger, **rules)
    again.now, again.offset = core.now, core.offset
    again.announce()
    again.say(m.Reschedule(host=HOST))
    return again
