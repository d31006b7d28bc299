"""Resources that show the same devices: what a request can get of them together, and who waits for whom."""

from __future__ import annotations

from itertools import permutations

import pytest

from outfitter_service.core import model as m
from support.core_driver import CoreDriver, asks, device, ill

GPU = m.ResourceSpec(name="gpu", amount=1)
CUDA = m.ResourceSpec(name="cuda", amount=1)
MON = m.ResourceSpec(name="mon", amount=1, shared=True)


def overlapping(gpu: list[str], cuda: list[str], *more: m.ResourceSpec) -> CoreDriver:
    desk = CoreDriver(GPU, CUDA, *more)
    desk.report(*gpu)
    desk.report(*cuda, resource="cuda")
    return desk


# --- what can never be met -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "wanted", "said"),
    [
        (["g0"], {"gpu": 1, "cuda": 1}, "1 gpu and 1 cuda requested, but the host has only 1 device for them: g0"),
        (["g0"], {"cuda": 1, "gpu": 1}, "1 gpu and 1 cuda requested, but the host has only 1 device for them: g0"),
        (
            ["a", "b"],
            {"gpu": 2, "cuda": 1},
            "2 gpu and 1 cuda requested, but the host has only 2 devices for them: a, b",
        ),
    ],
)
def test_more_than_resources_show_between_them_fails_at_once_and_blocks_nobody(
    devices: list[str], wanted: dict[str, int], said: str
) -> None:
    desk = overlapping(devices, devices)
    record = desk.register("both", resources=asks(**wanted))
    assert (record.state, record.reason_code, record.reason) == ("failed", "infeasible", said)
    assert desk.register("a", 1).state == "allocated"


def test_aliases_count_as_the_device_that_they_name() -> None:
    desk = CoreDriver(GPU, CUDA)
    desk.report(device("GPU-1", aliases=("0000:01",)))
    desk.report("0000:01", resource="cuda")
    record = desk.register("w", resources=asks(gpu=1, cuda=1))
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert "GPU-1" in str(record.reason)


def test_a_third_resource_that_connects_names_makes_them_one_device() -> None:
    desk = CoreDriver(GPU, CUDA, m.ResourceSpec(name="nic"))
    desk.report("a")
    desk.report("b", resource="cuda")
    desk.report(device("n", aliases=("a", "b")), resource="nic")
    assert desk.register("w", resources=asks(gpu=1, cuda=1)).reason_code == "infeasible"


def test_three_resources_that_overlap_in_part_are_matched_as_a_whole() -> None:
    """Each pair could be met, the three can not."""
    desk = CoreDriver(GPU, CUDA, m.ResourceSpec(name="xpu"))
    desk.report("a", "b")
    desk.report("a", "b", resource="cuda")
    desk.report("b", "a", resource="xpu")
    for first, second in permutations(["gpu", "cuda", "xpu"], 2):
        assert desk.register("pair", resources=asks(**{first: 1, second: 1})).state == "allocated"
        desk.deregister("pair")
        desk.pass_time(1e6)
    record = desk.register("w", resources=asks(gpu=1, cuda=1, xpu=1))
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert record.reason == "1 gpu, 1 cuda and 1 xpu requested, but the host has only 2 devices for them: a, b"


def test_only_the_resources_that_are_in_each_others_way_are_named() -> None:
    desk = overlapping(["g0"], ["g0"], m.ResourceSpec(name="fpga"))
    desk.report("f0", resource="fpga")
    record = desk.register("w", resources=asks(fpga=1, gpu=1, cuda=1))
    assert "fpga" not in str(record.reason)


def test_ill_devices_that_would_do_are_waited_for() -> None:
    desk = CoreDriver(GPU, CUDA)
    desk.report("a", ill("b"))
    desk.report("a", resource="cuda")
    record = desk.register("w", resources=asks(gpu=1, cuda=1))
    assert (record.state, record.reason_code) == ("pending", "infeasible")
    assert desk.register("other", 1).state == "allocated"
    desk.deregister("other")
    desk.report("a", "b")
    assert (desk.has("w"), desk.has("w", "cuda")) == (["b"], ["a"])


def test_a_driver_that_failed_for_now_does_not_hide_that_the_others_can_never_be_met() -> None:
    desk = overlapping(["g0"], ["g0"], m.ResourceSpec(name="fpga"))
    desk.fail("for now", resource="fpga")
    assert desk.register("w", resources=asks(fpga=1, gpu=1, cuda=1)).state == "failed"
    desk.fail("for now", resource="cuda")
    assert desk.register("v", resources=asks(gpu=1, cuda=1)).reason_code == "driver-failed"


