"""All names of a host's devices fit into its record, or a driver's report is refused, in the order of the
configuration. What was lent stays lent under all names."""

from __future__ import annotations

from typing import Any

import pytest

from outfitter_service.core import model as m
from outfitter_service.core.state import names_room
from outfitter_service.core.state.resource_state import ResourceState
from support.core.core_driver import HOST, CoreDriver, asks, device, restarted
from support.core.world import written

MAX_BYTES = 20_000
ROOM = names_room.most_bytes(MAX_BYTES)
"""Bytes for the names of all resources of a host."""
A, B, C = (m.ResourceSpec(name=name) for name in "abc")


def named(resource: str, count: int) -> list[m.KnownDevice]:
    """Devices whose names take some 100 bytes each."""
    return [device(f"{resource}{n}", aliases=(f"{n}-{resource}-".ljust(90, "n"),)) for n in range(count)]


def host(*specs: m.ResourceSpec) -> CoreDriver:
    return CoreDriver(*specs or (A, B, C), max_bytes=MAX_BYTES)


def start_again(core: CoreDriver, **changed: Any) -> CoreDriver:
    return restarted(core, max_bytes=MAX_BYTES, **changed)


def states(core: CoreDriver) -> dict[str, str]:
    return {name: entry.state for name, entry in core.host_state.record.resources.items()}


def test_a_report_whose_names_have_no_room_is_refused_with_the_numbers() -> None:
    core = host()
    core.report(*named("a", 80), resource="a")
    core.report(*named("b", 15), resource="b")
    refused = core.register("w", resources=asks(b=1))
    sizes = [names_room.size(ResourceState.of(tuple(named(*of))).links) for of in (("a", 80), ("b", 15))]
    assert refused.state == "failed"
    assert refused.reason_code == "driver-failed"
    assert refused.reason == (
        f"the report of the driver of b is refused: the names of its devices take {sizes[1]} bytes, and the host's "
        f"record has {ROOM - sizes[0]} of its {ROOM} left for them, after the resources that are configured before it; "
        "let the driver report fewer or shorter aliases, or configure b earlier"
    )
    assert core.host_state.record.resources["b"].reason == refused.reason
    assert core.register("other", resources=asks(a=1)).state == "allocated"


def test_a_report_that_just_fits_is_taken() -> None:
    core, count = host(A), 0
    while names_room.size(ResourceState.of(tuple(named("a", count + 1))).links) <= ROOM:
        count += 1
    core.report(*named("a", count), resource="a")
    assert core.register("w1", resources=asks(a=1)).state == "allocated"
    core.report(*named("a", count + 1), resource="a")
    assert core.register("w2", resources=asks(a=1)).state == "failed"
    core.report(*named("a", count), resource="a")
    assert core.register("w3", resources=asks(a=1)).state == "allocated"


def test_names_of_devices_with_one_name_take_no_room() -> None:
    core = host()
    core.report(*named("a", 85), resource="a")
    core.report(*(f"b{n}" for n in range(1000)), resource="b")
    assert core.register("w", resources=asks(b=1)).state == "allocated"


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_the_same_resource_is_refused_in_whatever_order_the_drivers_report_and_after_every_restart(order: str) -> None:
    core = host()
    counts = {"a": 50, "b": 50, "c": 30}
    for _ in range(3):
        for resource in order:
            core.report(*named(resource, counts[resource]), resource=resource)
        assert states(core) == {"a": "reported", "b": "driver-failed", "c": "reported"}
        core = start_again(core)


def test_a_resource_that_is_configured_earlier_is_refused_at_no_moment_because_of_a_later_one() -> None:
    core = host()
    core.report(*named("c", 60), resource="c")
    core = start_again(core)
    core.report(*named("a", 60), resource="a")
    assert core.register("w", resources=asks(a=1)).state == "allocated"
    assert core.register("waits", resources=asks(c=1)).state == "pending", "its driver has not reported yet"
    core.report(*named("c", 60), resource="c")
    assert core.state("waits") == "failed"


def test_a_refused_report_is_taken_when_another_resource_leaves_room() -> None:
    core = host(A, m.ResourceSpec(name="b", on_failure=m.OnFailure.WAIT))
    core.report(*named("a", 60), resource="a")
    core.report(*named("b", 60), resource="b")
    assert core.register("w", resources=asks(b=1)).state == "pending"
    core.report(*named("a", 10), resource="a")
    assert core.state("w") == "allocated"


def test_a_driver_that_fails_while_its_report_is_refused_is_served_by_its_next_report_alone() -> None:
    core = host(A, m.ResourceSpec(name="b", on_failure=m.OnFailure.WAIT))
    core.report(*named("a", 60), resource="a")
    core.report(*named("b", 60), resource="b")
    core.fail("it is broken", resource="b")
    core.report(*named("a", 10), resource="a")
    assert "broken" in core.register("w", resources=asks(b=1)).reason
    core.report(*named("b", 60), resource="b")
    assert core.state("w") == "allocated"


