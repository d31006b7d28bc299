"""All or none, the driver's order, and each kind of trouble by its own name."""

import pytest
from msgspec import UNSET

from outfitter.session import status
from outfitter_proto.records import Health
from outfitter_service.core import model as m
from outfitter_service.core.state.ledger import SetInventory
from outfitter_service.core.state.resource_state import ResourceState
from support.core.core_driver import CoreDriver, asks, device, ill
from support.core.decided import change_all

GPU = m.ResourceSpec(name="gpu", amount=1)
FPGA = m.ResourceSpec(name="fpga", amount=1)


def test_a_worker_gets_devices_in_the_drivers_order() -> None:
    core = CoreDriver(GPU)
    core.report("b", "a", "c")
    core.register("w", 2)
    assert core.has("w") == ["b", "a"]
    assert [info["local_index"] for info in core["w"].resources["gpu"]] == ["0", "1"]


def test_a_released_device_takes_its_old_place_in_the_order() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b", "c")
    for worker in "xyz":
        core.register(worker, 1)
    core.deregister("y")
    core.deregister("x")
    core.register("w", 2)
    assert core.has("w") == ["a", "b"]


def test_a_worker_gets_all_its_resources_or_none() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report("g0", "g1")
    core.report("f0", resource="fpga")
    core.register("holder", resources=asks(fpga=1))
    core.register("w", resources=asks(gpu=1, fpga=1))
    assert core.state("w") == "pending"
    assert core["w"].resources == {}
    core.deregister("holder")
    assert core.state("w") == "allocated"
    assert core.has("w") == ["g0"]
    assert core.has("w", "fpga") == ["f0"]


def test_resources_left_out_mean_the_configured_amounts() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=2), m.ResourceSpec(name="off", state=m.SpecState.DISABLED))
    core.report("a", "b", "c")
    record = core.register("w")
    assert core.has("w") == ["a", "b"]
    assert record.request.resources is None
    assert record.request.amounts == {"gpu": 2}
    assert record.unavailable["off"].code == "disabled"


def test_a_worker_that_asks_for_nothing_is_granted_nothing_at_once() -> None:
    core = CoreDriver(GPU)
    record = core.register("w", resources={})
    assert (record.state, record.resources, record.token) == ("allocated", {}, 1)


@pytest.mark.parametrize("state", [m.SpecState.DISABLED, m.SpecState.NO_DRIVER, m.SpecState.MISCONFIGURED])
def test_an_explicit_request_for_a_resource_that_is_not_in_effect_fails_with_its_own_reason(
    state: m.SpecState,
) -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", state=state, reason=f"because {state}"))
    record = core.register("w", 1)
    assert (record.state, record.reason_code, record.reason) == ("failed", state, f"because {state}")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (m.SpecState.DISABLED, "allocated"),
        (m.SpecState.NO_DRIVER, "allocated"),
        (m.SpecState.MISCONFIGURED, "failed"),
    ],
)
def test_resources_left_out_fail_only_where_the_configuration_is_wrong(state: m.SpecState, expected: str) -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, state=state))
    record = core.register("w")
    assert record.state == expected
    if expected == "allocated":
        assert record.unavailable["gpu"].code == state


def test_a_resource_in_effect_without_an_amount_is_a_wrong_setting() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=None))
    assert core.register("w").reason_code == "misconfigured"
    core.report("a")
    assert core.register("explicit", 1).state == "allocated"


def test_an_unknown_resource_fails_with_the_names_that_are_known() -> None:
    core = CoreDriver(GPU, FPGA)
    record = core.register("w", resources=asks(gpus=1))
    assert (record.state, record.reason_code) == ("failed", "unknown-resource")
    assert "'gpus'" in str(record.reason)
    assert "fpga, gpu" in str(record.reason)


def test_a_driver_that_has_not_reported_is_waited_for() -> None:
    core = CoreDriver(GPU)
    assert core.register("w", 1).reason_code == "not-reported"
    core.report("a")
    assert core.state("w") == "allocated"


def test_more_than_was_discovered_fails_with_both_numbers() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    record = core.register("w", 3)
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert record.reason == "3 gpu requested, 2 discovered"


def test_more_than_is_healthy_waits_until_enough_are_healthy_again() -> None:
    core = CoreDriver(GPU)
    core.report("a", ill("b"))
    assert core.register("w", 2).reason_code == "infeasible"
    assert core.state("w") == "pending"
    core.report("a", "b")
    assert core.has("w") == ["a", "b"]


def test_held_devices_make_a_worker_wait_with_the_numbers() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b")
    core.register("holder", 1)
    record = core.register("w", 2)
    assert (record.state, record.reason_code) == ("pending", "busy")
    assert record.reason == "waits for 2 gpu: 1 of 2 free"


