"""How allocations end, and what stays true of those that have ended."""

from __future__ import annotations

from outfitter_proto.records import Deregister, Register, Source
from outfitter_service.core import model as m
from outfitter_service.core.decide import Rules
from support.core.core_driver import HOST, CoreDriver, asks, specs


def test_a_failed_answer_stays_what_it_was_when_its_worker_deregisters() -> None:
    core = CoreDriver()
    core.report("a")
    assert core.register("w", 5).state == "failed"
    decision = core.deregister("w")
    assert (decision.kind, decision.changes, decision.refused) == ("late", [], None)
    assert (core.state("w"), core["w"].reason_code) == ("failed", "infeasible")


def test_a_device_that_was_prepared_is_not_lent_again_without_its_driver_though_its_settings_are_wrong_now() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, prepares=True))
    core.report("a")
    record = core.register("w", 1)
    core.say(m.Prepared(allocation=record.key, token=record.token or 0))
    wrong = m.ResourceSpec(name="gpu", state=m.SpecState.MISCONFIGURED, reason="a slip")
    core.rules = Rules(writer=core.rules.writer, specs=specs(wrong))
    decision = core.deregister("w")
    assert core.state("w") == "releasing"
    assert decision.commands == [m.Unprepare(allocation=record.key, token=1)]


def test_whom_an_older_incarnation_kept_waiting_is_served_behind_the_newer_one_that_comes_before_them() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu"), m.ResourceSpec(name="fpga"))
    core.report("a", "b")
    core.report("f", resource="fpga")
    core.register("holder", resources=asks(fpga=1))
    core.register("w", resources=asks(gpu=1, fpga=1))
    core.register("behind", resources=asks(gpu=2))
    assert (core.state("w"), core.state("behind")) == ("pending", "pending")
    # in one message the older incarnation goes, and the newer one comes before everybody
    newer = Register(host=HOST, worker="w", incarnation="2", resources=asks(gpu=1), priority=1)
    core.say(m.Incoming(newer, Source(partition=0, offset=100)))
    assert (core.state("w", "1"), core.state("w", "2"), core.state("behind")) == ("ended", "allocated", "pending")
    core.say(m.Incoming(Deregister(host=HOST, worker="w", incarnation="2"), Source(partition=0, offset=101)))
    assert core.state("behind") == "allocated"
