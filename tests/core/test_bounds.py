"""What a flood of names costs one host: waiters, records that are over and a worker's runs are kept up to a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from msgspec import structs

from outfitter_proto.keys import AllocationKey
from outfitter_service.core import ending, request_check
from outfitter_service.core import model as m
from outfitter_service.core.decide import Decision, decide, is_due
from outfitter_service.core.decision import DecisionBuilder
from outfitter_service.core.queue import SCANNED_PER_CHANGE
from outfitter_service.core.state.ledger import DropAllocation
from support.core.core_driver import CoreDriver, asks
from support.core.decided import change_all, decision_of


def dropped(core: CoreDriver) -> list[list[str]]:
    """The keys that each decision forgot, where it did."""
    found = [[one.key for one in decision.changes if isinstance(one, DropAllocation)] for decision in core.decisions]
    return [keys for keys in found if keys]


def test_beyond_so_many_waiters_a_worker_is_told_that_there_are_too_many() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"), max_waiting=2)
    core.report("a")
    core.report("f", resource="fpga")
    for worker in "xyz":
        core.register(worker, 1)
    refused = core.register("w", 1)
    assert (refused.state, refused.reason_code) == ("failed", "too-many-waiting")
    assert "2 workers" in str(refused.reason)
    assert core.decisions[-1].renewed == []
    # who does not have to wait is served all the same
    assert core.register("v", resources=asks(fpga=1)).state == "allocated"
    core.deregister("y")
    assert core.register("w", 1, incarnation="2").state == "pending"


def test_beyond_so_many_that_live_without_a_device_of_their_own_a_worker_is_told_so() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="net", shared=True), max_live=3)
    core.report("a", "b")
    core.register("late", resources=asks(net=1))
    core.register("v", resources={}, lease_s=None)
    core.register("w", resources={})
    core.register("x", resources=asks(gpu=1, net=1))  # has one, once there is a net: it does not count
    core.report("n", resource="net")
    assert [core.state(worker) for worker in ("late", "v", "w", "x")] == ["allocated"] * 4
    refused = core.register("y", resources={})
    assert (refused.state, refused.reason_code) == ("failed", "too-many-live")
    assert "3 live workers" in str(refused.reason)
    assert core.decisions[-1].renewed == []
    assert core.register("y", resources=asks(net=1), incarnation="2").reason_code == "too-many-live"
    assert core.register("z", 1).state == "allocated"
    core.deregister("v")
    assert core.register("y", resources={}, incarnation="3").state == "allocated"


@pytest.mark.parametrize("limit", [{"max_waiting": 3}, {"max_items": 44}])
def test_a_waiting_workers_next_run_takes_the_place_of_the_one_before_it_at_a_limit_too(limit: dict[str, int]) -> None:
    core = CoreDriver(**limit)
    core.report("a")
    labels = {f"label-{number}": "" for number in range(10)}
    for worker in "wxyz":
        core.register(worker, 1, labels=labels)
    assert core.register("z", 1, incarnation="2", labels=labels).state == "pending"
    assert core.register("more", 1, labels=labels).state == "failed"


@pytest.mark.parametrize(
    "said",
    [
        {"operators": {f"o{number}": asks(gpu=1) if number == 0 else {} for number in range(40)}},
        {"labels": {f"label-{number}": "" for number in range(40)}},
    ],
)
def test_beyond_so_many_labels_and_operators_of_all_workers_one_is_told_so(said: dict[str, Any]) -> None:
    core = CoreDriver(max_items=100)
    core.report("a")
    assert core.register("x", 1, **said).state == "allocated"
    assert core.register("y", 1, **said).state == "pending"
    refused = core.register("z", 1, **said)
    assert (refused.state, refused.reason_code) == ("failed", "too-many-live")
    assert "more than 100" in str(refused.reason)
    assert core.register("few", 1, labels={"a": "b"}).state == "pending"
    core.deregister("y")
    assert core.register("z", 1, incarnation="2", **said).state == "pending"


def test_a_final_record_leaves_out_a_request_with_many_items_and_the_same_request_is_no_other_one() -> None:
    core = CoreDriver(max_waiting=0)
    core.report("a")
    said = {"operators": {f"o{number}": {} for number in range(40)}}
    core.register("x", 1, **said)
    core.deregister("x")
    assert (core["x"].request.operators, core["x"].operators) == (None, {})
    core.register("holder", 1)
    assert core.register("y", 1, **said).reason_code == "too-many-waiting"
    core.register("y", 1, **said)
    assert core.decisions[-1].refused is None
    core.register("y", 1, **said, priority=3)
    assert "priority" in str(core.decisions[-1].refused)


@pytest.mark.parametrize("waited", [False, True])
def test_beyond_so_many_shared_devices_of_all_workers_one_is_told_so(waited: bool) -> None:
    """Each holder's record has all of them, so that they take devices times workers."""
    core = CoreDriver(m.ResourceSpec(name="net", shared=True), m.ResourceSpec(name="few", shared=True), max_items=100)
    core.report("n", resource="few")
    devices = [f"n{number}" for number in range(40)]
    if not waited:
        core.report(*devices, resource="net")
    for worker in "vwxy":
        core.register(worker, resources=asks(net=1))
    if waited:
        core.report(*devices, resource="net")
    assert [core.state(worker) for worker in "vwxy"] == ["allocated", "allocated", "failed", "failed"]
    assert core["x"].reason_code == "too-many-live"
    assert "would share 40 devices" in str(core["x"].reason)
    assert core.register("z", resources=asks(few=1)).state == "allocated"
    core.deregister("v")
    assert core.register("x", resources=asks(net=1), incarnation="2").state == "allocated"
    assert core.register("v", resources=asks(net=1), incarnation="2").reason_code == "too-many-live"
    assert core.restarted().host_state.items == core.host_state.items == 80


