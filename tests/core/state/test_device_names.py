"""A device has several names, and several drivers know some of them each: what is held under one name is held under
all, whichever driver says so, says so no longer, or has not said anything yet since a restart."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from outfitter_service.core import model as m
from outfitter_service.core.state import pools
from outfitter_service.core.state.device_index import exclusive_ids
from outfitter_service.core.state.device_names import NO_LINKS
from support.core.core_driver import HOST, CoreDriver, asks, device, ill, restarted
from support.core.world import written

pytestmark = pytest.mark.timeout(600)  # 250 examples take as long as a busy machine lets them

A, B, C = (m.ResourceSpec(name=name) for name in "abc")


def connected() -> CoreDriver:
    """Resources a and b show one device, which only c's driver knows."""
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.report(device("UUID-0", aliases=("/dev/x0", "PCI-0")), resource="c")
    return core


def test_a_grant_keeps_all_names_of_its_devices_whoever_connects_them() -> None:
    assert connected().register("w1", resources=asks(a=1)).aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}


@pytest.mark.parametrize("amount", [1, 2])
def test_a_grant_of_devices_with_names_of_their_own_keeps_those_first(amount: int) -> None:
    core = CoreDriver(A, C)
    core.report(device("y", aliases=("z", "b")), "x", resource="a")
    core.report(device("a", aliases=("y",)), resource="c")
    assert core.register("w1", resources=asks(a=amount)).aliases == {"y": ["z", "b", "a"]}


def test_a_device_stays_held_under_all_names_when_the_driver_that_connects_them_names_it_no_longer() -> None:
    core = connected()
    core.register("w1", resources=asks(a=1))
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.report(resource="c")
    assert core.state("w2") == "pending"
    core.deregister("w1")
    assert core.has("w2", "b") == ["PCI-0"]


def test_a_device_stays_held_under_all_names_while_it_is_released() -> None:
    core = CoreDriver(m.ResourceSpec(name="a", confirms=True), B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    core.deregister("w1")
    core.report(device("UUID-0", aliases=("/dev/x0", "PCI-0")), resource="c")
    assert core["w1"].aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    core.report(resource="c")
    assert core.register("w2", resources=asks(b=1)).state == "pending"


@pytest.mark.parametrize("first", ["a", "b"])
def test_names_are_known_after_a_restart_before_the_driver_that_connects_them_has_reported(first: str) -> None:
    core = connected()
    core.register("w1", resources=asks(a=1))
    core.register("w2", resources=asks(b=1))
    core = restarted(core)
    names = {"a": "/dev/x0", "b": "PCI-0"}
    for resource in (first, *(names.keys() - {first})):
        core.report(names[resource], resource=resource)
    assert core.state("w2") == "pending"


def test_names_of_free_devices_are_known_after_a_restart_as_well() -> None:
    core = restarted(restarted(connected()))
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core = restarted(core)
    core.report("PCI-0", resource="b")
    core.report("/dev/x0", resource="a")
    assert core.register("w1", resources=asks(a=1)).aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.report(resource="c")
    assert core.host_state.record.resources["c"].names is UNSET


def test_a_name_that_is_learnt_after_the_grant_is_in_the_record_of_its_holder() -> None:
    core = CoreDriver(A, B)
    core.report("GPU-a", resource="a")
    core.register("w1", resources=asks(a=1))
    core.report(device("GPU-a", aliases=("0",)), resource="a")
    assert core["w1"].aliases == {"GPU-a": ["0"]}
    core = restarted(core)
    core.report("0", resource="b")
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    assert dict(core.host_state.devices.pools.used) == {"0": pools.WHOLE}


def test_a_device_whose_id_changes_stays_with_its_holder() -> None:
    core = CoreDriver(A)
    core.report("0", resource="a")
    core.register("w1", resources=asks(a=1))
    core.report(device("GPU-a", aliases=("0",)), resource="a")
    core.report("GPU-a", resource="a")
    assert core.register("w2", resources=asks(a=1)).reason == "waits for 1 a: 0 of 1 free"


def test_names_that_are_connected_for_a_moment_stay_so_for_a_holder_who_was_not_told_yet() -> None:
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    core.register("w2", resources=asks(b=2))
    both = m.KnownDevice(id="UUID-0", properties={}, aliases=("/dev/x0", "PCI-0"))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(both,)))
    core.only(m.DriverReport(host=HOST, resource="c"))
    assert core.register("w3", resources=asks(b=1)).state == "pending"
    core.say(m.Reschedule(host=HOST))
    assert core["w1"].aliases == {"/dev/x0": ["PCI-0", "UUID-0"]}
    core.report("u1", resource="c")
    assert core.host_state.devices.inventories["c"].linked == NO_LINKS


