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
from support.core.core_driver import HOST, CoreDriver, asks, device, ill

ASKED = m.ResourceSpec(name="gpu", amount=1, on_demand=True)
SILENT = m.ResourceSpec(name="gpu", amount=1)
FPGA = m.ResourceSpec(name="fpga", amount=1)


def tick(core: CoreDriver, seconds: float = 0.25) -> None:
    """Time passes, and a manager looks at deadlines as it does four times a second."""
    core.now += timedelta(seconds=seconds)
    if is_due(core.ledger, core.rules, HOST, core.now):
        core.say(m.Tick(host=HOST))


@pytest.mark.parametrize("wait_s", [0, 0.1])
@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_who_can_not_wait_is_granted_what_is_free_when_its_driver_answers(spec: m.ResourceSpec, wait_s: float) -> None:
    core = CoreDriver(spec)
    assert core.register("w", 1, wait_s=wait_s).reason_code == "not-reported"
    tick(core, 5)
    assert core.state("w") == "pending"
    core.report("a", asked=1)
    assert core.has("w") == ["a"]
    assert core["w"].wait_until is None


@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_who_can_not_wait_gives_up_at_the_answer_if_nothing_is_free_then(spec: m.ResourceSpec) -> None:
    core = CoreDriver(spec)
    core.register("first", 1)
    core.register("w", 1, wait_s=0)
    core.register("patient", 1)
    tick(core, 5)
    core.report("a", asked=3)
    assert [core.state(worker) for worker in ("first", "w", "patient")] == ["allocated", "failed", "pending"]
    assert (core["w"].reason_code, core["w"].reason) == (
        "waited-too-long",
        "waited 0 s; last: waits for 1 gpu: 0 of 1 free",
    )


def test_who_can_not_wait_gives_up_at_once_where_all_drivers_have_answered() -> None:
    core = CoreDriver(SILENT)
    core.report("a")
    core.register("holder", 1)
    core.register("w", 1, wait_s=0)
    tick(core)
    assert core["w"].reason_code == "waited-too-long"


@pytest.mark.parametrize("wait_s", [0, 0.0, -0.0])
@pytest.mark.parametrize("spec", [ASKED, SILENT])
def test_a_failure_is_an_answer(spec: m.ResourceSpec, wait_s: float) -> None:
    core = CoreDriver(spec)
    core.register("w", 1, wait_s=wait_s)
    tick(core, 5)
    core.fail("it hangs")
    assert (core.state("w"), core["w"].reason) == ("failed", "waited 0 s; last: the driver of gpu failed: it hangs")


@pytest.mark.parametrize("first", ["gpu", "fpga"])
@pytest.mark.parametrize("wanted", [{"gpu": 1, "fpga": 1}, {"fpga": 1, "gpu": 1}])
def test_of_two_drivers_the_later_answer_decides(first: str, wanted: dict[str, int]) -> None:
    core = CoreDriver(SILENT, FPGA)
    second = {"gpu": "fpga", "fpga": "gpu"}[first]
    core.register("w", resources=asks(**wanted), wait_s=0)
    core.report("a", resource=first)
    tick(core, 5)
    assert core.state("w") == "pending"
    core.report("b", resource=second)
    assert core.state("w") == "allocated"


@pytest.mark.parametrize("wanted", [{"gpu": 1, "fpga": 1}, {"fpga": 1, "gpu": 1}])
def test_a_driver_that_failed_meanwhile_may_be_well_when_the_later_one_answers(wanted: dict[str, int]) -> None:
    core = CoreDriver(SILENT, FPGA)
    core.register("w", resources=asks(**wanted), wait_s=0)
    core.fail("for now")
    tick(core, 5)
    core.report("a")
    tick(core, 5)
    core.report("b", resource="fpga")
    assert core.state("w") == "allocated"


def test_a_driver_that_is_asked_for_another_first_is_asked_for_each() -> None:
    core = CoreDriver(ASKED)
    core.register("first", 1)
    core.register("w", 1, wait_s=0)
    tick(core, 5)
    core.report("a", asked=1)
    assert (core.state("first"), core.state("w")) == ("allocated", "pending")
    tick(core, 5)
    core.report("a", "b", asked=2)
    assert core.has("w") == ["b"]


def test_who_waits_already_gives_up_in_time_while_a_driver_is_asked_for_another() -> None:
    core = CoreDriver(ASKED)
    core.register("holder", 1)
    core.report("a", asked=1)
    core.register("w", 1, wait_s=10)
    core.report("a", asked=2)
    assert core["w"].reason_code == "busy"
    tick(core, 9)
    core.register("other", 1)
    tick(core, 1)
    assert core["w"].reason_code == "waited-too-long"


