"""`wait_s: 0` is now or never, and "now" is when the drivers have answered that are asked for the worker."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import structs

from outfitter_proto.codec import encode
from outfitter_proto.records import Register, Source
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.decide import is_due
from support.core_driver import HOST, CoreDriver, asks, device, ill

ASKED = m.ResourceSpec(name="gpu", amount=1, on_demand=True)
SILENT = m.ResourceSpec(name="gpu", amount=1)
FPGA = m.ResourceSpec(name="fpga", amount=1)


def tick(desk: CoreDriver, seconds: float = 0.25) -> None:
    """Time passes, and a manager looks at deadlines as it does four times a second."""
    desk.now += timedelta(seconds=seconds)
    if is_due(desk.ledger, desk.rules, HOST, desk.now):
        desk.say(m.Tick(host=HOST))


@pytest.mark.parametrize("wait_s", [0, 0.1])
@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_who_can_not_wait_is_granted_what_is_free_when_its_driver_answers(spec: m.ResourceSpec, wait_s: float) -> None:
    desk = CoreDriver(spec)
    assert desk.register("w", 1, wait_s=wait_s).reason_code == "not-reported"
    tick(desk, 5)
    assert desk.state("w") == "pending"
    desk.report("a", asked=1)
    assert desk.has("w") == ["a"]
    assert desk["w"].wait_until is None


@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_who_can_not_wait_gives_up_at_the_answer_if_nothing_is_free_then(spec: m.ResourceSpec) -> None:
    desk = CoreDriver(spec)
    desk.register("first", 1)
    desk.register("w", 1, wait_s=0)
    desk.register("patient", 1)
    tick(desk, 5)
    desk.report("a", asked=3)
    assert [desk.state(worker) for worker in ("first", "w", "patient")] == ["allocated", "failed", "pending"]
    assert (desk["w"].reason_code, desk["w"].reason) == (
        "waited-too-long",
        "waited 0 s; last: waits for 1 gpu: 0 of 1 free",
    )


def test_who_can_not_wait_gives_up_at_once_where_all_drivers_have_answered() -> None:
    desk = CoreDriver(SILENT)
    desk.report("a")
    desk.register("holder", 1)
    desk.register("w", 1, wait_s=0)
    tick(desk)
    assert desk["w"].reason_code == "waited-too-long"


@pytest.mark.parametrize("wait_s", [0, 0.0, -0.0])
@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_a_failure_is_an_answer(spec: m.ResourceSpec, wait_s: float) -> None:
    desk = CoreDriver(spec)
    desk.register("w", 1, wait_s=wait_s)
    tick(desk, 5)
    desk.fail("it hangs")
    assert (desk.state("w"), desk["w"].reason) == ("failed", "waited 0 s; last: the driver of gpu failed: it hangs")


@pytest.mark.parametrize("first", ["gpu", "fpga"])
@pytest.mark.parametrize("wanted", [{"gpu": 1, "fpga": 1}, {"fpga": 1, "gpu": 1}])
def test_of_two_drivers_the_later_answer_decides(first: str, wanted: dict[str, int]) -> None:
    desk = CoreDriver(SILENT, FPGA)
    second = {"gpu": "fpga", "fpga": "gpu"}[first]
    desk.register("w", resources=asks(**wanted), wait_s=0)
    desk.report("a", resource=first)
    tick(desk, 5)
    assert desk.state("w") == "pending"
    desk.report("b", resource=second)
    assert desk.state("w") == "allocated"


@pytest.mark.parametrize("wanted", [{"gpu": 1, "fpga": 1}, {"fpga": 1, "gpu": 1}])
def test_a_driver_that_failed_meanwhile_may_be_well_when_the_later_one_answers(wanted: dict[str, int]) -> None:
    desk = CoreDriver(SILENT, FPGA)
    desk.register("w", resources=asks(**wanted), wait_s=0)
    desk.fail("for now")
    tick(desk, 5)
    desk.report("a")
    tick(desk, 5)
    desk.report("b", resource="fpga")
    assert desk.state("w") == "allocated"


def test_a_driver_that_is_asked_for_another_first_is_asked_for_each() -> None:
    desk = CoreDriver(ASKED)
    desk.register("first", 1)
    desk.register("w", 1, wait_s=0)
    tick(desk, 5)
    desk.report("a", asked=1)
    assert (desk.state("first"), desk.state("w")) == ("allocated", "pending")
    tick(desk, 5)
    desk.report("a", "b", asked=2)
    assert desk.has("w") == ["b"]


def test_who_waits_already_gives_up_in_time_while_a_driver_is_asked_for_another() -> None:
    desk = CoreDriver(ASKED)
    desk.register("holder", 1)
    desk.report("a", asked=1)
    desk.register("w", 1, wait_s=10)
    desk.report("a", asked=2)
    assert desk["w"].reason_code == "busy"
    tick(desk, 9)
    desk.register("other", 1)
    tick(desk, 1)
    assert desk["w"].reason_code == "waited-too-long"


@pytest.mark.parametrize("spec", [ASKED, SILENT])
@pytest.mark.parametrize("free", [True, False])
def test_after_a_restart_it_is_decided_by_what_the_driver_says_then(spec: m.ResourceSpec, free: bool) -> None:
    desk = CoreDriver(spec)
    desk.register("w", 1, wait_s=0)
    desk.now += timedelta(seconds=120)
    desk = desk.restarted()
    tick(desk)
    assert desk.state("w") == "pending"
    desk.report(*(["a"] if free else []), asked=1)
    assert desk.state("w") == ("allocated" if free else "failed")


def test_a_restart_gives_no_time_to_who_had_its_answer() -> None:
    desk = CoreDriver(SILENT)
    desk.report("a")
    desk.register("holder", 1)
    desk.register("w", 1, wait_s=10)
    desk.now += timedelta(seconds=60)
    desk = desk.restarted()
    assert desk["w"].reason_code == "waited-too-long"


def test_who_can_not_wait_is_not_passed_over_between_a_report_and_what_follows_from_it() -> None:
    desk = CoreDriver(SILENT)
    desk.register("w", 1, wait_s=0)
    report = m.DriverReport(host=HOST, resource="gpu", devices=(m.KnownDevice(id="a", properties={}),))
    follow_ups = desk.only(report).follow_ups
    desk.register("late", 1, wait_s=0)
    tick(desk)
    for event in follow_ups:
        desk.say(event)
    assert (desk.state("w"), desk.state("late")) == ("allocated", "failed")


def test_many_who_can_not_wait_cost_no_ticks_while_a_driver_is_asked() -> None:
    desk = CoreDriver(SILENT)
    for number in range(20):
        desk.register(f"w{number}", 1, wait_s=0)
    desk.now += timedelta(seconds=1)
    assert not is_due(desk.ledger, desk.rules, HOST, desk.now)
    desk.rules = structs.replace(desk.rules, chunk=3)
    desk.report("a", "b")
    assert sorted(str(desk.state(f"w{number}")) for number in range(20)) == ["allocated"] * 2 + ["failed"] * 18


@pytest.mark.parametrize("priority", [0, 1])
def test_who_registers_while_others_are_looked_at_anew_is_decided_when_that_is_done(priority: int) -> None:
    desk = CoreDriver(SILENT, FPGA)
    desk.report("a", ill("b"))
    desk.register("big", 2)
    assert desk["big"].reason_code == "infeasible"
    report = m.DriverReport(host=HOST, resource="fpga", devices=(m.KnownDevice(id="f", properties={}),))
    follow_ups = desk.only(report).follow_ups
    desk.offset += 1
    message = Register(host=HOST, worker="w", incarnation="1", resources=asks(gpu=1), wait_s=0, priority=priority)
    follow_ups += desk.only(m.Incoming(message, Source(partition=0, offset=desk.offset))).follow_ups
    desk.now += timedelta(seconds=0.25)
    if is_due(desk.ledger, desk.rules, HOST, desk.now):
        follow_ups += desk.only(m.Tick(host=HOST)).follow_ups
    for event in follow_ups:
        desk.say(event)
    assert desk.has("w") == ["a"]


def test_who_waits_for_the_next_commit_is_looked_at_then_whoever_else_waits() -> None:
    """A worker whose earlier run ends in the same decision, which has no room for the grant as well."""
    net = m.ResourceSpec(name="net", shared=True)
    desk = CoreDriver(SILENT, net)
    desk.report("a")
    desk.report(*[device(f"n{number}", aliases=(f"{'x' * 100}{number}",)) for number in range(20)], resource="net")
    desk.register("holder", 1)
    desk.register("both", resources=asks(gpu=1, net=1))
    most = (len(encode(desk.register("probe", resources=asks(net=1)))) + 1000) * 8 // 7
    desk.register("w", resources=asks(gpu=1, net=1), labels={"note": "x" * (most // 3)})
    desk.rules = structs.replace(desk.rules, max_bytes=most)
    desk.offset += 1
    message = Register(host=HOST, worker="w", incarnation="2", resources=asks(net=1), wait_s=0)
    follow_ups = desk.only(m.Incoming(message, Source(partition=0, offset=desk.offset))).follow_ups
    assert (desk.state("w", "2"), desk["w", "2"].reason) == ("pending", reasons.NEXT_COMMIT)
    for event in follow_ups:
        desk.say(event)
    assert desk.state("w", "2") == "allocated"
