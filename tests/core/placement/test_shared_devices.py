"""Resources that show the same devices: what a request can get of them together, and who waits for whom."""

from __future__ import annotations

from itertools import permutations

import pytest

from outfitter_service.core import model as m
from support.core.core_driver import CoreDriver, asks, device, ill

GPU = m.ResourceSpec(name="gpu", amount=1)
CUDA = m.ResourceSpec(name="cuda", amount=1)
MON = m.ResourceSpec(name="mon", amount=1, shared=True)


def overlapping(gpu: list[str], cuda: list[str], *more: m.ResourceSpec) -> CoreDriver:
    core = CoreDriver(GPU, CUDA, *more)
    core.report(*gpu)
    core.report(*cuda, resource="cuda")
    return core


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
    core = overlapping(devices, devices)
    record = core.register("both", resources=asks(**wanted))
    assert (record.state, record.reason_code, record.reason) == ("failed", "infeasible", said)
    assert core.register("a", 1).state == "allocated"


def test_aliases_count_as_the_device_that_they_name() -> None:
    core = CoreDriver(GPU, CUDA)
    core.report(device("GPU-1", aliases=("0000:01",)))
    core.report("0000:01", resource="cuda")
    record = core.register("w", resources=asks(gpu=1, cuda=1))
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert "GPU-1" in str(record.reason)


def test_a_third_resource_that_connects_names_makes_them_one_device() -> None:
    core = CoreDriver(GPU, CUDA, m.ResourceSpec(name="nic"))
    core.report("a")
    core.report("b", resource="cuda")
    core.report(device("n", aliases=("a", "b")), resource="nic")
    assert core.register("w", resources=asks(gpu=1, cuda=1)).reason_code == "infeasible"


def test_three_resources_that_overlap_in_part_are_matched_as_a_whole() -> None:
    """Each pair could be met, the three can not."""
    core = CoreDriver(GPU, CUDA, m.ResourceSpec(name="xpu"))
    core.report("a", "b")
    core.report("a", "b", resource="cuda")
    core.report("b", "a", resource="xpu")
    for first, second in permutations(["gpu", "cuda", "xpu"], 2):
        assert core.register("pair", resources=asks(**{first: 1, second: 1})).state == "allocated"
        core.deregister("pair")
        core.pass_time(1e6)
    record = core.register("w", resources=asks(gpu=1, cuda=1, xpu=1))
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert record.reason == "1 gpu, 1 cuda and 1 xpu requested, but the host has only 2 devices for them: a, b"


def test_only_the_resources_that_are_in_each_others_way_are_named() -> None:
    core = overlapping(["g0"], ["g0"], m.ResourceSpec(name="fpga"))
    core.report("f0", resource="fpga")
    record = core.register("w", resources=asks(fpga=1, gpu=1, cuda=1))
    assert "fpga" not in str(record.reason)


def test_ill_devices_that_would_do_are_waited_for() -> None:
    core = CoreDriver(GPU, CUDA)
    core.report("a", ill("b"))
    core.report("a", resource="cuda")
    record = core.register("w", resources=asks(gpu=1, cuda=1))
    assert (record.state, record.reason_code) == ("pending", "infeasible")
    assert core.register("other", 1).state == "allocated"
    core.deregister("other")
    core.report("a", "b")
    assert (core.has("w"), core.has("w", "cuda")) == (["b"], ["a"])


def test_a_driver_that_failed_for_now_does_not_hide_that_the_others_can_never_be_met() -> None:
    core = overlapping(["g0"], ["g0"], m.ResourceSpec(name="fpga"))
    core.fail("for now", resource="fpga")
    assert core.register("w", resources=asks(fpga=1, gpu=1, cuda=1)).state == "failed"
    core.fail("for now", resource="cuda")
    assert core.register("v", resources=asks(gpu=1, cuda=1)).reason_code == "driver-failed"


def test_what_can_not_be_met_once_a_driver_has_reported_fails_then() -> None:
    core = CoreDriver(GPU, CUDA)
    core.report("g0")
    assert core.register("w", resources=asks(gpu=1, cuda=1)).reason_code == "not-reported"
    core.report("g0", resource="cuda")
    assert (core.state("w"), core["w"].reason_code) == ("failed", "infeasible")


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
    core = CoreDriver(
        m.ResourceSpec(name="gpu", on_failure=m.OnFailure(gpu)),
        m.ResourceSpec(name="cuda", on_failure=m.OnFailure(cuda)),
    )
    core.report("g0")
    core.report("g0", resource="cuda")
    record = core.register("w", resources=asks(**wanted))
    assert (record.state, list(record.resources)) == (state, has)
    if state == "pending":
        assert core.register("v", 1).state == "allocated"  # it is in nobody's way