@pytest.mark.parametrize("spec", [ASKED, SILENT])
@pytest.mark.parametrize("free", [True, False])
def test_after_a_restart_it_is_decided_by_what_the_driver_says_then(spec: m.ResourceSpec, free: bool) -> None:
    core = CoreDriver(spec)
    core.register("w", 1, wait_s=0)
    core.now += timedelta(seconds=120)
    core = core.restarted()
    tick(core)
    assert core.state("w") == "pending"
    core.report(*(["a"] if free else []), asked=1)
    assert core.state("w") == ("allocated" if free else "failed")


def test_a_restart_gives_no_time_to_who_had_its_answer() -> None:
    core = CoreDriver(SILENT)
    core.report("a")
    core.register("holder", 1)
    core.register("w", 1, wait_s=10)
    core.now += timedelta(seconds=60)
    core = core.restarted()
    assert core["w"].reason_code == "waited-too-long"


def test_who_can_not_wait_is_not_passed_over_between_a_report_and_what_follows_from_it() -> None:
    core = CoreDriver(SILENT)
    core.register("w", 1, wait_s=0)
    report = m.DriverReport(host=HOST, resource="gpu", devices=(m.KnownDevice(id="a", properties={}),))
    follow_ups = core.only(report).follow_ups
    core.register("late", 1, wait_s=0)
    tick(core)
    for event in follow_ups:
        core.say(event)
    assert (core.state("w"), core.state("late")) == ("allocated", "failed")


def test_many_who_can_not_wait_cost_no_ticks_while_a_driver_is_asked() -> None:
    core = CoreDriver(SILENT)
    for number in range(20):
        core.register(f"w{number}", 1, wait_s=0)
    core.now += timedelta(seconds=1)
    assert not is_due(core.ledger, core.rules, HOST, core.now)
    core.rules = structs.replace(core.rules, chunk=3)
    core.report("a", "b")
    assert sorted(str(core.state(f"w{number}")) for number in range(20)) == ["allocated"] * 2 + ["failed"] * 18


@pytest.mark.parametrize("priority", [0, 1])
def test_who_registers_while_others_are_looked_at_anew_is_decided_when_that_is_done(priority: int) -> None:
    core = CoreDriver(SILENT, FPGA)
    core.report("a", ill("b"))
    core.register("big", 2)
    assert core["big"].reason_code == "infeasible"
    report = m.DriverReport(host=HOST, resource="fpga", devices=(m.KnownDevice(id="f", properties={}),))
    follow_ups = core.only(report).follow_ups
    core.offset += 1
    message = Register(host=HOST, worker="w", incarnation="1", resources=asks(gpu=1), wait_s=0, priority=priority)
    follow_ups += core.only(m.Incoming(message, Source(partition=0, offset=core.offset))).follow_ups
    core.now += timedelta(seconds=0.25)
    if is_due(core.ledger, core.rules, HOST, core.now):
        follow_ups += core.only(m.Tick(host=HOST)).follow_ups
    for event in follow_ups:
        core.say(event)
    assert core.has("w") == ["a"]


def test_who_waits_for_the_next_commit_is_looked_at_then_whoever_else_waits() -> None:
    """A worker whose earlier run ends in the same decision, which has no room for the grant as well."""
    net = m.ResourceSpec(name="net", shared=True)
    core = CoreDriver(SILENT, net)
    core.report("a")
    core.report(*[device(f"n{number}", aliases=(f"{'x' * 100}{number}",)) for number in range(20)], resource="net")
    core.register("holder", 1)
    core.register("both", resources=asks(gpu=1, net=1))
    most = (len(encode(core.register("probe", resources=asks(net=1)))) + 1000) * 8 // 7
    core.register("w", resources=asks(gpu=1, net=1), labels={"note": "x" * (most // 3)})
    core.rules = structs.replace(core.rules, max_bytes=most)
    core.offset += 1
    message = Register(host=HOST, worker="w", incarnation="2", resources=asks(net=1), wait_s=0)
    follow_ups = core.only(m.Incoming(message, Source(partition=0, offset=core.offset))).follow_ups
    assert (core.state("w", "2"), core["w", "2"].reason) == ("pending", reasons.NEXT_COMMIT)
    for event in follow_ups:
        core.say(event)
    assert core.state("w", "2") == "allocated"