def test_a_final_record_leaves_out_shared_devices_where_they_are_many() -> None:
    core = CoreDriver(m.ResourceSpec(name="net", shared=True))
    core.report(*[f"n{number}" for number in range(40)], resource="net")
    core.register("w", resources=asks(net=1))
    core.deregister("w")
    assert (core["w"].state, core["w"].resources, core["w"].shared) == ("ended", {}, ["net"])
    core.report(*[f"n{number}" for number in range(30)], resource="net")
    core.register("v", resources=asks(net=1))
    core.deregister("v")
    assert len(core["v"].resources["net"]) == 30
    assert core.host_state.items == 0


def test_those_that_waited_for_a_shared_device_are_let_in_up_to_the_bound() -> None:
    core = CoreDriver(m.ResourceSpec(name="net", shared=True), max_live=2)
    for worker in "uvwx":
        assert core.register(worker, resources=asks(net=1)).state == "pending"
    core.report("n", resource="net")
    assert [core[worker].reason_code for worker in "uvwx"] == [None, None, "too-many-live", "too-many-live"]


def test_a_message_looks_at_few_ends_that_it_may_not_delete_yet_however_many_there_are() -> None:
    """A commit may have a thousand ends of one worker, and each of its messages would look at all of them."""
    looked_at = 0

    class Counted(list[tuple[datetime, AllocationKey]]):
        def __iter__(self) -> Iterator[tuple[datetime, AllocationKey]]:
            nonlocal looked_at
            for entry in super().__iter__():
                looked_at += 1
                yield entry

    core = CoreDriver(max_incarnations=4)
    for number in range(1000):
        core.register("w", 9, incarnation=f"{number}")
    builder = DecisionBuilder(core.ledger, core.rules, core.now, cause="register")
    assert ending.forgettable(builder, Counted(core.host_state.runs.past["w"]), 256) == []
    assert 0 < looked_at <= ending.LOOKED_AT
    core.commit()
    assert ending.forgettable(builder, Counted(core.host_state.runs.past["w"]), 2) == ["h/w/0", "h/w/1"]


def test_of_a_long_reason_the_beginning_is_kept_and_the_deregistration_obeyed() -> None:
    core = CoreDriver()
    core.report("a")
    core.register("w", 1)
    core.deregister("w", reason="x" * 60_000)
    assert core["w"].state == "ended"
    assert core["w"].reason == f"deregistered: {'x' * 256}… (the first 256 of 60000 characters)"
    assert all(len(step.explanation) < 400 for _, step in core.decisions[-1].history)


