"""Time is counted right whatever the clock does: it may have been ahead, and go back or forward at any moment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import structs

from outfitter_proto.codec import encode
from outfitter_service.core import model as m
from outfitter_service.core.decide import is_due
from outfitter_service.core.state.ledger import PutRecord
from support.core_driver import HOST, CoreDriver

YEAR = timedelta(days=400)


def tick_if_due(desk: CoreDriver) -> None:
    """What a manager does four times a second."""
    desk.commit()
    if is_due(desk.ledger, desk.rules, HOST, desk.now):
        desk.say(m.Tick(host=HOST))


def test_retention_goes_on_after_a_clock_that_was_ahead() -> None:
    desk = CoreDriver(retention_s=3600.0)
    desk.report("g0")
    desk.now += YEAR
    desk.register("w0", 1)
    desk.deregister("w0")
    desk.now -= YEAR
    for n in range(50):
        desk.register(f"x{n}", 1)
        desk.deregister(f"x{n}")
        desk.now += timedelta(hours=1)
        tick_if_due(desk)
    assert desk.host_state.final_count <= 2
    assert "h/w0/1" not in desk.ledger.allocations


@pytest.mark.parametrize("restart", [False, True])
def test_what_ended_in_the_future_is_forgotten_one_retention_after_the_clock_is_right(restart: bool) -> None:
    desk = CoreDriver(retention_s=3600.0)
    desk.report("g0")
    desk.now += YEAR
    desk.register("w", 1)
    desk.deregister("w")
    desk.now -= YEAR
    if restart:
        desk = desk.restarted()
    tick_if_due(desk)
    assert desk["w"].since == desk.now
    desk.now += timedelta(seconds=3600)
    tick_if_due(desk)
    assert "h/w/1" in desk.ledger.allocations
    desk.now += timedelta(seconds=1)
    tick_if_due(desk)
    assert "h/w/1" not in desk.ledger.allocations


def test_who_registered_while_the_clock_was_ahead_waits_as_long_as_it_asked_for_and_no_longer() -> None:
    desk = CoreDriver()
    desk.report("g0")
    desk.register("holder", 1)
    desk.now += YEAR
    desk.register("w", 1, wait_s=10)
    desk.now -= YEAR
    tick_if_due(desk)
    desk.now += timedelta(seconds=9)
    tick_if_due(desk)
    assert desk.state("w") == "pending"
    desk.now += timedelta(seconds=1)
    tick_if_due(desk)
    assert desk["w"].reason_code == "waited-too-long"


def test_many_records_of_the_future_are_put_right_in_pieces() -> None:
    desk = CoreDriver(retention_s=60.0, chunk=2)
    desk.now += YEAR
    for n in range(7):
        desk.deregister(f"w{n}")
    desk.now -= YEAR
    tick_if_due(desk)
    assert {record.since for record in desk.ledger.allocations.values()} == {desk.now}
    assert all(len(decision.changes) <= 3 for decision in desk.decisions)
    assert not is_due(desk.ledger, desk.rules, HOST, desk.now)


def test_records_of_the_future_are_within_the_bound_of_records_that_are_over() -> None:
    desk = CoreDriver(max_final=3)
    desk.now += YEAR
    for n in range(8):
        desk.deregister(f"w{n}")
    desk.now -= YEAR
    tick_if_due(desk)
    tick_if_due(desk)
    assert desk.host_state.final_count == 3


def test_a_host_whose_record_is_of_the_future_is_forgotten_in_time() -> None:
    desk = CoreDriver(retention_s=60.0, forgets_hosts=True)
    desk.ledger.change(PutRecord(structs.replace(desk.host_state.record, since=desk.now + YEAR)))
    tick_if_due(desk)
    desk.now += timedelta(seconds=61)
    tick_if_due(desk)
    assert desk.host_state.record is None


def test_a_clock_that_goes_back_a_little_moves_nothing() -> None:
    """Managers of a group take over from each other with clocks that differ by some."""
    desk = CoreDriver()
    desk.deregister("w")
    desk.now -= timedelta(seconds=2)
    assert not is_due(desk.ledger, desk.rules, HOST, desk.now)


def test_what_is_remembered_of_a_worker_is_bounded_although_the_clock_goes_back() -> None:
    desk = CoreDriver(max_incarnations=2, chunk=1)
    for commit in range(10):
        for run in range(6):
            desk.register("w", 1, incarnation=f"{commit}-{run}")
        desk.now -= timedelta(seconds=1)
        desk.ledger.seal()
        desk.ledger.settle()
    assert len(desk.host_state.incarnations["w"]) <= 2 + 2 * 6  # those of this commit, and of the one before


def test_what_is_over_and_became_too_large_to_write_loses_its_devices_when_the_clock_was_set_back() -> None:
    """The topics take less than they did. Its devices are in history; retention must go on."""
    desk = CoreDriver(retention_s=3600.0)
    desk.report(m.KnownDevice(id="g0", aliases=("other",), properties={"note": "n" * 3000}))
    desk.now += YEAR
    desk.register("w", 1)
    desk.deregister("w")
    desk.now -= YEAR
    desk.rules = structs.replace(desk.rules, max_bytes=2000)
    tick_if_due(desk)
    assert (desk["w"].since, desk["w"].resources, desk["w"].aliases) == (desk.now, {}, {})
    [told] = [told for decision in desk.decisions[-2:] for _, told in decision.history]
    assert b'"aliases":{}' in encode(told)
