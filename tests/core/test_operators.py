"""Each operator has what it named, or its worker fails: also where a restart has made a shared resource exclusive."""

from __future__ import annotations

from typing import Any

import pytest

from outfitter_proto.records import Allocation
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import Ledger, PutAllocation, PutRecord
from support.core.core_driver import HOST, CoreDriver, asks

SHARED = m.ResourceSpec(name="gpu", amount=1, shared=True)
EXCLUSIVE = m.ResourceSpec(name="gpu", amount=1)
TWO = {"one": asks(gpu=1), "two": asks(gpu=1)}


def reconfigured(core: CoreDriver, *specs: m.ResourceSpec) -> CoreDriver:
    """Another manager, with other resources, that knows the records alone."""
    ledger = Ledger()
    ledger.restore(PutRecord(core.host_state.record))
    for record in core.ledger.allocations.values():
        ledger.restore(PutAllocation(record.key, record))
    ledger.resume(commit=core.ledger.commits, token=core.ledger.token)
    after = CoreDriver(*specs, ledger=ledger)
    after.now, after.offset = core.now, core.offset
    after.say(m.Reschedule(host=HOST))
    return after


def waiting(spec: m.ResourceSpec, amount: int, **fields: Any) -> CoreDriver:
    """A worker that waits for a driver which has not reported yet."""
    core = CoreDriver(spec)
    assert core.register("w", amount, **fields).reason_code == "not-reported"
    return core


def dealt(record: Allocation) -> dict[str, list[str]]:
    """The devices that each operator has to itself."""
    return {name: share.resources.get("gpu", []) for name, share in record.operators.items()}


def test_operators_that_shared_what_is_exclusive_now_fail_their_worker() -> None:
    core = reconfigured(waiting(SHARED, 1, operators=TWO), EXCLUSIVE)
    core.report("a", "b")
    record = core["w"]
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
    core = CoreDriver(SHARED)
    core.register("before", 1)
    core.register("w", 1, operators=TWO)
    core.register("behind", 1)
    core = reconfigured(core, EXCLUSIVE)
    assert [core.state(worker) for worker in ("before", "w", "behind")] == ["pending", "failed", "pending"]
    core.report(*(["a"] if scarce else ["a", "b"]))
    assert [core.state(worker) for worker in ("before", "w", "behind")] == [
        "allocated",
        "failed",
        "pending" if scarce else "allocated",
    ]


def test_operators_that_shared_have_devices_of_their_own_where_the_worker_asked_for_enough() -> None:
    core = reconfigured(waiting(SHARED, 2, operators=TWO), EXCLUSIVE)
    core.report("a", "b")
    assert dealt(core["w"]) == {"one": ["a"], "two": ["b"]}


def test_operators_that_were_to_have_devices_of_their_own_see_all_of_what_is_shared_now() -> None:
    core = reconfigured(waiting(EXCLUSIVE, 2, operators=TWO), SHARED)
    core.report("a", "b", "c")
    record = core["w"]
    assert [(share.resources, share.shared) for share in record.operators.values()] == [({}, ["gpu"])] * 2
    assert core.has("w") == ["a", "b", "c"]


def test_what_was_granted_stays_as_it_is() -> None:
    core = waiting(SHARED, 1, operators=TWO)
    core.report("a")
    granted = core["w"]
    core = reconfigured(core, EXCLUSIVE)
    core.report("a")
    assert core["w"] == granted


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
    core = CoreDriver(EXCLUSIVE)
    operators = {f"{'o' * 240}{number}": asks(gpu=number) for number in range(1, 257)}
    reason = core.register("w", 1, operators=operators).reason
    assert reason is not None
    assert "let the worker ask for 32896, or the operators for at most 1 together (" in reason
    assert f"{'o' * 240}256: 256" in reason