def test_a_temporary_failure_of_a_driver_is_waited_for_and_grants_nothing_of_what_was_known() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.fail("nvidia-smi hangs")
    record = core.register("w", 1)
    assert (record.state, record.reason_code) == ("pending", "driver-failed")
    assert "nvidia-smi hangs" in str(record.reason)
    core.report("a")
    assert core.state("w") == "allocated"


def test_an_ill_device_is_lent_to_nobody() -> None:
    core = CoreDriver(GPU)
    core.report(ill("a"), device("u", health=Health.UNKNOWN), "b")
    core.register("w", 1)
    assert core.has("w") == ["b"]


def test_a_device_that_was_ill_when_released_is_lent_when_it_has_healed() -> None:
    core = CoreDriver(GPU)
    core.report("a")
    core.register("w", 1)
    core.report(ill("a"))
    core.deregister("w")
    core.register("next", 1)
    assert core.state("next") == "pending"
    core.report("a")
    assert core.has("next") == ["a"]


@pytest.mark.parametrize(
    ("on_failure", "state"),
    [
        (m.OnFailure.FAIL_WORKER, "failed"),
        (m.OnFailure.NO_INFO, "allocated"),
        (m.OnFailure.WAIT, "pending"),
    ],
)
@pytest.mark.parametrize("first", ["worker", "driver"])
def test_a_driver_that_failed_for_good_fails_the_worker_or_gives_no_infos_or_is_waited_for(
    on_failure: m.OnFailure, state: str, first: str
) -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", on_failure=on_failure), FPGA)
    core.report("f", resource="fpga")
    if first == "driver":
        core.fail("no NVIDIA driver", permanent=True)
    core.register("w", resources=asks(gpu=1, fpga=1))
    if first == "worker":
        core.fail("no NVIDIA driver", permanent=True)
    record = core["w"]
    assert record.state == state
    if state == "allocated":
        assert (core.has("w"), core.has("w", "fpga")) == ([], ["f"])
        assert record.unavailable["gpu"].code == "driver-failed"
        assert record.request.resources == asks(gpu=1, fpga=1)
    else:
        assert record.reason_code == "driver-failed"
        assert "no NVIDIA driver" in str(record.reason)


def test_many_resources_that_fail_with_no_info_cost_no_recursion() -> None:
    names = [f"r{i}" for i in range(2000)]
    core = CoreDriver(*[m.ResourceSpec(name=name, amount=1, on_failure=m.OnFailure.NO_INFO) for name in names])
    gone = ResourceState(failure=m.DriverFailure(reason="gone", permanent=True))
    change_all(core.ledger, [SetInventory("h", name, gone) for name in names])
    record = core.register("w")
    assert (record.state, len(record.unavailable)) == ("allocated", 2000)


def test_values_of_several_devices_for_one_variable_are_joined_and_equal_ones_told_once() -> None:
    core = CoreDriver(GPU)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    core.report(
        device("a", env={"CUDA_VISIBLE_DEVICES": "a", **order}, cdi=("nvidia.com/gpu=a",)),
        device("b", env={"CUDA_VISIBLE_DEVICES": "b", **order}, cdi=("nvidia.com/gpu=b",)),
    )
    record = core.register("w", 2)
    assert record.env == {"CUDA_VISIBLE_DEVICES": "a,b", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert record.cdi == ["nvidia.com/gpu=a", "nvidia.com/gpu=b"]


# --- operators -----------------------------------------------------------------------------------------


def test_a_named_operator_gets_its_own_devices_and_the_rest_is_in_no_share() -> None:
    core = CoreDriver(GPU)
    core.report("a", "b", "c", "d")
    record = core.register("w", 4, operators={"infer": asks(gpu=2), "train": asks(gpu=1)})
    assert record.operators["infer"].resources == {"gpu": ["a", "b"]}
    assert record.operators["train"].resources == {"gpu": ["c"]}
    assert core.has("w") == ["a", "b", "c", "d"]


def test_an_operators_share_has_the_environment_of_its_own_devices() -> None:
    core = CoreDriver(GPU)
    core.report(device("a", env={"V": "a"}), device("b", env={"V": "b"}))
    record = core.register("w", 2, operators={"one": asks(gpu=1), "two": asks(gpu=1)})
    assert [record.operators[name].env for name in ("one", "two")] == [{"V": "a"}, {"V": "b"}]


@pytest.mark.parametrize(
    ("operators", "code"),
    [
        ({"a": asks(gpu=2), "b": asks(gpu=1)}, "invalid-request"),
        ({"a": asks(fpga=1)}, "invalid-request"),
        ({"a": asks(nonsense=1)}, "unknown-resource"),
    ],
)
def test_operators_may_ask_for_no_more_than_their_worker(operators: object, code: str) -> None:
    core = CoreDriver(GPU, FPGA)
    core.report("a", "b")
    record = core.register("w", 2, operators=operators)
    assert (record.state, record.reason_code) == ("failed", code)


def test_an_operator_that_names_a_resource_which_is_switched_off_fails_its_worker_with_that_reason() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", state=m.SpecState.DISABLED))
    record = core.register("w", operators={"infer": asks(gpu=1)})
    assert (record.state, record.reason_code) == ("failed", "disabled")


# --- shared resources ----------------------------------------------------------------------------------


def test_every_worker_gets_all_healthy_devices_of_a_shared_resource() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, shared=True))
    core.report("a", ill("b"), "c")
    for worker in ("w1", "w2"):
        core.register(worker, 1)
        assert core.has(worker) == ["a", "c"]
        assert core[worker].shared == ["gpu"]


