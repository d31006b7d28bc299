"""Operators' orders: what is taken out is lent to nobody, and whoever has it keeps it, also after a restart."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outfitter_proto.records import Cordon
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import PutRecord
from support.core.core_driver import HOST, CoreDriver, asks, device, ill, restarted

GPU = m.ResourceSpec(name="gpu", amount=1)
HALF = m.ResourceSpec(name="half", amount=1, shared=True)


def out(core: CoreDriver, resource: str = "gpu") -> list[str]:
    """The devices of a resource that the host's record shows as cordoned."""
    return [one.id for one in core.host_state.record.resources[resource].devices if one.cordon]


def notes(core: CoreDriver) -> list[str]:
    return [f"{note.event}: {note.explanation}" for decision in core.decisions for note in decision.notes]


def test_one_gpu_of_eight_is_taken_out_and_its_holder_keeps_it() -> None:
    core = CoreDriver(GPU)
    core.report(*[f"g{number}" for number in range(8)])
    core.register("holder", 1)
    core.cordon(device="g0", reason="XID 79", author="ada@ops-1")
    assert core.has("holder") == ["g0"]
    assert out(core) == ["g0"]
    inventory = core.host_state.record.resources["gpu"]
    assert (inventory.total, inventory.healthy, inventory.cordoned) == (8, 8, 1)
    core.deregister("holder")
    core.register("w", 7)
    assert core.has("w") == [f"g{number}" for number in range(1, 8)]
    waiter = core.register("x", 1)
    assert (waiter.state, waiter.reason_code) == ("pending", "busy")
    assert waiter.reason == "waits for 1 gpu: 0 of 8 free, 1 cordoned"
    assert notes(core) == ["cordoned: order o1 by ada@ops-1 takes device g0 of host h out: XID 79"]
    [note] = [note for decision in core.decisions for note in decision.notes]
    assert (note.about, note.device) == (HOST, "g0")


def test_who_wants_more_than_is_left_is_told_who_took_it_out_and_blocks_nobody() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.cordon(resource="gpu", device="a", reason="rebooted tonight", author="ada@ops-1")
    waiter = core.register("w", 2)
    assert (waiter.state, waiter.reason_code) == ("pending", "cordoned")
    assert waiter.reason == (
        "2 gpu requested, 1 of 2 can be lent; 1 cordoned by ada@ops-1 (order o1: rebooted tonight); granted when "
        "enough of these orders have ended"
    )
    assert core.register("small", 1).state == "allocated"
    core.cordon(resource="gpu", device="a", ended_at=core.now, ended_by="bob@ops-2")
    core.deregister("small")
    assert core.has("w") == ["a", "b"]
    assert notes(core)[-1] == (
        "uncordoned: order o1 by ada@ops-1 for device a of host h was ended by bob@ops-2; it said: rebooted tonight"
    )


def test_a_host_is_taken_out_with_all_its_resources_and_devices_that_come_later() -> None:
    core = CoreDriver(GPU, HALF)
    core.report("a")
    core.cordon()
    core.report("a", "b")
    core.report("c", resource="half")
    assert (out(core), out(core, "half")) == (["a", "b"], ["c"])
    assert core.register("w", 1).reason_code == "cordoned"
    assert core.register("s", resources=asks(half=1)).reason_code == "cordoned"


def test_a_resource_is_taken_out_under_whatever_name_another_resource_shows_its_devices() -> None:
    core = CoreDriver(GPU, HALF)
    core.report(device("a", aliases=("card-0",)), "b")
    core.report("card-0", "d", resource="half")
    core.cordon(resource="gpu")
    assert (out(core), out(core, "half")) == (["a", "b"], ["card-0"])


@pytest.mark.parametrize("named", ["a", "card-0"])
def test_a_device_is_taken_out_under_all_its_names(named: str) -> None:
    core = CoreDriver(GPU, HALF)
    core.report("card-0", "d", resource="half")
    core.cordon(device=named)
    core.report(device("a", aliases=("card-0",)), "b")
    assert (out(core), out(core, "half")) == (["a"], ["card-0"])


