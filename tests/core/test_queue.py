"""Who is next: priority, first registration, and who blocks whom."""

import pytest

from outfitter_service.core import model as m
from outfitter_service.core.decide import SHOWN_POSITIONS, renumber
from support.core.core_driver import CoreDriver, asks, device, ill

GPU = m.ResourceSpec(name="gpu", amount=1)
FPGA = m.ResourceSpec(name="fpga", amount=1)


def full_core(*resources: m.ResourceSpec, **rules: int) -> CoreDriver:
    """One gpu and one fpga, both held by `holder` and `fholder`."""
    core = CoreDriver(*(resources or (GPU, FPGA)), **rules)
    core.report("g")
    core.report("f", resource="fpga")
    core.register("holder", 1)
    core.register("fholder", resources=asks(fpga=1))
    return core


def test_the_one_who_registered_first_is_next() -> None:
    core = full_core()
    core.register("b", 1)
    core.register("a", 1)
    core.deregister("holder")
    assert (core.state("b"), core.state("a")) == ("allocated", "pending")


def test_a_higher_priority_is_next_whenever_it_registered() -> None:
    core = full_core()
    core.register("early", 1)
    core.register("urgent", 1, priority=5)
    assert core["urgent"].queue_position == 1
    assert core["early"].queue_position == 2
    core.deregister("holder")
    assert (core.state("urgent"), core.state("early")) == ("allocated", "pending")


def test_registering_again_does_not_change_the_place_in_the_queue() -> None:
    core = full_core()
    core.register("a", 1)
    core.register("b", 1)
    core.register("a", 1)
    core.deregister("holder")
    assert core.state("a") == "allocated"


def test_nobody_overtakes_a_feasible_waiter_that_wants_the_same_resource() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    core.register("big", 2)
    record = core.register("small", 1)
    assert (record.state, record.reason_code) == ("pending", "busy")
    assert record.reason == "waits behind earlier workers that want gpu"
    core.deregister("holder")
    assert (core.state("big"), core.state("small")) == ("allocated", "pending")


def test_a_release_that_is_not_enough_for_the_first_serves_nobody_behind_it() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b", "c")
    core.register("one", 1)
    core.register("two", 1)
    core.register("big", 3)
    core.register("small", 1)
    core.deregister("one")
    assert (core.state("big"), core.state("small")) == ("pending", "pending")
    core.deregister("two")
    assert (core.state("big"), core.state("small")) == ("allocated", "pending")


def test_a_newcomer_with_higher_priority_does_not_stand_behind_earlier_waiters() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    core.register("big", 2)
    assert core.register("small", 1, priority=1).state == "allocated"


def test_a_waiter_that_wants_other_resources_is_overtaken() -> None:
    core = full_core()
    core.register("wants-gpu", 1)
    core.register("wants-fpga", resources=asks(fpga=1))
    core.deregister("fholder")
    assert (core.state("wants-gpu"), core.state("wants-fpga")) == ("pending", "allocated")


def test_a_waiter_claims_all_its_resources_while_it_waits_for_one() -> None:
    core = full_core()
    core.register("both", resources=asks(gpu=1, fpga=1))
    core.deregister("fholder")
    assert core.register("late", resources=asks(fpga=1)).reason_code == "busy"
    core.deregister("both")
    assert core.state("late") == "allocated"


def test_a_waiter_that_can_not_be_served_now_whatever_happens_blocks_nobody() -> None:
    core = CoreDriver(GPU)
    core.report("a", ill("b"))
    assert core.register("infeasible", 2).reason_code == "infeasible"
    assert core.register("small", 1).state == "allocated"


def test_a_waiter_whose_driver_has_not_reported_blocks_nobody() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report("a")
    assert core.register("silent", resources=asks(gpu=1, fpga=1)).reason_code == "not-reported"
    assert core.register("w", 1).state == "allocated"


def test_a_waiter_whose_driver_failed_for_now_blocks_nobody() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report("a")
    core.fail("for now", resource="fpga")
    assert core.register("unlucky", resources=asks(gpu=1, fpga=1)).reason_code == "driver-failed"
    assert core.register("w", 1).state == "allocated"


def test_nobody_overtakes_between_a_report_and_what_follows_from_it() -> None:
    core = CoreDriver(GPU)
    core.register("first", 1)
    follow_ups = core.only(
        m.DriverReport(host="h", resource="gpu", devices=(m.KnownDevice(id="a", properties={}),))
    ).follow_ups
    assert core.register("second", 1).state == "pending"
    assert core.state("first") == "pending"
    for event in follow_ups:
        core.say(event)
    assert (core.state("first"), core.state("second")) == ("allocated", "pending")


def test_one_release_serves_all_whom_it_can_serve() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b", "c")
    core.register("holder", 3)
    for worker in ("w1", "w2", "w3", "w4"):
        core.register(worker, 1)
    core.deregister("holder")
    assert [core.state(worker) for worker in ("w1", "w2", "w3", "w4")] == ["allocated"] * 3 + ["pending"]


def test_a_withdrawn_waiter_frees_the_way_for_those_behind() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    core.register("big", 2)
    core.register("small", 1)
    core.deregister("big")
    assert (core.state("big"), core["big"].reason_code) == ("ended", "withdrawn")
    assert core.state("small") == "allocated"


def test_a_new_incarnation_of_a_waiter_goes_to_the_end_of_the_queue() -> None:
    core = full_core()
    core.register("a", 1)
    core.register("b", 1)
    core.register("a", 1, incarnation="2")
    assert core["a", "1"].reason_code == "superseded"
    core.deregister("holder")
    assert (core.state("b"), core.state("a", "2")) == ("allocated", "pending")


