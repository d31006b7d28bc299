"""Each operator has what it named, or its worker fails: also where a restart has made a shared resource exclusive."""

from __future__ import annotations

from typing import Any

import pytest

from outfitter_proto.records import Allocation
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from support.core_driver import HOST, CoreDriver, asks

SHARED = m.ResourceSpec(name="gpu", amount=1, shared=True)
EXCLUSIVE = m.ResourceSpec(name="gpu", amount=1)
TWO = {"one": asks(gpu=1), "two": asks(gpu=1)}


def reconfigured(desk: CoreDriver, *specs: m.ResourceSpec) -> CoreDriver:
    """Another manager, with other resources, that knows the records alone."""
    ledger = Ledger()
    ledger.restore(PutRecord(desk.host_state.record))
    for record in desk.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.resume(commit=desk.ledger.commits, token=desk.ledger.token)
    after = CoreDriver(*specs, ledger=ledger)
    after.now, after.offset = desk.now, desk.offset
    after.say(m.Reschedule(host=HOST))
    return after


def waiting(spec: m.ResourceSpec, amount: int, **fields: Any) -> CoreDriver:
    """A worker that waits for a driver which has not reported yet."""
    desk = CoreDriver(spec)
    assert desk.register("w", amount, **fields).reason_code == "not-reported"
    return desk


def dealt(record: Allocation) -> dict[str, list[str]]:
    """The devices that each operator has to itself."""
    return {name: share.resources.get("gpu", []) for name, share in record.operators.items()}


def test_operators_that_shared_what_is_exclusive_now_fail_their_worker() -> None:
    desk = reconfigured(waiting(SHARED, 1, operators=TWO), EXCLUSIVE)
    desk.report("a", "b")
    record = desk["w"]
    assert (record.state, record.reason_code, dealt(record)) == ("failed", "invalid-request", {})
    assert record.reason == (
        "the operators ask for 2 gpu together, the worker for 1; gpu is not shared here: let the worker ask for 2, "
        "or the operators for at most 1 together (one: 1, two: 1)"
    )


def test_they_fail_at_the_restart_whatever_drivers_say() -> None:
    assert reconfigured(waiting(SHARED, 1, operators=TWO), EXCLUSIVE).state("w") == "failed"


@pytest.mark.parametrize("scarce", [False, True])
def test_they_keep_nobody_waiting_who_wants_the_same(scarce: bool) -> None:
    """Before them or behind them."""
    desk = CoreDriver(SHARED)
    desk.register("before", 1)
    desk.register("w", 1, operators=TWO)
    desk.register("behind", 1)
    desk = reconfigured(desk, EXCLUSIVE)
    assert [desk.state(worker) for worker in ("before", "w", "behind")] == ["pending", "failed", "pending"]
    desk.report(*(["a"] if scarce else ["a", "b"]))
    assert [desk.state(worker) for worker in ("before", "w", "behind")] == [
        "allocated",
        "failed",
        "pending" if scarce else "allocated",
    ]


def test_operators_that_shared_have_devices_of_their_own_where_the_worker_asked_for_enough() -> None:
    desk = reconfigured(waiting(SHARED, 2, operators=TWO), EXCLUSIVE)
    desk.report("a", "b")
    assert dealt(desk["w"]) == {"one": ["a"], "two": ["b"]}


def test_operators_that_were_to_have_devices_of_their_own_see_all_of_what_is_shared_now() -> None:
    desk = reconfigured(waiting(EXCLUSIVE, 2, operators=TWO), SHARED)
    desk.report("a", "b", "c")
    record = desk["w"]
    assert [(share.resources, share.shared) for share in record.operators.values()] == [({}, ["gpu"])] * 2
    assert desk.has("w") == ["a", "b", "c"]


def test_what_was_granted_stays_as_it_is() -> None:
    desk = waiting(SHARED, 1, operators=TWO)
    desk.report("a")
    granted = desk["w"]
    desk = reconfigured(desk, EXCLUSIVE)
    desk.report("a")
    assert desk["w"] == granted


def test_a_worker_whose_resource_is_switched_off_meanwhile_goes_on_without_it_if_it_may() -> None:
    off = m.ResourceSpec(name="gpu", state=m.SpecState.DISABLED, on_failure=m.OnFailure.NO_INFO)
    record = reconfigured(waiting(SHARED, 1, operators=TWO), off)["w"]
    assert (record.state, list(record.unavailable), dealt(record)) == ("allocated", ["gpu"], {"one": [], "two": []})


def test_a_registration_whose_operators_ask_for_too_much_is_told_what_may_be_asked_for() -> None:
    operators = {"one": asks(gpu=1), "two": asks(gpu=3)}
    exclusive, shared = [CoreDriver(spec).register("w", 2, operators=operators) for spec in (EXCLUSIVE, SHARED)]
    assert exclusive.reason == (
        "the operators ask for 4 gpu together, the worker for 2; gpu is not shared here: let the worker ask for 4, "
        "or the operators for at most 2 together (two: 3, one: 1)"
    )
    assert shared.reason == (
        "an operator asks for 3 gpu, the worker for 2; let the worker ask for 3, or each operator for at most 2 "
        "(two: 3, one: 1)"
    )
    assert {exclusive.reason_code, shared.reason_code} == {"invalid-request"}


def test_of_many_operators_with_long_names_the_largest_are_named_and_what_may_be_asked_for_is_not_cut_off() -> None:
    desk = CoreDriver(EXCLUSIVE)
    operators = {f"{'o' * 240}{number}": asks(gpu=number) for number in range(1, 257)}
    reason = desk.register("w", 1, operators=operators).reason
    assert reason is not None
    assert "let the worker ask for 32896, or the operators for at most 1 together (" in reason
    assert f"{'o' * 240}256: 256" in reason