def test_two_people_take_one_device_out_and_it_stays_out_until_both_have_ended_their_orders() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.cordon("ada-1", author="ada", device="a")
    core.cordon("bob-1", author="bob")
    core.cordon("ada-1", author="ada", device="a", ended_at=core.now, ended_by="ada")
    assert out(core) == ["a"]
    assert core.register("w", 1).reason_code == "cordoned"
    core.cordon("bob-1", author="bob", ended_at=core.now, ended_by="bob")
    assert core.state("w") == "allocated"
    assert out(core) == []


def test_an_order_ends_by_itself_at_its_time_by_the_managers_clock() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.cordon(until=core.now + timedelta(hours=1))
    core.register("w", 1)
    core.pass_time(3599)
    assert core.state("w") == "pending"
    core.pass_time(2)
    assert core.state("w") == "allocated"
    assert notes(core)[-1] == "uncordoned: order o1 by ada for host h has ended by itself; it said: why"
    core.cordon(until=core.now - timedelta(seconds=1))
    assert not core.host_state.cordons, "an order whose time is over begins nothing"


@pytest.mark.parametrize("what", [{"resource": "gpu"}, {"device": "a"}, {}], ids=["resource", "device", "host"])
@pytest.mark.parametrize("first", ["gpu", "half"])
def test_after_a_restart_nothing_that_was_taken_out_is_lent_whichever_driver_reports_first(
    first: str, what: dict[str, str]
) -> None:
    core = CoreDriver(GPU, HALF)
    core.report(device("a", aliases=("card-0",)))
    core.report("card-0", resource="half")
    core.cordon(**what)
    core.commit()
    again = restarted(core)
    devices = {"gpu": (device("a", aliases=("card-0",)),), "half": (device("card-0"),)}
    again.report(*devices[first], resource=first)
    wanted = again.register("w", resources=asks(**{first: 1}))
    assert (wanted.state, wanted.reason_code) == ("pending", "cordoned")
    assert again.ledger.needs == {"orders"}


def test_an_order_that_is_read_again_changes_nothing() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.cordon(device="a")
    core.now += timedelta(seconds=9)
    assert core.cordon(device="a").changes == []
    assert core.cordon("o2", device="a", ended_at=core.now).changes == []


def test_an_order_may_change_and_keeps_its_time() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.cordon(device="a")
    begun = core.now
    core.now += timedelta(seconds=9)
    core.cordon(device="b", reason="no, that one")
    assert out(core) == ["b"]
    [cordon] = core.host_state.cordons.values()
    assert (cordon.since, cordon.reason, cordon.device) == (begun, "no, that one", "b")


def test_a_sentence_says_both_where_devices_are_ill_and_taken_out() -> None:
    core = CoreDriver(GPU)
    core.report("a", ill("b"))
    core.cordon(device="a", reason="dust")
    waiter = core.register("w", 2)
    assert waiter.reason_code == "infeasible"
    assert waiter.reason == (
        "2 gpu requested, 1 of 2 healthy; 1 cordoned by ada (order o1: dust); granted when enough are healthy again "
        "and enough orders have ended"
    )


def test_overlapping_resources_say_so_too() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="big", amount=1))
    core.report("a", "b", "c")
    core.report("a", "b", resource="big")
    core.cordon(device="a")
    waiter = core.register("w", resources=asks(gpu=2, big=1))
    assert waiter.reason_code == "cordoned"
    assert waiter.reason is not None
    assert waiter.reason.endswith("are healthy and not cordoned; granted when enough are, and enough orders have ended")


def test_an_order_for_a_host_without_a_record_waits_for_it() -> None:
    core = CoreDriver(GPU)
    core.ledger.hosts[HOST].record = None
    assert core.cordon().changes == []