def test_devices_that_turn_out_to_be_one_are_counted_once() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="nic"))
    core.report("a", "b")
    core.report(device("0", aliases=("a", "b")), resource="nic")
    assert core.register("two", 2).reason_code == "infeasible"
    assert core.register("one", 1).state == "allocated"
    assert core.register("next", 1).reason_code == "busy"
    core.deregister("one")
    assert core.state("next") == "allocated"


# --- drivers that are asked ----------------------------------------------------------------------------


def test_a_driver_that_is_asked_is_asked_for_enough_to_serve_all_resources_of_a_request() -> None:
    on_demand = m.ResourceSpec(name="cuda", on_demand=True)
    core = CoreDriver(GPU, on_demand)
    core.report("g0")
    core.register("w", resources=asks(gpu=1, cuda=1))
    core.report("g0", resource="cuda", asked=1)
    [question] = [one for said in core.decisions for one in said.commands if one.amount == 2]
    assert question == m.Discover(host="h", resource="cuda", amount=2, least=1, allocation="h/w/1")
    core.report("g0", "g1", resource="cuda", asked=2)
    assert (core.has("w"), core.has("w", "cuda")) == (["g0"], ["g1"])


def test_a_driver_that_names_no_more_when_asked_fails_what_can_not_be_met() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="cuda", on_demand=True))
    core.report("g0")
    core.register("w", resources=asks(gpu=1, cuda=1))
    core.report("g0", resource="cuda", asked=1)
    core.report("g0", resource="cuda", asked=2)
    assert (core.state("w"), core["w"].reason_code) == ("failed", "infeasible")


# --- grants --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [{"gpu": 1, "cuda": 1}, {"cuda": 1, "gpu": 1}])
@pytest.mark.parametrize("order", [("gpu", "cuda"), ("cuda", "gpu")])
def test_a_grant_is_found_where_the_first_choice_would_leave_nothing_for_another_resource(
    order: tuple[str, str], wanted: dict[str, int]
) -> None:
    core = CoreDriver(*[m.ResourceSpec(name=name) for name in order])
    core.report("g0", "g1")
    core.report("g0", resource="cuda")
    record = core.register("w", resources=asks(**wanted))
    assert record.state == "allocated"
    assert (core.has("w"), core.has("w", "cuda")) == (["g1"], ["g0"])


def test_a_grant_is_found_through_a_chain_of_resources() -> None:
    core = CoreDriver(GPU, CUDA, m.ResourceSpec(name="xpu"))
    core.report("a", "b", "z")
    core.report("a", "b", resource="cuda")
    core.report("a", resource="xpu")
    core.register("w", resources=asks(gpu=1, cuda=1, xpu=1))
    assert [core.has("w", name) for name in ("gpu", "cuda", "xpu")] == [["z"], ["b"], ["a"]]


@pytest.mark.parametrize("wanted", [{"gpu": 1, "mon": 1}, {"mon": 1, "gpu": 1}])
def test_a_worker_sees_its_own_device_through_its_shared_resource_too(wanted: dict[str, int]) -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0")
    core.report("g0", resource="mon")
    record = core.register("w", resources=asks(**wanted))
    assert (record.state, core.has("w"), core.has("w", "mon")) == ("allocated", ["g0"], ["g0"])
    assert core.register("v", resources=asks(mon=1)).reason_code == "busy"
    assert core.register("u", 1).reason_code == "busy"
    core.deregister("w")
    assert (core.state("v"), core.state("u")) == ("allocated", "pending")


# --- who waits for whom --------------------------------------------------------------------------------


def test_a_stream_of_requests_for_the_same_devices_under_another_resource_starves_nobody() -> None:
    core = overlapping(["a", "b"], ["a", "b"])
    core.register("c0", resources=asks(cuda=1))
    core.register("both", 2)
    for n in range(1, 5):
        record = core.register(f"c{n}", resources=asks(cuda=1))
        assert record.state == "pending"
        assert str(record.reason).startswith("waits behind earlier workers that want")
    core.deregister("c0")
    assert core.has("both") == ["a", "b"]
    core.deregister("both")
    assert [core.state(f"c{n}") for n in range(1, 5)] == ["allocated", "allocated", "pending", "pending"]