def test_of_too_many_that_are_over_those_that_ended_first_are_forgotten_before_their_time() -> None:
    core = CoreDriver(max_final=3, chunk=2)
    for number in range(8):
        core.deregister(f"w{number}")
        core.now += timedelta(seconds=1)
    assert core.host_state.runs.final_count == 8
    assert core.say(m.Tick(host="h")).changes == []  # it is not in the ledger yet how they ended
    assert is_due(core.ledger, core.rules, "h", core.now)
    core.pass_time(0)
    assert dropped(core) == [["h/w0/1", "h/w1/1"], ["h/w2/1", "h/w3/1"], ["h/w4/1"]]
    assert sorted(core.ledger.allocations) == ["h/w5/1", "h/w6/1", "h/w7/1"]
    assert not is_due(core.ledger, core.rules, "h", core.now)


def test_those_that_ended_in_one_second_go_up_to_the_bound_and_no_further() -> None:
    core = CoreDriver(max_final=3)
    for number in range(5):
        core.deregister(f"w{number}")
    core.pass_time(1)
    assert dropped(core) == [["h/w0/1", "h/w1/1"]]


def test_a_worker_that_is_started_again_and_again_is_remembered_by_its_last_runs() -> None:
    core = CoreDriver(max_incarnations=3)
    core.report("a", "b")
    core.register("w", 1, incarnation="first")  # holds on: nobody has seen it dead
    for number in range(1, 7):
        core.register("w", 1, incarnation=f"{number}")
        core.deregister("w", f"{number}")
        core.commit()
        core.now += timedelta(seconds=1)
    # one that holds a device is never forgotten, the runs before the last two are
    assert sorted(core.ledger.allocations) == ["h/w/5", "h/w/6", "h/w/first"]
    assert dropped(core) == [["h/w/1"], ["h/w/2"], ["h/w/3"], ["h/w/4"]]


def test_a_run_that_ends_because_of_a_newer_one_is_not_forgotten_in_the_same_breath() -> None:
    """Its worker has yet to hear of it: not before it must have been committed."""
    core = CoreDriver(max_incarnations=1)
    core.register("w", 1)
    core.register("w", 1, incarnation="2")
    assert (core.state("w"), core.state("w", "2")) == ("ended", "pending")
    core.register("w", 1, incarnation="3")
    assert dropped(core) == []
    core.commit()
    core.now += timedelta(seconds=1)
    core.register("w", 1, incarnation="4")
    assert dropped(core) == [["h/w/1", "h/w/2"]]


def storm(core: CoreDriver, kind: str, count: int, *, per_commit: int = 50) -> list[int]:
    """Many runs of one worker within a second; how many changes each message led to."""
    begun = len(core.decisions)
    for number in range(count):
        if kind == "unseen":
            core.deregister("w", f"unseen-{number}")
        else:
            core.register("w", 9 if kind == "fails" else 1, incarnation=f"{kind}-{number}")
        if number % per_commit == 0:
            core.commit()
    return [len(decision.changes) for decision in core.decisions[begun:]]


@pytest.mark.parametrize("kind", ["unseen", "fails", "waits"])
def test_however_fast_runs_of_one_worker_end_so_many_are_remembered_and_a_good_one_is_answered(kind: str) -> None:
    core = CoreDriver(max_incarnations=8, chunk=16)
    if kind == "fails":
        core.report("a", "b")
    changes = storm(core, kind, 1000)
    assert len(core.host_state.runs.incarnations["w"]) <= 8 + 2 * 50
    assert max(changes) <= 16
    core.commit()
    begun = len(core.decisions)
    good = core.register("w", 1, incarnation="good")
    assert good.state == ("allocated" if kind == "fails" else "pending")
    assert core.decisions[begun].renewed == ["h/w/good"]


def test_what_an_earlier_version_has_piled_up_goes_in_pieces() -> None:
    core = CoreDriver(max_incarnations=8, max_final=50, chunk=16)
    tight, core.rules = core.rules, structs.replace(core.rules, max_incarnations=10_000, max_final=10_000)
    storm(core, "unseen", 500)
    core.commit()
    core.rules = tight
    assert core.register("w", 1, incarnation="good").state == "pending"
    changes = []
    for number in range(40):
        core.commit()
        core.register("w", 1, incarnation=f"again-{number}")
        changes.append(len(core.decisions[-1].changes))
    assert max(changes) <= 16
    assert len(core.host_state.runs.incarnations["w"]) <= 8 + 2