def test_what_was_lent_stays_lent_under_all_names_when_its_resource_is_refused() -> None:
    core = host()
    core.report("/dev/x0", resource="a")
    core.report(device("PCI-0", aliases=("/dev/x0",)), *named("c", 60), resource="c")
    holder = core.register("holder", resources=asks(c=1))
    core.report("/dev/x0", *named("a", 60), resource="a")
    assert states(core)["c"] == "driver-failed"
    assert core["holder"].resources == holder.resources
    assert core.register("w", resources=asks(a=61)).state == "pending"
    again = start_again(core)
    again.report("/dev/x0", *named("a", 60), resource="a")
    assert again.register("w2", resources=asks(a=1)).state == "pending", "w is before it, and waits for what is held"
    again.deregister("holder")
    assert again.state("w") == "allocated"


@pytest.mark.parametrize("crashes", [False, True])
def test_names_that_a_holder_was_not_told_stay_in_the_record_although_their_resource_is_refused(crashes: bool) -> None:
    core = host()
    core.report("PCI-0", resource="b")
    core.report(*(f"/dev/x{n}" for n in range(60)), resource="a")
    core.register("holder", resources=asks(a=1))
    both = device("UUID-0", aliases=("/dev/x0", "PCI-0"))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(both, *named("c", 40))))
    core.only(m.DriverReport(host=HOST, resource="a", devices=(*map(device, core.has("holder", "a")), *named("a", 80))))
    assert states(core)["c"] == "driver-failed"
    assert core.host_state.record.resources["c"].names == [["UUID-0", "/dev/x0", "PCI-0"]]
    if crashes:
        core = start_again(core)
        core.report("PCI-0", resource="b")
    assert core.register("w", resources=asks(b=1)).state == "pending"
    core.deregister("holder")
    assert core.state("w") == "allocated"


def test_names_of_a_resource_that_is_not_configured_any_more_take_room_while_somebody_holds_a_device() -> None:
    core = host()
    core.report("x", resource="a")
    core.register("holder", resources=asks(a=1))
    core.report(*named("c", 60), resource="c")
    again = start_again(core, configured=[A, m.ResourceSpec(name="b", on_failure=m.OnFailure.WAIT)])
    again.report("x", resource="a")
    again.report(*named("b", 60), resource="b")
    assert "refused" in again.register("w", resources=asks(b=1)).reason
    again.deregister("holder")
    assert again.state("w") == "allocated"


@pytest.mark.parametrize("releases", [False, True])
def test_every_decision_about_names_can_be_written(releases: bool) -> None:
    core = host()
    for step, resource in enumerate("cbacab" * 3):
        core.report(*named(resource, 30 + 7 * step % 60), resource=resource)
        core.register(f"w{step}", resources=asks(**{resource: 1}))
        if releases and step > 3:
            core.deregister(f"w{step - 3}")
    assert max(map(written, core.decisions)) <= MAX_BYTES


def test_an_on_demand_driver_whose_report_is_refused_is_not_asked_for_ever() -> None:
    core = host(A, m.ResourceSpec(name="b", on_demand=True))
    core.report(*named("a", 85), resource="a")
    core.register("w", resources=asks(b=1))
    core.report(*named("b", 20), resource="b", asked=1)
    assert core.state("w") == "failed"
    assert "refused" in core["w"].reason


def test_no_device_of_a_refused_report_is_granted_by_the_fast_path() -> None:
    core = CoreDriver(A, B)
    core.report(*named("a", 3_400), resource="a")
    core.report(*named("b", 1_000), resource="b")
    assert core.register("w1", resources=asks(b=1)).state == "failed"
    assert core.register("w2", resources=asks(a=1)).state == "allocated"


def test_a_report_is_taken_when_the_holder_ends_whose_names_took_the_room() -> None:
    core = CoreDriver(m.ResourceSpec(name="a", on_failure=m.OnFailure.WAIT), B, C, max_bytes=MAX_BYTES)
    core.report("PCI-0", resource="b")
    core.register("holder", resources=asks(b=1))
    long = tuple(f"{n}-".ljust(900, "c") for n in range(5))
    core.only(m.DriverReport(host=HOST, resource="c", devices=(device("PCI-0", aliases=long),)))
    core.only(m.DriverReport(host=HOST, resource="a", devices=tuple(named("a", 50))))
    assert "refused" in core.register("w", resources=asks(a=1)).reason
    core.deregister("holder")
    assert core.state("w") == "allocated"


@pytest.mark.parametrize("count", [59, 60, 61])
def test_one_device_more_or_less_after_a_restart_keeps_nobody_waiting(count: int) -> None:
    core = host()
    core.report(*named("a", 60), resource="a")
    core.report("L0", "L1", resource="b")
    core.register("holder", resources=asks(a=1))
    again = start_again(core)
    again.report("L0", "L1", resource="b")
    assert again.register("w1", resources=asks(b=1)).state == "allocated"
    again.report(*named("a", count), resource="a")
    assert again.register("w2", resources=asks(a=count - 1)).state == "allocated"