def test_a_new_incarnation_is_served_at_once_if_only_its_predecessor_was_in_the_way() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    core.register("big", 2)
    assert core.register("big", 1, incarnation="2").state == "allocated"


# --- wait_s --------------------------------------------------------------------------------------------


def test_a_waiter_gives_up_at_its_deadline_and_says_what_it_waited_for() -> None:
    core = full_core()
    record = core.register("w", 1, wait_s=10)
    assert record.wait_until is not None
    core.pass_time(9.9)
    assert core.state("w") == "pending"
    core.pass_time(0.1)
    assert (core.state("w"), core["w"].reason_code) == ("failed", "waited-too-long")
    assert core["w"].reason == "waited 10 s; last: waits for 1 gpu: 0 of 1 free"


def test_a_waiter_that_gave_up_frees_the_way_for_those_behind() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    core.register("big", 2, wait_s=1)
    core.register("small", 1)
    core.pass_time(1)
    assert core.state("small") == "allocated"


def test_nobody_is_granted_anything_after_its_deadline() -> None:
    core = full_core()
    core.register("w", 1, wait_s=10)
    core.now = core["w"].wait_until
    core.deregister("holder")
    assert core["w"].reason_code == "waited-too-long"


def test_a_grant_ends_the_deadline() -> None:
    core = full_core()
    core.register("w", 1, wait_s=10)
    core.deregister("holder")
    core.pass_time(60)
    assert core.state("w") == "allocated"
    assert core["w"].wait_until is None


# --- positions -----------------------------------------------------------------------------------------


def test_positions_are_exact_in_front_and_move_up() -> None:
    core = full_core()
    for i in range(5):
        core.register(f"w{i}", 1)
    assert [core[f"w{i}"].queue_position for i in range(5)] == [1, 2, 3, 4, 5]
    core.deregister("holder")
    assert [core[f"w{i}"].queue_position for i in range(5)] == [None, 1, 2, 3, 4]


def test_who_is_pushed_out_of_the_shown_positions_is_told_its_new_one() -> None:
    core = full_core()
    for i in range(SHOWN_POSITIONS + 3):
        core.register(f"w{i}", 1)
    core.register("urgent", 1, priority=1)
    shown = [core[f"w{i}"].queue_position for i in range(SHOWN_POSITIONS)]
    assert shown == list(range(2, SHOWN_POSITIONS + 2))


def test_to_renumber_a_host_that_is_gone_brings_nothing_back() -> None:
    """An empty host state would count as one of the hosts there may be."""
    core = full_core()
    assert renumber(core.ledger, core.rules, "gone") == []
    assert "gone" not in core.ledger.hosts


def test_renumbering_writes_no_history() -> None:
    core = full_core()
    core.register("a", 1)
    core.register("b", 1)
    before = core["b"].since
    decision = core.deregister("holder")
    assert [step.worker for _, step in decision.history] == ["holder", "a"]
    assert (core["b"].queue_position, core["b"].since) == (1, before)


# --- bounded effects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_large_effect_is_cut_in_pieces_and_comes_to_the_same(chunk: int) -> None:
    core = full_core(chunk=chunk)
    for i in range(10):
        core.register(f"w{i}", 1)
    core.decisions.clear()
    core.report("g", *(f"g{i}" for i in range(9)))
    assert [core.state(f"w{i}") for i in range(10)] == ["allocated"] * 9 + ["pending"]
    assert all(len(decision.changes) <= 2 * chunk + 3 for decision in core.decisions)


def test_a_newcomer_between_two_pieces_overtakes_nobody() -> None:
    core = full_core(chunk=2)
    for i in range(4):
        core.register(f"w{i}", 1)
    devices = tuple(device(name) for name in ("g", "g0", "g1", "g2", "g3"))
    waiting = core.only(m.DriverReport(host="h", resource="gpu", devices=devices)).follow_ups
    waiting = [later for event in waiting for later in core.only(event).follow_ups]
    assert core.state("w3") == "pending"
    assert core.register("newcomer", 1).state == "pending"
    for event in waiting:
        core.say(event)
    assert core.state("w3") == "allocated"
    assert core.state("newcomer") == "pending"


def test_many_deadlines_at_once_are_cut_in_pieces() -> None:
    core = full_core(chunk=2)
    core.register("patient", 1)
    for i in range(7):
        core.register(f"w{i}", 1, wait_s=1)
    core.pass_time(2)
    assert {core.state(f"w{i}") for i in range(7)} == {"failed"}


def test_everybody_in_the_queue_is_told_when_the_reason_changes() -> None:
    core = full_core(chunk=2)
    for i in range(7):
        core.register(f"w{i}", 1)
    core.report("g", ill("g2"))
    assert {core[f"w{i}"].reason for i in range(1, 7)} == {"waits for 1 gpu: 0 of 2 free, 1 not healthy"}
    core.fail("gone for now")
    assert {core[f"w{i}"].reason_code for i in range(7)} == {"driver-failed"}


def test_a_release_between_a_report_and_what_follows_from_it_is_left_to_those_who_are_first() -> None:
    core = full_core()
    core.report("g", ill("g2"))
    core.register("first", 2)
    assert core["first"].reason_code == "infeasible"
    core.register("second", 1)
    follow_ups = core.only(
        m.DriverReport(
            host="h", resource="gpu", devices=tuple(m.KnownDevice(id=one, properties={}) for one in ("g", "g2"))
        )
    ).follow_ups
    core.only(m.OwnerDied(allocation="h/holder/1", detail="gone"))
    assert (core.state("first"), core.state("second")) == ("pending", "pending")
    for event in follow_ups:
        core.say(event)
    assert (core.state("first"), core.state("second")) == ("allocated", "pending")