def test_a_long_reason_is_cut_and_a_ledger_record_restores_the_order() -> None:
    core = CoreDriver(GPU)
    core.cordon(reason="x" * 5000)
    [cordon] = core.host_state.cordons.values()
    assert len(cordon.reason) < 400
    again = CoreDriver(GPU)
    again.ledger.restore(PutRecord(cordon))
    assert again.host_state.cordons == {"o1": cordon}
    assert isinstance(cordon, Cordon)


def test_a_device_stays_out_under_a_name_that_its_driver_no_longer_says() -> None:
    """…also after a restart, where that driver is not configured any more; until the order ends."""
    core = CoreDriver(GPU, m.ResourceSpec(name="big", amount=1))
    core.report("a", "b")
    core.report(device("y", aliases=("b",)), resource="big")
    core.cordon(device="y")
    core.report(resource="big")
    assert out(core) == ["b"]
    core.commit()
    again = restarted(core, configured=[GPU])
    again.report("a", "b")
    assert out(again) == ["b"]
    once_more = restarted(again, configured=[GPU])
    once_more.report("a", "b")
    assert out(once_more) == ["b"]
    once_more.cordon(device="y", ended_at=core.now)
    assert out(once_more) == []
    assert "big" not in once_more.host_state.record.resources


@pytest.mark.parametrize("is_restarted", [False, True], ids=["runs", "restarted"])
def test_an_order_goes_with_its_device_to_another_slot(is_restarted: bool) -> None:
    """The names of the slots are those of other devices then, and merge none of them."""
    core = CoreDriver(GPU)
    core.report("a", device("b", aliases=("slot-1",)), device("c", aliases=("slot-2",)))
    core.cordon(device="b")
    core.commit()
    again = restarted(core) if is_restarted else core
    again.report("a", device("b", aliases=("slot-2",)), device("c", aliases=("slot-1",)))
    assert out(again) == ["b"]
    assert again.register("w", 2).state == "allocated"
    again.cordon(device="b", ended_at=core.now)
    assert again.register("v", 1).state == "allocated"


SLOTS = st.permutations(["slot-1", "slot-2", "slot-3"])
PRESENT = st.sets(st.sampled_from("bcd"))


@settings(max_examples=400)
@given(st.lists(st.tuples(SLOTS, PRESENT, st.booleans()), max_size=6))
def test_whoever_moves_cards_about_has_one_device_out_and_all_of_them_in_the_end(
    moves: list[tuple[list[str], set[str], bool]],
) -> None:
    """Cards change slots, are missing and come back, with restarts in between; nobody holds any."""
    core = CoreDriver(GPU)
    reports = [(["slot-1", "slot-2", "slot-3"], set("bcd"), False), *moves]
    for slots, present, is_restarted in reports:
        core.commit()
        core = restarted(core) if is_restarted else core
        core.report(*[device(one, aliases=(slot,)) for one, slot in zip("bcd", slots, strict=True) if one in present])
        if not core.host_state.cordons:
            core.cordon(device="b")
        if "b" in present:
            assert out(core) == ["b"]
        assert len(out(core)) <= 1
    core.cordon(device="b", ended_at=core.now)
    assert out(core) == []
    devices = len(reports[-1][1])
    assert not devices or core.register("w", devices).state == "allocated"


def test_an_order_goes_with_the_name_of_a_slot_where_nothing_else_is_known() -> None:
    core = CoreDriver(GPU)
    core.report("a", device("b", aliases=("slot-1",)))
    core.cordon(device="b")
    core.report("a", device("new", aliases=("slot-1",)))
    assert out(core) == ["new"]


def test_many_orders_that_end_at_once_end_in_several_decisions() -> None:
    core = CoreDriver(GPU, chunk=4)
    core.report("a")
    for number in range(10):
        core.cordon(f"o{number}", device="a", until=core.now + timedelta(hours=1))
    core.register("w", 1)
    before = len(core.decisions)
    core.pass_time(3601)
    ended = [len(decision.notes) for decision in core.decisions[before:] if decision.notes]
    assert ended == [4, 4, 2]
    assert core.state("w") == "allocated"