def test_who_waits_for_one_device_keeps_it_and_no_other_from_later_workers() -> None:
    core = overlapping(["g0", "g1", "g2"], ["g0"])
    core.register("holder", 1)
    assert core.register("waits", resources=asks(cuda=1)).reason_code == "busy"
    assert core.register("later", 1).state == "allocated"
    assert core.has("later") == ["g1"]
    core.register("last", 1)
    core.deregister("holder")
    assert (core.has("waits", "cuda"), core.has("last")) == (["g0"], ["g2"])


def test_who_would_need_the_device_that_another_waits_for_waits_behind() -> None:
    core = overlapping(["g0", "g1"], ["g0"], m.ResourceSpec(name="fpga"))
    core.report("f", resource="fpga")
    core.register("fholder", resources=asks(fpga=1))
    core.register("waits", resources=asks(cuda=1, fpga=1))
    record = core.register("later", 2)
    assert (record.state, record.reason) == ("pending", "waits behind earlier workers that want cuda")
    assert core.register("small", 1).reason == "waits behind earlier workers that want gpu"
    core.deregister("fholder")
    assert (core.state("waits"), core.state("later")) == ("allocated", "pending")


def test_who_waits_for_a_device_alone_is_not_passed_by_those_who_would_share_it() -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0")
    core.report("g0", resource="mon")
    core.register("viewer", resources=asks(mon=1))
    core.register("alone", 1)
    assert core.register("late", resources=asks(mon=1)).reason == "waits behind earlier workers that want gpu"
    core.deregister("viewer")
    assert (core.state("alone"), core.state("late")) == ("allocated", "pending")
    core.deregister("alone")
    assert core.state("late") == "allocated"


def test_who_waits_to_share_devices_is_not_passed_by_those_who_would_have_them_alone() -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0", "g1")
    core.report("g0", "g1", resource="mon")
    core.register("holder", 1)
    core.register("viewer", resources=asks(mon=2))
    assert core.register("late", 1).reason == "waits behind earlier workers that want mon"
    core.deregister("holder")
    assert (core.state("viewer"), core.state("late")) == ("allocated", "pending")


def test_who_waits_to_share_many_devices_is_in_no_way_of_who_shares_few() -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0", "g1")
    core.report("g0", "g1", resource="mon")
    core.register("holder", 1)
    core.register("viewer", resources=asks(mon=2))
    assert core.register("peer", resources=asks(mon=1)).state == "allocated"


def test_everybody_who_can_share_a_device_that_came_free_does() -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0", "g1")
    core.report("g0", "g1", resource="mon")
    core.register("holder", 2)
    core.register("two", resources=asks(mon=2))
    core.register("one", resources=asks(mon=1))
    core.register("again", 2)
    core.deregister("holder")
    assert [core.state(w) for w in ("two", "one", "again")] == ["allocated", "allocated", "pending"]


def test_a_small_sharer_behind_a_large_one_is_served_when_enough_for_it_is_free() -> None:
    core = CoreDriver(GPU, MON)
    core.report("g0", "g1")
    core.report("g0", "g1", resource="mon")
    core.register("x", 1)
    core.register("y", 1)
    core.register("two", resources=asks(mon=2))
    core.register("one", resources=asks(mon=1))
    core.deregister("x")
    assert (core.state("two"), core.state("one")) == ("pending", "allocated")


def test_a_device_that_comes_free_changes_the_record_of_the_first_sharer_only() -> None:
    core = CoreDriver(GPU, MON, chunk=8)
    core.report("a", "b", "c", "d")
    core.report("a", "b", "c", "d", resource="mon")
    for holder in ("x", "y"):
        core.register(holder, 1)
    for number in range(30):
        core.register(f"s{number}", resources=asks(mon=4))
    assert core["s0"].reason == "waits for 4 mon: 2 of 4 free"
    before = len(core.decisions)
    core.deregister("x")
    assert core["s0"].reason == "waits for 4 mon: 3 of 4 free"
    assert {key for decision in core.decisions[before:] for key, _ in decision.history} == {"h/x/1", "h/s0/1"}
    core.deregister("y")
    assert all(core.state(f"s{number}") == "allocated" for number in range(30))