def test_operators_see_all_of_a_shared_resource_and_divide_nothing() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, shared=True))
    core.report("a", "b")
    record = core.register("w", 1, operators={"one": asks(gpu=1), "two": asks(gpu=1)})
    assert [(share.resources, share.shared) for share in record.operators.values()] == [({}, ["gpu"])] * 2
    assert record.common is not UNSET
    assert record.common["gpu"].resources == {"gpu": ["a", "b"]}


def test_an_operator_has_its_own_devices_and_all_shared_ones_and_the_others_what_is_left() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="net", shared=True))
    core.report(*[device(name, env={"DEVICES": name}) for name in ("a", "b")])
    core.report(*[device(name, env={"DEVICES": name}) for name in ("n0", "n1")], resource="net")
    record = core.register("w", resources=asks(gpu=2, net=1), operators={"infer": asks(gpu=1, net=1)})
    seen = [[i["id"] for i in status.infos(record, name, who)] for name in ("gpu", "net") for who in ("infer", "other")]
    assert seen == [["a"], ["b"], ["n0", "n1"], ["n0", "n1"]]
    assert status.environment(record, "infer", ("DEVICES",)) == {"DEVICES": "a,n0,n1"}
    assert status.environment(record, "other", ("DEVICES",)) == {"DEVICES": "a,b,n0,n1"}


def test_operators_that_want_the_same_of_what_is_shared_have_one_share_in_common() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", shared=True))
    core.report(*[f"g{number}" for number in range(50)])
    record = core.register("w", 1, operators={f"o{number}": asks(gpu=1) for number in range(100)})
    assert len({id(share) for share in record.operators.values()}) == 1


def test_a_shared_resource_with_too_few_healthy_devices_is_waited_for() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=2, shared=True))
    core.report("a", ill("b"))
    assert core.register("w").reason_code == "infeasible"
    core.report("a", "b")
    assert core.has("w") == ["a", "b"]


def test_a_device_that_one_worker_has_alone_is_in_no_shared_grant_and_the_other_way_round() -> None:
    core = CoreDriver(GPU, m.ResourceSpec(name="screen", shared=True))
    core.report("a", "b")
    core.report("a", "b", resource="screen")
    core.register("alone", 1)
    core.register("viewer", resources=asks(screen=1))
    assert core.has("viewer", "screen") == ["b"]
    assert core.register("next", 1).reason_code == "busy"
    core.deregister("viewer")
    assert core.has("next") == ["b"]


# --- one device under several names --------------------------------------------------------------------


def test_a_device_held_under_one_name_is_held_under_its_aliases_in_every_resource() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report(device("GPU-1", aliases=("0000:01:00",)))
    core.report("0000:01:00", resource="fpga")
    core.register("w", 1)
    assert core.register("other", resources=asks(fpga=1)).reason_code == "busy"
    core.deregister("w")
    assert core.has("other", "fpga") == ["0000:01:00"]
    assert core.register("third", 1).reason_code == "busy"


def test_aliases_that_are_reported_after_the_grant_count_as_well() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report("0000:01:00", resource="fpga")
    core.register("w", resources=asks(fpga=1))
    core.report(device("GPU-1", aliases=("0000:01:00",)))
    assert core.register("other", 1).reason_code == "busy"


def test_one_worker_does_not_get_one_device_twice_under_two_resources() -> None:
    core = CoreDriver(GPU, FPGA)
    core.report(device("GPU-1", aliases=("x",)), "GPU-2")
    core.report("x", "GPU-2", resource="fpga")
    record = core.register("w", resources=asks(gpu=1, fpga=1))
    assert (core.has("w"), core.has("w", "fpga")) == (["GPU-1"], ["GPU-2"])
    assert record.state == "allocated"


def test_devices_of_one_report_that_share_a_name_are_one_device() -> None:
    core = CoreDriver(GPU)
    core.report("a", "a", device("b", aliases=("a",)))
    assert core.register("w", 2).reason == "2 gpu requested, 1 discovered"
