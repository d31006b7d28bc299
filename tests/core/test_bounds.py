"""What a flood of names costs one host: waiters, records that are over and a worker's runs are kept up to a bound."""

from __future__ import annotations

from datetime import timedelta

from outfitter_service.core import model as m
from outfitter_service.core import requests
from outfitter_service.core.decide import TOLD_WITHIN, is_due
from outfitter_service.core.ledger import DropAllocation
from support.desk import Desk, asks


def dropped(desk: Desk) -> list[list[str]]:
    """The keys that each decision forgot, where it did."""
    found = [[one.key for one in decision.changes if isinstance(one, DropAllocation)] for decision in desk.decisions]
    return [keys for keys in found if keys]


def test_beyond_so_many_waiters_a_worker_is_told_that_there_are_too_many() -> None:
    desk = Desk(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"), max_waiting=2)
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


def test_of_too_many_that_are_over_those_that_ended_first_are_forgotten_before_their_time() -> None:
    desk = Desk(max_over=3, chunk=2)
    for number in range(8):
        desk.deregister(f"w{number}")
        desk.now += timedelta(seconds=1)
    assert desk.book.over == 8
    assert desk.pass_time(0).changes == []  # somebody may still want to read how it ended
    desk.now += TOLD_WITHIN
    assert is_due(desk.ledger, desk.rules, "h", desk.now)
    desk.pass_time(0)
    assert dropped(desk) == [["h/w0/1", "h/w1/1"], ["h/w2/1", "h/w3/1"], ["h/w4/1"]]
    assert sorted(desk.ledger.allocations) == ["h/w5/1", "h/w6/1", "h/w7/1"]
    assert not is_due(desk.ledger, desk.rules, "h", desk.now)


def test_those_that_ended_in_one_second_go_up_to_the_bound_and_no_further() -> None:
    desk = Desk(max_over=3)
    for number in range(5):
        desk.deregister(f"w{number}")
    desk.pass_time(TOLD_WITHIN.total_seconds() + 1)
    assert dropped(desk) == [["h/w0/1", "h/w1/1"]]


def test_a_worker_that_is_started_again_and_again_is_remembered_by_its_last_runs() -> None:
    desk = Desk(max_incarnations=3)
    desk.report("a", "b")
    desk.register("w", 1, incarnation="first")  # holds on: nobody has seen it dead
    for number in range(1, 7):
        desk.register("w", 1, incarnation=f"{number}")
        desk.deregister("w", f"{number}")
        desk.now += TOLD_WITHIN + timedelta(seconds=1)
    # one that holds a device is never forgotten, the runs before the last two are
    assert sorted(desk.ledger.allocations) == ["h/w/5", "h/w/6", "h/w/first"]
    assert dropped(desk) == [["h/w/1"], ["h/w/2"], ["h/w/3"], ["h/w/4"]]


def test_a_run_that_ends_because_of_a_newer_one_is_not_forgotten_in_the_same_breath() -> None:
    """Its worker has yet to hear of it: not before it must have been committed."""
    desk = Desk(max_incarnations=1)
    desk.register("w", 1)
    desk.register("w", 1, incarnation="2")
    assert (desk.state("w"), desk.state("w", "2")) == ("ended", "pending")
    desk.register("w", 1, incarnation="3")
    assert dropped(desk) == []
    desk.now += TOLD_WITHIN + timedelta(seconds=1)
    desk.register("w", 1, incarnation="4")
    assert dropped(desk) == [["h/w/1", "h/w/2"]]


def test_what_nobody_has_configured_is_not_kept_for_others() -> None:
    desk = Desk(m.ResourceSpec(name="gpu"))
    desk.report("a")
    requests._alike.cache_clear()
    assert desk.register("v", resources=asks(gpu=1, made_up=1)).state == "failed"
    assert requests._alike.cache_info().currsize == 0


def test_records_of_workers_that_want_the_same_have_it_in_common() -> None:
    desk = Desk(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"))
    desk.report("a", "b", "c")
    desk.report("f", "g", resource="fpga")
    one = desk.register("v", resources=asks(gpu=1, fpga=1))
    same = desk.register("w", resources=asks(gpu=1, fpga=1))
    other = desk.register("x", resources=asks(gpu=1, fpga=0))
    assert one.request == same.request
    assert one.request.amounts is same.request.amounts
    assert one.request.resources is same.request.resources
    assert other.request.amounts == {"gpu": 1, "fpga": 0}
