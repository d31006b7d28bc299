"""What a flood of names costs one host: waiters, records that are over and a worker's runs are kept up to a bound."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
from msgspec import structs

from outfitter_service.core import model as m
from outfitter_service.core import request_check
from outfitter_service.core.decide import Decision, decide, is_due
from outfitter_service.core.queue import SCANNED_PER_CHANGE
from outfitter_service.core.state.ledger import DropAllocation
from support.core_driver import CoreDriver, asks
from support.decided import change_all, decision_of


def dropped(desk: CoreDriver) -> list[list[str]]:
    """The keys that each decision forgot, where it did."""
    found = [[one.key for one in decision.changes if isinstance(one, DropAllocation)] for decision in desk.decisions]
    return [keys for keys in found if keys]


def test_beyond_so_many_waiters_a_worker_is_told_that_there_are_too_many() -> None:
    desk = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"), max_waiting=2)
    desk.report("a")
    desk.report("f", resource="fpga")
    for worker in "xyz":
        desk.register(worker, 1)
    refused = desk.register("w", 1)
    assert (refused.state, refused.reason_code) == ("failed", "too-many-waiting")
    assert "2 workers" in str(refused.reason)
    assert desk.decisions[-1].renewed == []
    # who does not have to wait is served all the same
    assert desk.register("v", resources=asks(fpga=1)).state == "allocated"
    desk.deregister("y")
    assert desk.register("w", 1, incarnation="2").state == "pending"


def test_beyond_so_many_that_live_without_a_device_of_their_own_a_worker_is_told_so() -> None:
    desk = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="net", shared=True), max_live=3)
    desk.report("a", "b")
    desk.register("late", resources=asks(net=1))
    desk.register("v", resources={}, lease_s=None)
    desk.register("w", resources={})
    desk.register("x", resources=asks(gpu=1, net=1))  # has one, once there is a net: it does not count
    desk.report("n", resource="net")
    assert [desk.state(worker) for worker in ("late", "v", "w", "x")] == ["allocated"] * 4
    refused = desk.register("y", resources={})
    assert (refused.state, refused.reason_code) == ("failed", "too-many-live")
    assert "3 live workers" in str(refused.reason)
    assert desk.decisions[-1].renewed == []
    assert desk.register("y", resources=asks(net=1), incarnation="2").reason_code == "too-many-live"
    assert desk.register("z", 1).state == "allocated"
    desk.deregister("v")
    assert desk.register("y", resources={}, incarnation="3").state == "allocated"


def test_those_that_waited_for_a_shared_device_are_let_in_up_to_the_bound() -> None:
    desk = CoreDriver(m.ResourceSpec(name="net", shared=True), max_live=2)
    for worker in "uvwx":
        assert desk.register(worker, resources=asks(net=1)).state == "pending"
    desk.report("n", resource="net")
    assert [desk[worker].reason_code for worker in "uvwx"] == [None, None, "too-many-live", "too-many-live"]


def test_of_a_long_reason_the_beginning_is_kept_and_the_goodbye_obeyed() -> None:
    desk = CoreDriver()
    desk.report("a")
    desk.register("w", 1)
    desk.deregister("w", reason="x" * 60_000)
    assert desk["w"].state == "ended"
    assert desk["w"].reason == f"deregistered: {'x' * 256}… (the first 256 of 60000 characters)"
    assert all(len(step.explanation) < 400 for _, step in desk.decisions[-1].history)


def test_of_too_many_that_are_over_those_that_ended_first_are_forgotten_before_their_time() -> None:
    desk = CoreDriver(max_final=3, chunk=2)
    for number in range(8):
        desk.deregister(f"w{number}")
        desk.now += timedelta(seconds=1)
    assert desk.host_state.final_count == 8
    assert desk.say(m.Tick(host="h")).changes == []  # it is not in the ledger yet how they ended
    assert is_due(desk.ledger, desk.rules, "h", desk.now)
    desk.pass_time(0)
    assert dropped(desk) == [["h/w0/1", "h/w1/1"], ["h/w2/1", "h/w3/1"], ["h/w4/1"]]
    assert sorted(desk.ledger.allocations) == ["h/w5/1", "h/w6/1", "h/w7/1"]
    assert not is_due(desk.ledger, desk.rules, "h", desk.now)


def test_those_that_ended_in_one_second_go_up_to_the_bound_and_no_further() -> None:
    desk = CoreDriver(max_final=3)
    for number in range(5):
        desk.deregister(f"w{number}")
    desk.pass_time(1)
    assert dropped(desk) == [["h/w0/1", "h/w1/1"]]


def test_a_worker_that_is_started_again_and_again_is_remembered_by_its_last_runs() -> None:
    desk = CoreDriver(max_incarnations=3)
    desk.report("a", "b")
    desk.register("w", 1, incarnation="first")  # holds on: nobody has seen it dead
    for number in range(1, 7):
        desk.register("w", 1, incarnation=f"{number}")
        desk.deregister("w", f"{number}")
        desk.commit()
        desk.now += timedelta(seconds=1)
    # one that holds a device is never forgotten, the runs before the last two are
    assert sorted(desk.ledger.allocations) == ["h/w/5", "h/w/6", "h/w/first"]
    assert dropped(desk) == [["h/w/1"], ["h/w/2"], ["h/w/3"], ["h/w/4"]]


def test_a_run_that_ends_because_of_a_newer_one_is_not_forgotten_in_the_same_breath() -> None:
    """Its worker has yet to hear of it: not before it must have been committed."""
    desk = CoreDriver(max_incarnations=1)
    desk.register("w", 1)
    desk.register("w", 1, incarnation="2")
    assert (desk.state("w"), desk.state("w", "2")) == ("ended", "pending")
    desk.register("w", 1, incarnation="3")
    assert dropped(desk) == []
    desk.commit()
    desk.now += timedelta(seconds=1)
    desk.register("w", 1, incarnation="4")
    assert dropped(desk) == [["h/w/1", "h/w/2"]]


def storm(desk: CoreDriver, kind: str, count: int, *, per_commit: int = 50) -> list[int]:
    """Many runs of one worker within a second; how many changes each message led to."""
    begun = len(desk.decisions)
    for number in range(count):
        if kind == "unseen":
            desk.deregister("w", f"unseen-{number}")
        else:
            desk.register("w", 9 if kind == "fails" else 1, incarnation=f"{kind}-{number}")
        if number % per_commit == 0:
            desk.commit()
    return [len(decision.changes) for decision in desk.decisions[begun:]]


@pytest.mark.parametrize("kind", ["unseen", "fails", "waits"])
def test_however_fast_runs_of_one_worker_end_so_many_are_remembered_and_a_good_one_is_answered(kind: str) -> None:
    desk = CoreDriver(max_incarnations=8, chunk=16)
    if kind == "fails":
        desk.report("a", "b")
    changes = storm(desk, kind, 1000)
    assert len(desk.host_state.incarnations["w"]) <= 8 + 2 * 50
    assert max(changes) <= 16
    desk.commit()
    begun = len(desk.decisions)
    good = desk.register("w", 1, incarnation="good")
    assert good.state == ("allocated" if kind == "fails" else "pending")
    assert desk.decisions[begun].renewed == ["h/w/good"]


def test_what_an_earlier_version_has_piled_up_goes_in_pieces() -> None:
    desk = CoreDriver(max_incarnations=8, max_final=50, chunk=16)
    tight, desk.rules = desk.rules, structs.replace(desk.rules, max_incarnations=10_000, max_final=10_000)
    storm(desk, "unseen", 500)
    desk.commit()
    desk.rules = tight
    assert desk.register("w", 1, incarnation="good").state == "pending"
    changes = []
    for number in range(40):
        desk.commit()
        desk.register("w", 1, incarnation=f"again-{number}")
        changes.append(len(desk.decisions[-1].changes))
    assert max(changes) <= 16
    assert len(desk.host_state.incarnations["w"]) <= 8 + 2


def test_runs_that_hold_devices_are_neither_forgotten_nor_looked_at_again_and_again() -> None:
    desk = CoreDriver(max_incarnations=4)
    for number in range(200):
        desk.register("w", resources={}, incarnation=f"{number}")
    assert all(len(decision.changes) <= 2 and len(decision.final_leases) <= 1 for decision in desk.decisions)
    assert len(desk.host_state.live) == 200
    assert all(desk["w", f"{number}"].reason_code == "superseded" for number in range(199))


def test_a_flood_of_workers_that_end_is_forgotten_as_fast_as_it_comes() -> None:
    desk = CoreDriver(max_final=10, chunk=4)
    for number in range(500):
        desk.deregister(f"w{number}")
        if number % 20 == 0:
            desk.commit()
    assert desk.host_state.final_count <= 10 + 2 * 20


@pytest.mark.parametrize("takes_back", [False, True])
def test_to_forget_a_run_and_to_take_that_back_takes_no_longer_the_more_there_are(takes_back: bool) -> None:
    """Counted in comparisons of runs, not in seconds."""

    class Counted(str):
        compared = 0

        def __lt__(self, other: str) -> bool:
            Counted.compared += 1
            return super().__lt__(other)

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    desk = CoreDriver(max_incarnations=100_000)
    storm(desk, "unseen", 2000)
    desk.commit()
    host_state = desk.host_state
    host_state.incarnations["w"] = [(offset, Counted(key)) for offset, key in host_state.incarnations["w"]]
    host_state.past["w"] = [(since, Counted(key)) for since, key in host_state.past["w"]]
    change_all(desk.ledger, [DropAllocation(f"h/w/unseen-{number}") for number in range(1000)])
    if takes_back:
        desk.ledger.rollback()
    assert len(host_state.incarnations["w"]) == (2000 if takes_back else 1000)
    assert Counted.compared < 2000 * 2 * 2 * 20


def test_what_nobody_has_configured_is_not_kept_for_others() -> None:
    desk = CoreDriver(m.ResourceSpec(name="gpu"))
    desk.report("a")
    request_check._alike.cache_clear()
    assert desk.register("v", resources=asks(gpu=1, made_up=1)).state == "failed"
    assert request_check._alike.cache_info().currsize == 0


def test_records_of_workers_that_want_the_same_have_it_in_common() -> None:
    desk = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"))
    desk.report("a", "b", "c")
    desk.report("f", "g", resource="fpga")
    one = desk.register("v", resources=asks(gpu=1, fpga=1))
    same = desk.register("w", resources=asks(gpu=1, fpga=1))
    other = desk.register("x", resources=asks(gpu=1, fpga=0))
    assert one.request == same.request
    assert one.request.amounts is same.request.amounts
    assert one.request.resources is same.request.resources
    assert other.request.amounts == {"gpu": 1, "fpga": 0}


# --- many different requests ---------------------------------------------------------------------------

WAITING = 1000
KINDS = [f"r{number}" for number in range(10)]
CHUNK = 8


class Counted(dict[str, m.ResourceSpec]):
    """The configured resources, which count how often they are looked up: a measure of work without a clock."""

    def __init__(self, specs: dict[str, m.ResourceSpec]) -> None:
        super().__init__(specs)
        self.count = 0

    def __getitem__(self, name: str) -> m.ResourceSpec:
        self.count += 1
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.count += 1
        return super().get(name, default)


def requests_of(kind: str) -> list[dict[str, int]]:
    if kind == "alike":
        return [{"r0": 1}] * WAITING
    if kind == "amounts":
        return [{"r0": amount} for amount in range(1, WAITING + 1)]
    sets = [some for size in range(1, len(KINDS)) for some in combinations(KINDS, size)]
    return [dict.fromkeys(some, 1) for some in sets[:WAITING]]


def crowded(kind: str, state: str) -> tuple[CoreDriver, Counted]:
    """Very many wait for a resource, none of which anybody can have now."""
    on_demand = state == "asking"
    specs = [m.ResourceSpec(name=name, on_failure=m.OnFailure.WAIT, on_demand=on_demand) for name in KINDS]
    counted = Counted({spec.name: spec for spec in specs})
    desk = CoreDriver(*specs, chunk=CHUNK)
    desk.rules = structs.replace(desk.rules, specs=counted)
    if state == "busy":
        for name in KINDS:
            desk.report(*[f"{name}-{number}" for number in range(WAITING)], resource=name)
        desk.register("holder", resources=asks(r0=1))
        for name in KINDS:
            desk.register(f"holder-{name}", resources=asks(**{name: WAITING - (name == "r0")}))
    elif state == "failing":
        for name in KINDS:
            desk.fail("for now", resource=name)
    for number, amounts in enumerate(requests_of(kind)):
        desk.register(f"w{number}", resources=asks(**amounts))
    return desk, counted


def work(kind: str, state: str) -> dict[str, int]:
    """The look-ups of the longest decision that each event leads to."""
    found: dict[str, int] = {}
    desk, counted = crowded(kind, state)

    def measure(name: str, act: Callable[[], object]) -> None:
        longest = 0
        only = desk.only

        def watched(event: m.Event) -> Decision:
            nonlocal longest
            counted.count = 0
            decided = decide(desk.ledger, desk.rules, event, desk.now)
            longest = max(longest, counted.count)
            assert decision_of(decided) == only(event)
            return decision_of(decided)

        desk.only = watched  # type: ignore[method-assign]
        act()
        desk.only = only  # type: ignore[method-assign]
        found[name] = longest

    measure("register", lambda: desk.register("new", resources=asks(r0=1)))
    measure("withdraw", lambda: desk.deregister("w0"))
    measure("tick", lambda: desk.pass_time(1))
    if state == "busy":
        measure("release", lambda: desk.deregister("holder"))
    measure("report", lambda: desk.report("another", resource="r0", asked=1))
    measure("failure", lambda: desk.fail("again", resource="r0"))
    return found


@pytest.mark.parametrize("state", ["busy", "failing", "asking", "silent"])
@pytest.mark.parametrize("kind", ["amounts", "sets"])
def test_no_decision_takes_longer_because_those_who_wait_want_different_things(kind: str, state: str) -> None:
    usual, found = work("alike", state), work(kind, state)
    a_piece = (
        2 * SCANNED_PER_CHANGE * CHUNK * len(KINDS)
    )  # what one decision may look at, where those who wait have nothing in common
    assert {name: looks for name, looks in found.items() if looks > 10 * usual[name] + a_piece} == {}