def test_what_can_not_be_met_once_a_driver_has_reported_fails_then() -> None:
    desk = CoreDriver(GPU, CUDA)
    desk.report("g0")
    assert desk.register("w", resources=asks(gpu=1, cuda=1)).reason_code == "not-reported"
    desk.report("g0", resource="cuda")
    assert (desk.state("w"), desk["w"].reason_code) == ("failed", "infeasible")


@pytest.mark.parametrize("wanted", [{"gpu": 1, "cuda": 1}, {"cuda": 1, "gpu": 1}])
@pytest.mark.parametrize(
    ("gpu", "cuda", "state", "has"),
    [
        ("fail-worker", "no-info", "allocated", ["gpu"]),
        ("no-info", "fail-worker", "allocated", ["cuda"]),
        ("no-info", "no-info", "allocated", ["gpu"]),
        ("fail-worker", "wait", "pending", []),
        ("wait", "fail-worker", "pending", []),
        ("wait", "no-info", "allocated", ["gpu"]),
    ],
)
def test_what_happens_to_resources_that_can_not_be_met_together_is_as_on_failure_says(
    gpu: str, cuda: str, state: str, has: list[str], wanted: dict[str, int]
) -> None:
    desk = CoreDriver(
        m.ResourceSpec(name="gpu", on_failure=m.OnFailure(gpu)),
        m.ResourceSpec(name="cuda", on_failure=m.OnFailure(cuda)),
    )
    desk.report("g0")
    desk.report("g0", resource="cuda")
    record = desk.register("w", resources=asks(**wanted))
    assert (record.state, list(record.resources)) == (state, has)
    if state == "pending":
        assert desk.register("v", 1).state == "allocated"  # it is in nobody's way


def test_devices_that_turn_out_to_be_one_are_counted_once() -> None:
    desk = CoreDriver(GPU, m.ResourceSpec(name="nic"))
    desk.report("a", "b")
    desk.report(device("0", aliases=("a", "b")), resource="nic")
    assert desk.register("two", 2).reason_code == "infeasible"
    assert desk.register("one", 1).state == "allocated"
    assert desk.register("next", 1).reason_code == "busy"
    desk.deregister("one")
    assert desk.state("next") == "allocated"


# --- drivers that are asked ----------------------------------------------------------------------------


def test_a_driver_that_is_asked_is_asked_for_enough_to_serve_all_resources_of_a_request() -> None:
    on_demand = m.ResourceSpec(name="cuda", on_demand=True)
    desk = CoreDriver(GPU, on_demand)
    desk.report("g0")
    desk.register("w", resources=asks(gpu=1, cuda=1))
    desk.report("g0", resource="cuda", asked=1)
    [question] = [one for said in desk.decisions for one in said.commands if one.amount == 2]
    assert question == m.Discover(host="h", resource="cuda", amount=2, least=1, allocation="h/w/1")
    desk.report("g0", "g1", resource="cuda", asked=2)
    assert (desk.has("w"), desk.has("w", "cuda")) == (["g0"], ["g1"])


def test_a_driver_that_names_no_more_when_asked_fails_what_can_not_be_met() -> None:
    desk = CoreDriver(GPU, m.ResourceSpec(name="cuda", on_demand=True))
    desk.report("g0")
    desk.register("w", resources=asks(gpu=1, cuda=1))
    desk.report("g0", resource="cuda", asked=1)
    desk.report("g0", resource="cuda", asked=2)
    assert (desk.state("w"), desk["w"].reason_code) == ("failed", "infeasible")


# --- grants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [{"gpu": 1, "cuda": 1}, {"cuda": 1, "gpu": 1}])
@pytest.mark.parametrize("order", [("gpu", "cuda"), ("cuda", "gpu")])
def test_a_grant_is_found_where_the_first_choice_would_leave_nothing_for_another_resource(
    order: tuple[str, str], wanted: dict[str, int]
) -> None:
    desk = CoreDriver(*[m.ResourceSpec(name=name) for name in order])
    desk.report("g0", "g1")
    desk.report("g0", resource="cuda")
    record = desk.register("w", resources=asks(**wanted))
    assert record.state == "allocated"
    assert (desk.has("w"), desk.has("w", "cuda")) == (["g1"], ["g0"])


def test_a_grant_is_found_through_a_chain_of_resources() -> None:
    desk = CoreDriver(GPU, CUDA, m.ResourceSpec(name="xpu"))
    desk.report("a", "b", "z")
    desk.report("a", "b", resource="cuda")
    desk.report("a", resource="xpu")
    desk.register("w", resources=asks(gpu=1, cuda=1, xpu=1))
    assert [desk.has("w", name) for name in ("gpu", "cuda", "xpu")] == [["z"], ["b"], ["a"]]


