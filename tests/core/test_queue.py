"""Who is next: priority, first registration, and who blocks whom."""

import pytest

from outfitter_service.core import model as m
from outfitter_service.core.decide import SHOWN_POSITIONS, renumber
from support.core_driver import CoreDriver, asks, device, ill

GPU = m.ResourceSpec(name="gpu", amount=1)
FPGA = m.ResourceSpec(name="fpga", amount=1)


def full_desk(*resources: m.ResourceSpec, **rules: int) -> CoreDriver:
    """One gpu and one fpga, both held by `holder` and `fholder`."""
    desk = CoreDriver(*(resources or (GPU, FPGA)), **rules)
    desk.report("g")
    desk.report("f", resource="fpga")
    desk.register("holder", 1)
    desk.register("fholder", resources=asks(fpga=1))
    return desk


def test_the_one_who_registered_first_is_next() -> None:
    desk = full_desk()
    desk.register("b", 1)
    desk.register("a", 1)
    desk.deregister("holder")
    assert (desk.state("b"), desk.state("a")) == ("allocated", "pending")


def test_a_higher_priority_is_next_whenever_it_registered() -> None:
    desk = full_desk()
    desk.register("early", 1)
    desk.register("urgent", 1, priority=5)
    assert desk["urgent"].queue_position == 1
    assert desk["early"].queue_position == 2
    desk.deregister("holder")
    assert (desk.state("urgent"), desk.state("early")) == ("allocated", "pending")


def test_registering_again_does_not_change_the_place_in_the_queue() -> None:
    desk = full_desk()
    desk.register("a", 1)
    desk.register("b", 1)
    desk.register("a", 1)
    desk.deregister("holder")
    assert desk.state("a") == "allocated"


def test_nobody_overtakes_a_feasible_waiter_that_wants_the_same_resource() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("holder", 1)
    desk.register("big", 2)
    record = desk.register("small", 1)
    assert (record.state, record.reason_code) == ("pending", "busy")
    assert record.reason == "waits behind earlier workers that want gpu"
    desk.deregister("holder")
    assert (desk.state("big"), desk.state("small")) == ("allocated", "pending")


def test_a_release_that_is_not_enough_for_the_first_serves_nobody_behind_it() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b", "c")
    desk.register("one", 1)
    desk.register("two", 1)
    desk.register("big", 3)
    desk.register("small", 1)
    desk.deregister("one")
    assert (desk.state("big"), desk.state("small")) == ("pending", "pending")
    desk.deregister("two")
    assert (desk.state("big"), desk.state("small")) == ("allocated", "pending")


def test_a_newcomer_with_higher_priority_does_not_stand_behind_earlier_waiters() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("holder", 1)
    desk.register("big", 2)
    assert desk.register("small", 1, priority=1).state == "allocated"


def test_a_waiter_that_wants_other_resources_is_overtaken() -> None:
    desk = full_desk()
    desk.register("wants-gpu", 1)
    desk.register("wants-fpga", resources=asks(fpga=1))
    desk.deregister("fholder")
    assert (desk.state("wants-gpu"), desk.state("wants-fpga")) == ("pending", "allocated")


def test_a_waiter_claims_all_its_resources_while_it_waits_for_one() -> None:
    desk = full_desk()
    desk.register("both", resources=asks(gpu=1, fpga=1))
    desk.deregister("fholder")
    assert desk.register("late", resources=asks(fpga=1)).reason_code == "busy"
    desk.deregister("both")
    assert desk.state("late") == "allocated"


def test_a_waiter_that_can_not_be_served_now_whatever_happens_blocks_nobody() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", ill("b"))
    assert desk.register("infeasible", 2).reason_code == "infeasible"
    assert desk.register("small", 1).state == "allocated"


def test_a_waiter_whose_driver_has_not_reported_blocks_nobody() -> None:
    desk = CoreDriver(GPU, FPGA)
    desk.report("a")
    assert desk.register("silent", resources=asks(gpu=1, fpga=1)).reason_code == "not-reported"
    assert desk.register("w", 1).state == "allocated"