def test_names_are_listed_of_all_devices_even_if_the_record_of_a_host_lists_fewer() -> None:
    core = CoreDriver(A)
    core.report(*(device(f"g{n}", aliases=(f"p{n}",)) for n in range(300)), resource="a")
    assert core.host_state.record.resources["a"].names[:2] == [["g0", "p0"], ["g1", "p1"]]
    assert len(core.host_state.record.resources["a"].names) == 300


def many_connected(count: int, **rules: Any) -> CoreDriver:
    """Resources a and b show the same devices, which only c's driver knows."""
    core = CoreDriver(A, B, C, **rules)
    core.report(*(f"/dev/x{n}" for n in range(count)), resource="a")
    core.report(*(f"PCI-{n}" for n in range(count)), resource="b")
    return core


def links(count: int) -> list[m.KnownDevice]:
    return [device(f"UUID-{n}".ljust(90, "u"), aliases=(f"/dev/x{n}", f"PCI-{n}")) for n in range(count)]


def test_no_device_is_lent_twice_after_a_restart_without_the_driver_that_knew_more_names_than_are_listed() -> None:
    core = many_connected(300)
    core.report(*links(300), resource="c")
    again = restarted(core)
    again.report(*(f"/dev/x{n}" for n in range(300)), resource="a")
    again.report(*(f"PCI-{n}" for n in range(300)), resource="b")
    for n in range(150, 300):
        again.register(f"a{n}", resources=asks(a=1))
    for n in range(300):
        again.register(f"b{n}", resources=asks(b=1))
    again.report(*links(300), resource="c")
    held = [
        again.host_state.devices.canonical(each)
        for record in again.host_state.holders.live.values()
        for each in exclusive_ids(record)
    ]
    assert len(held) == len(set(held)) == 300


@pytest.mark.parametrize("releases", [False, True], ids=["held", "being released"])
def test_a_holder_takes_no_names_for_which_its_record_has_no_room(releases: bool) -> None:
    core = CoreDriver(m.ResourceSpec(name="a", prepares=True), B, C, max_bytes=4000)
    core.report("x", resource="a")
    granted = core.register("w1", resources=asks(a=1))
    core.say(m.Prepared(allocation=granted.key, token=granted.token))
    if releases:
        core.deregister("w1")
    core.report(device("b-".ljust(3000, "b"), aliases=("x",)), resource="b")
    known = core["w1"].aliases["x"]
    core.report(device("c-".ljust(3000, "c"), aliases=("x",)), resource="c")
    assert core.state("w1") == ("releasing" if releases else "allocated")
    assert core["w1"].aliases["x"] == known
    assert max(map(written, core.decisions)) <= 4000


def connected_for_a_holder_whose_record_does_not_say_it() -> CoreDriver:
    """a's device is held, and c's driver connects it with b's at the last moment before a crash."""
    core = CoreDriver(A, B, C)
    core.report("/dev/x0", resource="a")
    core.report("PCI-0", resource="b")
    core.register("w1", resources=asks(a=1))
    both = m.KnownDevice(id="UUID-0", properties={}, aliases=("/dev/x0", "PCI-0"))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(both,)))
    return core


