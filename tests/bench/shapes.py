"""What one decision takes where many different requests wait, against as many that are all alike.

No broker and no clock but the processor's: the core is asked the same question again and again, and answers nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import combinations, islice

from bench.report import Row
from outfitter_proto.keys import host_writer
from outfitter_proto.records import Deregister, Host, ManagerIdentity, Register, ResourceRequest, Source
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, Rules, decide
from outfitter_service.core.state.ledger import Ledger, PutRecord
from support.core.decided import apply

HOST = "bench"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DEVICES = 16
BUSY = "is busy"
KINDS = 14
"""Resources, of which there are more different sets than workers may wait."""
OFTEN = 7

Amounts = dict[str, int]


def alike(count: int) -> list[Amounts]:
    """Everybody wants the same."""
    return [{"r0": 1}] * count


def by_amount(count: int) -> list[Amounts]:
    """Everybody wants another amount of the same resource."""
    return [{"r0": amount} for amount in range(1, count + 1)]


def by_set(count: int) -> list[Amounts]:
    """Everybody wants another set of resources."""
    names = [f"r{number}" for number in range(KINDS)]
    sets = (some for size in range(1, KINDS + 1) for some in combinations(names, size))
    return [dict.fromkeys(some, 1) for some in islice(sets, count)]


def by_both(count: int) -> list[Amounts]:
    """Everybody wants another pair of amounts of two resources that show the same devices."""
    side = DEVICES * 8
    return [{"r0": 1 + number % side, "r1": 1 + number // side} for number in range(count)]


SHAPES: dict[str, Callable[[int], list[Amounts]]] = {
    "amounts": by_amount,
    "sets of resources": by_set,
    "pairs of amounts of the same devices": by_both,
}


class Scene:
    """One host on which `waiting` wait. Each resource shows `devices`, the same for all of them if they are `common`;
    where drivers are busy all are held, one of them by a worker of its own."""

    def __init__(self, waiting: list[Amounts], *, state: str, devices: int, common: bool) -> None:
        specs = {
            f"r{number}": m.ResourceSpec(
                name=f"r{number}", on_failure=m.OnFailure.WAIT, on_demand=state == "is being asked"
            )
            for number in range(KINDS)
        }
        self.rules = Rules(writer=host_writer(HOST), specs=specs)
        self.ledger = Ledger()
        self.offset = 0
        self.devices = devices
        self.common = common
        manager = ManagerIdentity(instance="one", version="0", since=NOW)
        self.ledger.change(PutRecord(Host(host=HOST, manager=manager, since=NOW)))
        if state == BUSY:
            for resource in specs:
                self.say(self.report(resource))
            self.say(self.register("holder", {"r0": 1}))
            for resource in ["r0"] if common else specs:
                self.say(self.register(f"other-{resource}", {resource: devices - (resource == "r0")}))
        elif state == "fails":
            for resource in specs:
                failure = m.DriverFailure(reason="no")
                self.say(m.DriverReport(host=HOST, resource=resource, failure=failure))
        for number, amounts in enumerate(waiting):
            self.say(self.register(f"w{number}", amounts))
        self.ledger.begin_commit()
        self.ledger.end_commit()

    def register(self, worker: str, amounts: Amounts) -> m.Event:
        self.offset += 1
        resources = {name: ResourceRequest(amount=amount) for name, amount in amounts.items()}
        message = Register(host=HOST, worker=worker, incarnation="1", resources=resources)
        return m.Incoming(message, Source(partition=0, offset=self.offset))

    def leave(self, worker: str) -> m.Event:
        return m.Incoming(
            Deregister(host=HOST, worker=worker, incarnation="1"), Source(partition=0, offset=self.offset + 1)
        )

    def report(self, resource: str, *, more: int = 0) -> m.DriverReport:
        prefix = "d" if self.common else resource
        devices = [m.KnownDevice(id=f"{prefix}-{number}", properties={}) for number in range(self.devices + more)]
        return m.DriverReport(host=HOST, resource=resource, devices=tuple(devices), asked=self.devices)

    def say(self, event: m.Event) -> None:
        """Decide an event and all that follows from it, and apply it."""
        waiting = [event]
        while waiting:
            decided = decide(self.ledger, self.rules, waiting.pop(0), NOW)
            apply(decided, self.ledger)
            if isinstance(decided, Decision):
                waiting += decided.follow_ups

    def questions(self, *, busy: bool) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is timed."""

        def ask(event: m.Event, now: datetime = NOW) -> Callable[[], object]:
            return lambda: decide(self.ledger, self.rules, event, now)

        yield "a registration", ask(self.register("newcomer", {"r0": 1}))
        yield "a withdrawal of the first that waits", ask(self.leave("w0"))
        yield "a tick", ask(m.Tick(host=HOST), NOW + timedelta(seconds=1))
        if busy:
            yield "a release, and who comes next", ask(self.leave("holder"))
        report = self.report("r0", more=1)
        yield "a driver's report", ask(report)
        decided = decide(self.ledger, self.rules, report, NOW)
        apply(decided, self.ledger)
        yield "what follows from it, a decision", ask(m.Reschedule(host=HOST, whole=False))
        yield "a registration meanwhile", ask(self.register("newcomer", {"r0": 1}))
        self.ledger.rollback()


def measure(waiting: int) -> list[Row]:
    """Microseconds a decision, beside what it takes where all that wait want the same."""
    rows: list[Row] = []
    for state in (BUSY, "fails", "is being asked", "has not reported"):
        for name, shapes in SHAPES.items():
            different = shapes(waiting)
            most = max(amount for amounts in different for amount in amounts.values())
            devices = max(DEVICES, most if state == BUSY else 0)
            ours, base = (
                _microseconds(Scene(which, state=state, devices=devices, common=shapes is by_both), busy=state == BUSY)
                for which in (different, alike(waiting))
            )
            told = f"{waiting} {name}, the driver {state}"
            rows += [Row(f"{told}: {question}", "us", ours[question], base[question], aim="<= 10") for question in ours]
    longest = max(figure for row in rows for figure in (row.outfitter, row.bare) if figure is not None)
    return [*rows, Row("the longest decision of these", "ms", longest / 1000, aim="<= 50")]


def _microseconds(scene: Scene, *, busy: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for question, ask in scene.questions(busy=busy):
        times = []
        for _ in range(OFTEN):
            begun = time.perf_counter()
            ask()
            times.append((time.perf_counter() - begun) * 1e6)
        found[question] = statistics.median(times)
    return found