def test_a_waiter_whose_driver_failed_for_now_blocks_nobody() -> None:
    desk = CoreDriver(GPU, FPGA)
    desk.report("a")
    desk.fail("for now", resource="fpga")
    assert desk.register("unlucky", resources=asks(gpu=1, fpga=1)).reason_code == "driver-failed"
    assert desk.register("w", 1).state == "allocated"


def test_nobody_overtakes_between_a_report_and_what_follows_from_it() -> None:
    desk = CoreDriver(GPU)
    desk.register("first", 1)
    follow_ups = desk.only(
        m.DriverReport(host="h", resource="gpu", devices=(m.KnownDevice(id="a", properties={}),))
    ).follow_ups
    assert desk.register("second", 1).state == "pending"
    assert desk.state("first") == "pending"
    for event in follow_ups:
        desk.say(event)
    assert (desk.state("first"), desk.state("second")) == ("allocated", "pending")


def test_one_release_serves_all_whom_it_can_serve() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b", "c")
    desk.register("holder", 3)
    for worker in ("w1", "w2", "w3", "w4"):
        desk.register(worker, 1)
    desk.deregister("holder")
    assert [desk.state(worker) for worker in ("w1", "w2", "w3", "w4")] == ["allocated"] * 3 + ["pending"]


def test_a_withdrawn_waiter_frees_the_way_for_those_behind() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("holder", 1)
    desk.register("big", 2)
    desk.register("small", 1)
    desk.deregister("big")
    assert (desk.state("big"), desk["big"].reason_code) == ("ended", "withdrawn")
    assert desk.state("small") == "allocated"


def test_a_new_incarnation_of_a_waiter_goes_to_the_end_of_the_queue() -> None:
    desk = full_desk()
    desk.register("a", 1)
    desk.register("b", 1)
    desk.register("a", 1, incarnation="2")
    assert desk["a", "1"].reason_code == "superseded"
    desk.deregister("holder")
    assert (desk.state("b"), desk.state("a", "2")) == ("allocated", "pending")


def test_a_new_incarnation_is_served_at_once_if_only_its_predecessor_was_in_the_way() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("holder", 1)
    desk.register("big", 2)
    assert desk.register("big", 1, incarnation="2").state == "allocated"


# --- wait_s --------------------------------------------------------------------------------------------


def test_a_waiter_gives_up_at_its_deadline_and_says_what_it_waited_for() -> None:
    desk = full_desk()
    record = desk.register("w", 1, wait_s=10)
    assert record.wait_until is not None
    desk.pass_time(9.9)
    assert desk.state("w") == "pending"
    desk.pass_time(0.1)
    assert (desk.state("w"), desk["w"].reason_code) == ("failed", "waited-too-long")
    assert desk["w"].reason == "waited 10 s; last: waits for 1 gpu: 0 of 1 free"


def test_a_waiter_that_gave_up_frees_the_way_for_those_behind() -> None:
    desk = CoreDriver(GPU)
    desk.report("a", "b")
    desk.register("holder", 1)
    desk.register("big", 2, wait_s=1)
    desk.register("small", 1)
    desk.pass_time(1)
    assert desk.state("small") == "allocated"


def test_nobody_is_granted_anything_after_its_deadline() -> None:
    desk = full_desk()
    desk.register("w", 1, wait_s=10)
    desk.now = desk["w"].wait_until
    desk.deregister("holder")
    assert desk["w"].reason_code == "waited-too-long"


def test_a_grant_ends_the_deadline() -> None:
    desk = full_desk()
    desk.register("w", 1, wait_s=10)
    desk.deregister("holder")
    desk.pass_time(60)
    assert desk.state("w") == "allocated"
    assert desk["w"].wait_until is None


# --- positions -----------------------------------------------------------------------------------------


def test_positions_are_exact_in_front_and_move_up() -> None:
    desk = full_desk()
    for i in range(5):
        desk.register(f"w{i}", 1)
    assert [desk[f"w{i}"].queue_position for i in range(5)] == [1, 2, 3, 4, 5]
    desk.deregister("holder")
    assert [desk[f"w{i}"].queue_position for i in range(5)] == [None, 1, 2, 3, 4]