@pytest.mark.parametrize("wanted", [{"gpu": 1, "mon": 1}, {"mon": 1, "gpu": 1}])
def test_a_worker_sees_its_own_device_through_its_shared_resource_too(wanted: dict[str, int]) -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0")
    desk.report("g0", resource="mon")
    record = desk.register("w", resources=asks(**wanted))
    assert (record.state, desk.has("w"), desk.has("w", "mon")) == ("allocated", ["g0"], ["g0"])
    assert desk.register("v", resources=asks(mon=1)).reason_code == "busy"
    assert desk.register("u", 1).reason_code == "busy"
    desk.deregister("w")
    assert (desk.state("v"), desk.state("u")) == ("allocated", "pending")


# --- who waits for whom --------------------------------------------------------------------------------


def test_a_stream_of_requests_for_the_same_devices_under_another_resource_starves_nobody() -> None:
    desk = overlapping(["a", "b"], ["a", "b"])
    desk.register("c0", resources=asks(cuda=1))
    desk.register("both", 2)
    for n in range(1, 5):
        record = desk.register(f"c{n}", resources=asks(cuda=1))
        assert record.state == "pending"
        assert str(record.reason).startswith("waits behind earlier workers that want")
    desk.deregister("c0")
    assert desk.has("both") == ["a", "b"]
    desk.deregister("both")
    assert [desk.state(f"c{n}") for n in range(1, 5)] == ["allocated", "allocated", "pending", "pending"]


def test_who_waits_for_one_device_keeps_it_and_no_other_from_later_workers() -> None:
    desk = overlapping(["g0", "g1", "g2"], ["g0"])
    desk.register("holder", 1)
    assert desk.register("waits", resources=asks(cuda=1)).reason_code == "busy"
    assert desk.register("later", 1).state == "allocated"
    assert desk.has("later") == ["g1"]
    desk.register("last", 1)
    desk.deregister("holder")
    assert (desk.has("waits", "cuda"), desk.has("last")) == (["g0"], ["g2"])


def test_who_would_need_the_device_that_another_waits_for_waits_behind() -> None:
    desk = overlapping(["g0", "g1"], ["g0"], m.ResourceSpec(name="fpga"))
    desk.report("f", resource="fpga")
    desk.register("fholder", resources=asks(fpga=1))
    desk.register("waits", resources=asks(cuda=1, fpga=1))
    record = desk.register("later", 2)
    assert (record.state, record.reason) == ("pending", "waits behind earlier workers that want cuda")
    assert desk.register("small", 1).reason == "waits behind earlier workers that want gpu"
    desk.deregister("fholder")
    assert (desk.state("waits"), desk.state("later")) == ("allocated", "pending")


def test_who_waits_for_a_device_alone_is_not_passed_by_those_who_would_share_it() -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0")
    desk.report("g0", resource="mon")
    desk.register("viewer", resources=asks(mon=1))
    desk.register("alone", 1)
    assert desk.register("late", resources=asks(mon=1)).reason == "waits behind earlier workers that want gpu"
    desk.deregister("viewer")
    assert (desk.state("alone"), desk.state("late")) == ("allocated", "pending")
    desk.deregister("alone")
    assert desk.state("late") == "allocated"


def test_who_waits_to_share_devices_is_not_passed_by_those_who_would_have_them_alone() -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0", "g1")
    desk.report("g0", "g1", resource="mon")
    desk.register("holder", 1)
    desk.register("viewer", resources=asks(mon=2))
    assert desk.register("late", 1).reason == "waits behind earlier workers that want mon"
    desk.deregister("holder")
    assert (desk.state("viewer"), desk.state("late")) == ("allocated", "pending")


def test_who_waits_to_share_many_devices_is_in_no_way_of_who_shares_few() -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0", "g1")
    desk.report("g0", "g1", resource="mon")
    desk.register("holder", 1)
    desk.register("viewer", resources=asks(mon=2))
    assert desk.register("peer", resources=asks(mon=1)).state == "allocated"


def test_everybody_who_can_share_a_device_that_came_free_does() -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0", "g1")
    desk.report("g0", "g1", resource="mon")
    desk.register("holder", 2)
    desk.register("two", resources=asks(mon=2))
    desk.register("one", resources=asks(mon=1))
    desk.register("again", 2)
    desk.deregister("holder")
    assert [desk.state(w) for w in ("two", "one", "again")] == ["allocated", "allocated", "pending"]


def test_a_small_sharer_behind_a_large_one_is_served_when_enough_for_it_is_free() -> None:
    desk = CoreDriver(GPU, MON)
    desk.report("g0", "g1")
    desk.report("g0", "g1", resource="mon")
    desk.register("x", 1)
    desk.register("y", 1)
    desk.register("two", resources=asks(mon=2))
    desk.register("one", resources=asks(mon=1))
    desk.deregister("x")
    assert (desk.state("two"), desk.state("one")) == ("pending", "allocated")
