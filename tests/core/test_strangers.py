"""A device that a process uses to which it was not lent is lent to nobody, and whoever holds it keeps it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from outfitter_proto.records import Allocation, Health, Host, ResourceRequest, Transition
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import PutRecord
from support.core.core_driver import CoreDriver, asks, device

CHECKS = m.ResourceSpec(name="gpu", amount=1, confirms=True)
PYTHON = "process 4711 (python) of ada"


def used(name: str, by: str = PYTHON, **fields: Any) -> m.KnownDevice:
    return device(name, used_by=by, **fields)


def recorded(core: CoreDriver) -> list[tuple[str, object]]:
    """The devices in the host's record, each with the stranger that uses it."""
    host = core.host_state.record
    assert isinstance(host, Host)
    return [(each.id, each.used_by or None) for each in host.resources["gpu"].devices]


def granted(core: CoreDriver, worker: str) -> Transition:
    """The step by which a worker got its devices."""
    steps = [step for decision in core.decisions for _, step in decision.history if isinstance(step, Transition)]
    return next(step for step in steps if step.worker == worker and step.to == "allocated")


def test_a_worker_gets_another_device_than_the_one_that_a_stranger_uses() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), "b")
    core.register("w", 1)
    assert core.has("w") == ["b"]
    assert recorded(core) == [("a", PYTHON), ("b", None)]


def test_a_worker_that_lacks_it_waits_with_the_strangers_name_and_gets_it_when_that_has_gone() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), "b")
    record = core.register("w", 2)
    assert (record.state, record.reason_code) == ("pending", "used-by-stranger")
    assert record.reason == (
        f"2 gpu requested, 1 of 2 can be lent; 1 used by {PYTHON}, which Outfitter did not lend to; "
        "granted when enough are used no more"
    )
    core.report("a", "b")
    assert core.has("w") == ["a", "b"]


def test_whoever_waits_for_it_claims_nothing() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), "b")
    core.register("large", 2)
    core.register("small", 1)
    assert (core.state("large"), core.has("small")) == ("pending", ["b"])


def test_a_reason_names_the_first_strangers_and_how_many_devices_they_use() -> None:
    core = CoreDriver(CHECKS)
    core.report(*[used(str(number), f"process {number} (x) of ada") for number in range(5)])
    assert core.register("w", 1).reason == (
        "1 gpu requested, 0 of 5 can be lent; 5 used by process 0 (x) of ada, process 1 (x) of ada, process 2 (x) of "
        "ada, …, which Outfitter did not lend to; granted when enough are used no more"
    )


def test_whoever_holds_a_device_keeps_it_when_a_stranger_comes_and_hears_nothing_of_illness() -> None:
    core = CoreDriver(CHECKS)
    core.report("a")
    before = core.register("w", 1)
    core.report(used("a"))
    assert core["w"] == before
    assert recorded(core) == [("a", PYTHON)]


@pytest.mark.parametrize(
    ("others", "code", "words"),
    [
        ([device("b", health=Health.UNHEALTHY, reason="XID 79")], "infeasible", "1 of 2 healthy; 1 used by process"),
        ([], "cordoned", "0 of 1 can be lent"),
    ],
)
def test_illness_and_orders_weigh_more_and_the_stranger_is_named_beside_them(
    others: list[m.KnownDevice], code: str, words: str
) -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), *others)
    if code == "cordoned":
        core.cordon(device="a")
    record = core.register("w", 1 + len(others))
    assert record.reason_code == code
    assert words in (record.reason or "")


def test_of_an_order_and_a_stranger_on_two_devices_the_order_is_told_and_both_are_named() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), "b")
    core.cordon(device="b")
    record = core.register("w", 2)
    assert record.reason_code == "cordoned"
    assert PYTHON in (record.reason or "")
    core.register("less", 1)
    core.cordon(device="b", ended_at=core.now)
    assert (core.has("less"), core["w"].reason_code) == (["b"], "used-by-stranger")


def test_a_worker_that_waits_for_held_devices_reads_of_the_stranger_as_well() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"), "b")
    core.register("holder", 1)
    record = core.register("w", 1)
    assert record.reason_code == "busy"
    assert record.reason == f"waits for 1 gpu: 0 of 2 free; 1 used by {PYTHON}, which Outfitter did not lend to"


def test_another_pid_on_the_same_device_has_no_waiter_evaluated_again() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"))
    before = core.register("w", 1)
    core.report(used("a", "process 4712 (python) of ada"))
    assert core["w"] == before
    assert recorded(core) == [("a", "process 4712 (python) of ada")]


def test_that_nobody_can_tell_lends_as_ever_and_history_says_why() -> None:
    core = CoreDriver(CHECKS)
    core.report(device("a", untold="nvidia-smi ended with exit code 1"), "b")
    core.register("w", 1)
    step = granted(core, "w")
    assert (step.confirmed, step.explanation) == (False, "granted (unconfirmed: nvidia-smi ended with exit code 1)")
    core.register("x", 1)
    assert (granted(core, "x").confirmed, granted(core, "x").explanation) == (None, "granted")


def test_that_nobody_can_tell_writes_no_record() -> None:
    core = CoreDriver(CHECKS)
    core.report("a")
    decision = core.report(device("a", untold="its library is too old"))
    assert not [change for change in decision.changes if isinstance(change, PutRecord)]


def test_devices_that_share_a_name_are_used_by_whoever_uses_one_of_them() -> None:
    core = CoreDriver(CHECKS)
    core.report(device("a", aliases=("x",)), used("b", aliases=("x",)))
    assert core.register("w", 1).reason_code == "used-by-stranger"


@pytest.mark.parametrize("where", [UNSET, {"index": ("a", "b")}])
def test_resources_with_the_same_devices_lack_what_a_stranger_uses_in_both(where: Any) -> None:
    core = CoreDriver(CHECKS, m.ResourceSpec(name="cuda", amount=1))
    core.report(used("a"), "b")
    core.report(used("a"), "b", resource="cuda")
    record = core.register("w", resources={**asks(cuda=1), "gpu": ResourceRequest(amount=1, where=where)})
    assert record.reason_code == "used-by-stranger"
    assert "used by no process to which they were not lent" in (record.reason or "")
    core.report("a", "b")
    core.report("a", "b", resource="cuda")
    assert isinstance(core["w"], Allocation)
    assert core.state("w") == "allocated"


def test_after_a_restart_a_stranger_counts_once_the_driver_has_looked() -> None:
    core = CoreDriver(CHECKS)
    core.report(used("a"))
    again = core.restarted()
    assert again.register("w", 1).reason_code == "not-reported"
    again.report(used("a"))
    assert again["w"].reason_code == "used-by-stranger"