@pytest.mark.parametrize("how", [None, *[state for state in m.SpecState if state != m.SpecState.OK]])
def test_names_stay_connected_while_a_device_is_held_although_their_resource_is_not_in_effect_any_more(
    how: m.SpecState | None,
) -> None:
    core = connected_for_a_holder_whose_record_does_not_say_it()
    specs = [A, B] if how is None else [A, B, m.ResourceSpec(name="c", state=how)]
    again = restarted(core, configured=specs)
    again.report("PCI-0", resource="b")
    assert again.register("w2", resources=asks(b=1)).state == "pending"
    again = restarted(again)
    again.report("PCI-0", resource="b")
    assert again.state("w2") == "pending"
    again.report("/dev/x0", resource="a")
    again.deregister("w1")
    assert again.state("w2") == "allocated"
    again.deregister("w2")
    left = again.host_state.record.resources
    assert ("c" not in left) if how is None else (left["c"].names is UNSET)


def test_a_holder_whose_record_has_no_room_for_names_keeps_its_devices_and_holds_up_nobody() -> None:
    core = CoreDriver(A, B, C, max_bytes=20_000)
    core.report(*(f"x{n}" for n in range(200)), resource="a")
    core.report("other", "free", resource="b")
    assert core.register("big", resources=asks(a=180)).state == "allocated"
    core.register("small", resources=asks(b=1))
    core.report(*(device(f"u{n}", aliases=(f"x{n}", "y" * 15 + str(n))) for n in range(200)), resource="c")
    assert core.host_state.devices.classes["x7"] == ("u7", "x7", "y" * 15 + "7")
    core.report(ill("other"), "y" * 15 + "7", "free", resource="b")
    assert core["small"].resources["b"][0]["health"] == "unhealthy"
    assert core.register("w", resources=asks(b=1)).resources["b"][0]["id"] == "free"
    assert core.register("w2", resources=asks(b=1)).state == "pending"
    core.deregister("small")
    assert core.state("small") == "ended"
    assert max(map(written, core.decisions)) <= 20_000, "what cannot be written would be tried for ever"
    again = restarted(core, max_bytes=20_000)
    again.report("y" * 15 + "7", "free", resource="b")
    assert again.state("w2") == "pending"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_devices_that_a_report_connects_are_one_in_whatever_order_it_names_them(order: tuple[int, ...]) -> None:
    named = [device("a", aliases=("x",)), device("b", aliases=("y",)), device("c", aliases=("x", "y"))]
    core = CoreDriver(A)
    core.report(*(named[place] for place in order), resource="a")
    assert core.host_state.devices.inventories["a"].healthy == 1
    assert core.register("w1", resources=asks(a=1)).state == "allocated"
    assert core.register("w2", resources=asks(a=1)).state == "pending"


def test_names_that_only_a_repeated_entry_of_a_report_has_count_as_well() -> None:
    core = CoreDriver(A, B)
    core.report(device("GPU-a", aliases=("pci1",)), device("pci1", aliases=("cuda0",)), resource="a")
    core.report("cuda0", resource="b")
    assert core.register("w1", resources=asks(a=1)).aliases == {"GPU-a": ["pci1", "cuda0"]}
    assert core.register("w2", resources=asks(b=1)).state == "pending"


@pytest.mark.parametrize("repeated", [("a", "a"), ("a", "x")])
def test_a_device_that_is_named_twice_has_the_names_and_the_illness_of_both(repeated: tuple[str, str]) -> None:
    first, second = repeated
    core = CoreDriver(A, B)
    core.report(device(first, aliases=("x",)), ill(second, "overheated"), resource="a")
    [known] = core.host_state.devices.inventories["a"].devices
    assert (known.id, known.health, known.reason) == ("a", "unhealthy", "overheated")
    assert core.register("w1", resources=asks(a=1)).reason_code == "infeasible"