def test_runs_that_hold_devices_are_neither_forgotten_nor_looked_at_again_and_again() -> None:
    core = CoreDriver(max_incarnations=4)
    for number in range(200):
        core.register("w", resources={}, incarnation=f"{number}")
    assert all(len(decision.changes) <= 2 and len(decision.final_leases) <= 1 for decision in core.decisions)
    assert len(core.host_state.holders.live) == 200
    assert all(core["w", f"{number}"].reason_code == "superseded" for number in range(199))


def test_a_flood_of_workers_that_end_is_forgotten_as_fast_as_it_comes() -> None:
    core = CoreDriver(max_final=10, chunk=4)
    for number in range(500):
        core.deregister(f"w{number}")
        if number % 20 == 0:
            core.commit()
    assert core.host_state.runs.final_count <= 10 + 2 * 20


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

    core = CoreDriver(max_incarnations=100_000)
    storm(core, "unseen", 2000)
    core.commit()
    host_state = core.host_state
    host_state.runs.incarnations["w"] = tuple(
        [(offset, Counted(key)) for offset, key in host_state.runs.incarnations["w"]]
    )
    host_state.runs.past["w"] = [(since, Counted(key)) for since, key in host_state.runs.past["w"]]
    change_all(core.ledger, [DropAllocation(f"h/w/unseen-{number}") for number in range(1000)])
    if takes_back:
        core.ledger.rollback()
    assert len(host_state.runs.incarnations["w"]) == (2000 if takes_back else 1000)
    assert Counted.compared < 2000 * 2 * 2 * 20


def test_what_nobody_has_configured_is_not_kept_for_others() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu"))
    core.report("a")
    request_check._alike.cache_clear()
    assert core.register("v", resources=asks(gpu=1, made_up=1)).state == "failed"
    assert request_check._alike.cache_info().currsize == 0


def test_records_of_workers_that_want_the_same_have_it_in_common() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"))
    core.report("a", "b", "c")
    core.report("f", "g", resource="fpga")
    one = core.register("v", resources=asks(gpu=1, fpga=1))
    same = core.register("w", resources=asks(gpu=1, fpga=1))
    other = core.register("x", resources=asks(gpu=1, fpga=0))
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
    core = CoreDriver(*specs, chunk=CHUNK)
    core.rules = structs.replace(core.rules, specs=counted)
    if state == "busy":
        for name in KINDS:
            core.report(*[f"{name}-{number}" for number in range(WAITING)], resource=name)
        core.register("holder", resources=asks(r0=1))
        for name in KINDS:
            core.register(f"holder-{name}", resources=asks(**{name: WAITING - (name == "r0")}))
    elif state == "failing":
        for name in KINDS:
            core.fail("for now", resource=name)
    for number, amounts in enumerate(requests_of(kind)):
        core.register(f"w{number}", resources=asks(**amounts))
    return core, counted


def work(kind: str, state: str) -> dict[str, int]:
    """The look-ups of the longest decision that each event leads to."""
    found: dict[str, int] = {}
    core, counted = crowded(kind, state)

    def measure(name: str, act: Callable[[], object]) -> None:
        longest = 0
        only = core.only

        def watched(event: m.Event) -> Decision:
            nonlocal longest
            counted.count = 0
            decided = decide(core.ledger, core.rules, event, core.now)
            longest = max(longest, counted.count)
            assert decision_of(decided) == only(event)
            return decision_of(decided)

        core.only = watched  # type: ignore[method-assign]
        act()
        core.only = only  # type: ignore[method-assign]
        found[name] = longest

    measure("register", lambda: core.register("new", resources=asks(r0=1)))
    measure("withdraw", lambda: core.deregister("w0"))
    measure("tick", lambda: core.pass_time(1))
    if state == "busy":
        measure("release", lambda: core.deregister("holder"))
    measure("report", lambda: core.report("another", resource="r0", asked=1))
    measure("failure", lambda: core.fail("again", resource="r0"))
    return found


@pytest.mark.parametrize("state", ["busy", "failing", "asking", "silent"])
@pytest.mark.parametrize("kind", ["amounts", "sets"])
def test_no_decision_takes_longer_because_those_who_wait_want_different_things(kind: str, state: str) -> None:
    usual, found = work("alike", state), work(kind, state)
    a_piece = (
        2 * SCANNED_PER_CHANGE * CHUNK * len(KINDS)
    )  # what one decision may look at, where those who wait have nothing in common
    assert {name: looks for name, looks in found.items() if looks > 10 * usual[name] + a_piece} == {}
