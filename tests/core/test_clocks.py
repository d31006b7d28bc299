"""Time is counted right whatever the clock does: it may have been ahead, and go back or forward at any moment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import structs

from outfitter_proto.codec import encode
from outfitter_service.core import model as m
from outfitter_service.core.decide import is_due
from outfitter_service.core.state.ledger import PutRecord
from support.core.core_driver import HOST, CoreDriver
from support.core.world import written

YEAR = timedelta(days=400)


def tick_if_due(core: CoreDriver) -> None:
    """What a manager does four times a second."""
    core.commit()
    if is_due(core.ledger, core.rules, HOST, core.now):
        core.say(m.Tick(host=HOST))


def test_retention_goes_on_after_a_clock_that_was_ahead() -> None:
    core = CoreDriver(retention_s=3600.0)
    core.report("g0")
    core.now += YEAR
    core.register("w0", 1)
    core.deregister("w0")
    core.now -= YEAR
    for n in range(50):
        core.register(f"x{n}", 1)
        core.deregister(f"x{n}")
        core.now += timedelta(hours=1)
        tick_if_due(core)
    assert core.host_state.runs.final_count <= 2
    assert "h/w0/1" not in core.ledger.allocations


@pytest.mark.parametrize("restart", [False, True])
def test_what_ended_in_the_future_is_forgotten_one_retention_after_the_clock_is_right(restart: bool) -> None:
    core = CoreDriver(retention_s=3600.0)
    core.report("g0")
    core.now += YEAR
    core.register("w", 1)
    core.deregister("w")
    core.now -= YEAR
    if restart:
        core = core.restarted()
    tick_if_due(core)
    assert core["w"].since == core.now
    core.now += timedelta(seconds=3600)
    tick_if_due(core)
    assert "h/w/1" in core.ledger.allocations
    core.now += timedelta(seconds=1)
    tick_if_due(core)
    assert "h/w/1" not in core.ledger.allocations


def test_who_registered_while_the_clock_was_ahead_waits_as_long_as_it_asked_for_and_no_longer() -> None:
    core = CoreDriver()
    core.report("g0")
    core.register("holder", 1)
    core.now += YEAR
    core.register("w", 1, wait_s=10)
    core.now -= YEAR
    tick_if_due(core)
    core.now += timedelta(seconds=9)
    tick_if_due(core)
    assert core.state("w") == "pending"
    core.now += timedelta(seconds=1)
    tick_if_due(core)
    assert core["w"].reason_code == "waited-too-long"


def test_many_records_of_the_future_are_put_right_in_pieces() -> None:
    core = CoreDriver(retention_s=60.0, chunk=2)
    core.now += YEAR
    for n in range(7):
        core.deregister(f"w{n}")
    core.now -= YEAR
    tick_if_due(core)
    assert {record.since for record in core.ledger.allocations.values()} == {core.now}
    assert all(len(decision.changes) <= 3 for decision in core.decisions)
    assert not is_due(core.ledger, core.rules, HOST, core.now)


def test_records_of_the_future_are_within_the_bound_of_records_that_are_over() -> None:
    core = CoreDriver(max_final=3)
    core.now += YEAR
    for n in range(8):
        core.deregister(f"w{n}")
    core.now -= YEAR
    tick_if_due(core)
    tick_if_due(core)
    assert core.host_state.runs.final_count == 3


def test_a_host_whose_record_is_of_the_future_is_forgotten_in_time() -> None:
    core = CoreDriver(retention_s=60.0, forgets_hosts=True)
    core.ledger.change(PutRecord(structs.replace(core.host_state.record, since=core.now + YEAR)))
    tick_if_due(core)
    core.now += timedelta(seconds=61)
    tick_if_due(core)
    assert core.host_state.record is None


def test_a_clock_that_goes_back_a_little_moves_nothing() -> None:
    """Managers of a group take over from each other with clocks that differ by some."""
    core = CoreDriver()
    core.deregister("w")
    core.now -= timedelta(seconds=2)
    assert not is_due(core.ledger, core.rules, HOST, core.now)


def test_what_is_remembered_of_a_worker_is_bounded_although_the_clock_goes_back() -> None:
    core = CoreDriver(max_incarnations=2, chunk=1)
    for commit in range(10):
        for run in range(6):
            core.register("w", 1, incarnation=f"{commit}-{run}")
        core.now -= timedelta(seconds=1)
        core.ledger.begin_commit()
        core.ledger.end_commit()
    assert len(core.host_state.runs.incarnations["w"]) <= 2 + 2 * 6  # those of this commit, and of the one before


def test_what_is_over_and_became_too_large_to_write_loses_its_devices_when_the_clock_was_set_back() -> None:
    """The topics take less than they did. Its devices are in history; retention must go on."""
    core = CoreDriver(retention_s=3600.0)
    core.report(m.KnownDevice(id="g0", aliases=("other",), properties={"note": "n" * 3000}))
    core.now += YEAR
    core.register("w", 1)
    core.deregister("w")
    core.now -= YEAR
    core.rules = structs.replace(core.rules, max_bytes=2000)
    tick_if_due(core)
    assert (core["w"].since, core["w"].resources, core["w"].aliases) == (core.now, {}, {})
    [told] = [told for decision in core.decisions[-2:] for _, told in decision.history]
    assert b'"aliases":{}' in encode(told)


def test_what_is_over_is_put_right_once_more_although_nothing_is_left_to_shorten() -> None:
    """History says which fields became empty, and a field that is left out cannot be said there."""
    core = CoreDriver(retention_s=1e9)
    core.report(m.KnownDevice(id="g0", aliases=("other",), properties={}))
    core.now += 2 * YEAR
    core.register("w", 1)
    core.deregister("w")
    core.rules = structs.replace(core.rules, max_bytes=200)
    for _ in range(2):
        core.now -= YEAR
        core.say(m.Tick(host=HOST))
        assert core["w"].since == core.now
        assert all(encode(step) for decision in core.decisions for _, step in decision.history)


def test_what_is_put_right_after_a_clock_was_set_back_fits_into_a_commit_with_a_long_host_record() -> None:
    core = CoreDriver(max_bytes=8000)
    core.now += YEAR
    core.report(*(m.KnownDevice(id=f"g{n}", properties={"note": "x" * 50}) for n in range(20)))
    for n in range(20):
        core.register(f"w{n}", 21 if n % 2 else 1)
        core.deregister(f"w{n}")
    before = len(core.decisions)
    core.now -= YEAR
    core.say(m.Tick(host=HOST))
    assert all(record.since == core.now for record in core.ledger.allocations.values())
    assert core.host_state.record.since == core.now
    assert max(map(written, core.decisions[before:])) <= 8000