def test_who_is_pushed_out_of_the_shown_positions_is_told_its_new_one() -> None:
    desk = full_desk()
    for i in range(SHOWN_POSITIONS + 3):
        desk.register(f"w{i}", 1)
    desk.register("urgent", 1, priority=1)
    shown = [desk[f"w{i}"].queue_position for i in range(SHOWN_POSITIONS)]
    assert shown == list(range(2, SHOWN_POSITIONS + 2))


def test_to_renumber_a_host_that_is_gone_brings_nothing_back() -> None:
    """An empty book would count as one of the hosts there may be."""
    desk = full_desk()
    assert renumber(desk.ledger, desk.rules, "gone") == []
    assert "gone" not in desk.ledger.hosts


def test_renumbering_writes_no_history() -> None:
    desk = full_desk()
    desk.register("a", 1)
    desk.register("b", 1)
    before = desk["b"].since
    decision = desk.deregister("holder")
    assert [step.worker for _, step in decision.history] == ["holder", "a"]
    assert (desk["b"].queue_position, desk["b"].since) == (1, before)


# --- bounded effects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_large_effect_is_cut_in_pieces_and_comes_to_the_same(chunk: int) -> None:
    desk = full_desk(chunk=chunk)
    for i in range(10):
        desk.register(f"w{i}", 1)
    desk.decisions.clear()
    desk.report("g", *(f"g{i}" for i in range(9)))
    assert [desk.state(f"w{i}") for i in range(10)] == ["allocated"] * 9 + ["pending"]
    assert all(len(decision.changes) <= 2 * chunk + 3 for decision in desk.decisions)


def test_a_newcomer_between_two_pieces_overtakes_nobody() -> None:
    desk = full_desk(chunk=2)
    for i in range(4):
        desk.register(f"w{i}", 1)
    devices = tuple(device(name) for name in ("g", "g0", "g1", "g2", "g3"))
    waiting = desk.only(m.DriverReport(host="h", resource="gpu", devices=devices)).follow_ups
    waiting = [later for event in waiting for later in desk.only(event).follow_ups]
    assert desk.state("w3") == "pending"
    assert desk.register("newcomer", 1).state == "pending"
    for event in waiting:
        desk.say(event)
    assert desk.state("w3") == "allocated"
    assert desk.state("newcomer") == "pending"


def test_many_deadlines_at_once_are_cut_in_pieces() -> None:
    desk = full_desk(chunk=2)
    desk.register("patient", 1)
    for i in range(7):
        desk.register(f"w{i}", 1, wait_s=1)
    desk.pass_time(2)
    assert {desk.state(f"w{i}") for i in range(7)} == {"failed"}


def test_everybody_in_the_queue_is_told_when_the_reason_changes() -> None:
    desk = full_desk(chunk=2)
    for i in range(7):
        desk.register(f"w{i}", 1)
    desk.report("g", ill("g2"))
    assert {desk[f"w{i}"].reason for i in range(1, 7)} == {"waits for 1 gpu: 0 of 2 free"}
    desk.fail("gone for now")
    assert {desk[f"w{i}"].reason_code for i in range(7)} == {"driver-failed"}


def test_a_release_between_a_report_and_what_follows_from_it_is_left_to_those_who_are_first() -> None:
    desk = full_desk()
    desk.report("g", ill("g2"))
    desk.register("first", 2)
    assert desk["first"].reason_code == "infeasible"
    desk.register("second", 1)
    follow_ups = desk.only(
        m.DriverReport(
            host="h", resource="gpu", devices=tuple(m.KnownDevice(id=one, properties={}) for one in ("g", "g2"))
        )
    ).follow_ups
    desk.only(m.OwnerDied(allocation="h/holder/1", detail="gone"))
    assert (desk.state("first"), desk.state("second")) == ("pending", "pending")
    for event in follow_ups:
        desk.say(event)
    assert (desk.state("first"), desk.state("second")) == ("allocated", "pending")
