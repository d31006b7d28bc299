"""Workers that take certain devices only: what they get, why they wait, and who does not wait behind them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, structs

from outfitter_proto import clauses
from outfitter_proto.clauses import Clauses, clauses_of
from outfitter_proto.records import (
    Allocation,
    Condition,
    Deregister,
    Register,
    ResourceChoice,
    ResourceRequest,
    Source,
)
from outfitter_service.core import model as m
from outfitter_service.core import reasons
from outfitter_service.core.placement import search
from outfitter_service.core.state import selections, wants
from support.core.core_driver import HOST, CoreDriver, asks, ill, restarted

GPU = m.ResourceSpec(name="gpu", amount=1)
CUDA = m.ResourceSpec(name="cuda", amount=1)
MIG = m.ResourceSpec(name="mig", amount=1)
MON = m.ResourceSpec(name="mon", amount=1, shared=True)


def device(name: str, **properties: str) -> m.KnownDevice:
    named = {key.replace("_", "."): value for key, value in properties.items()}
    return m.KnownDevice(id=name, properties={"index": name, **named})


def wanting(amount: int, where: Any = UNSET, same: Any = UNSET, resource: str = "gpu") -> dict[str, ResourceRequest]:
    return {resource: ResourceRequest(amount=amount, where=where, same=same)}


def fleet() -> CoreDriver:
    """Two A100 and two H100."""
    core = CoreDriver(GPU)
    core.report(
        device("a0", model="A100", memory="40Gi"),
        device("h0", model="H100", memory="80Gi"),
        device("a1", model="A100", memory="80Gi"),
        device("h1", model="H100", memory="80Gi"),
    )
    return core


H100 = {"model": "H1*"}


def choose(core: CoreDriver, worker: str, amount: int, where: Any = UNSET, same: Any = UNSET) -> Allocation:
    return core.register(worker, resources=wanting(amount, where, same))


# --- where ----------------------------------------------------------------------------------------------


def test_a_worker_gets_devices_that_meet_its_clauses_in_the_drivers_order() -> None:
    core = fleet()
    record = choose(core, "w", 2, {"memory": Condition(min="80Gi")})
    assert core.has("w") == ["h0", "a1"]
    assert record.request.choices == {"gpu": ResourceChoice(where={"memory": Condition(min="80Gi")})}
    assert record.request.resources == asks(gpu=2)


def test_a_device_can_be_named() -> None:
    core = fleet()
    choose(core, "w", 1, {"id": ("h1", "zz")})
    assert core.has("w") == ["h1"]


def test_who_asks_for_what_there_is_not_fails_with_the_number_that_each_clause_excluded() -> None:
    core = fleet()
    record = choose(core, "w", 2, {"model": "A100", "memory": Condition(min="80Gi")})
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert record.reason == (
        "2 gpu with memory at least 80Gi and model is A100 requested, 1 of 4 discovered are so; model is H100: 2, "
        "memory below 80Gi: 1"
    )


def test_illness_is_told_apart_from_what_there_is_not() -> None:
    core = CoreDriver(GPU)
    core.report(device("a0", model="A100"), structs.replace(ill("h0"), properties={"model": "H100"}))
    record = choose(core, "w", 1, H100)
    assert (record.state, record.reason_code) == ("pending", "infeasible")
    assert record.reason == (
        "1 gpu with model is H1* requested, 0 of 1 such can be lent; granted when enough are healthy again"
    )
    assert core.register("v", 1).state == "allocated", "who cannot be served blocks nobody"


def test_who_asks_for_what_there_is_not_does_not_wait_until_ill_devices_are_well() -> None:
    core = CoreDriver(GPU)
    core.report(device("h0", model="H100"), structs.replace(ill("a0"), properties={"model": "A100"}))
    record = choose(core, "w", 2, H100)
    assert (record.state, record.reason_code) == ("failed", "infeasible"), record.reason


def test_who_chooses_waits_for_a_resource_of_which_no_device_is_there() -> None:
    core = CoreDriver(structs.replace(GPU, on_failure=m.OnFailure.WAIT))
    core.report()
    assert choose(core, "w", 1, H100).reason == "1 gpu requested, 0 discovered"


def test_orders_are_told_apart_from_illness() -> None:
    core = fleet()
    core.cordon(device="h0")
    record = choose(core, "w", 2, H100)
    assert (record.state, record.reason_code) == ("pending", "cordoned")
    assert record.reason == (
        "2 gpu with model is H1* requested, 1 of 2 such can be lent; granted when enough are healthy again and enough "
        "orders have ended"
    )


def test_a_waiter_for_one_model_does_not_hold_up_the_others() -> None:
    core = fleet()
    choose(core, "holder", 1, H100)
    record = choose(core, "w", 2, H100)
    assert (record.state, record.reason_code) == ("pending", "busy")
    assert record.reason == "waits for 2 gpu with model is H1*: 1 of 2 free"
    assert core.register("v", 1).state == "allocated"
    assert core.has("v") == ["a0"]
    assert choose(core, "u", 1, {"model": "A100"}).state == "allocated"
    behind = core.register("x", 1)
    assert behind.state == "pending", "h1 is left to w"
    core.deregister("holder")
    assert core.has("w") == ["h0", "h1"]
    core.deregister("v")
    assert core.has("x") == ["a0"]


def test_a_waiter_that_takes_any_device_comes_before_later_ones_that_choose() -> None:
    core = fleet()
    core.register("holder", 2)
    assert core.register("w", 3).state == "pending"
    record = choose(core, "v", 1, {"model": "A100"})
    assert (record.state, record.reason) == ("pending", "waits behind earlier workers that want gpu")
    core.deregister("w")
    assert core.state("v") == "allocated"


def test_who_wants_the_same_stands_behind_each_other() -> None:
    core = fleet()
    choose(core, "holder", 1, H100)
    choose(core, "first", 2, H100)
    assert choose(core, "second", 1, H100).state == "pending"
    core.deregister("first")
    assert core.has("second") == ["h1"]


def test_different_wishes_claim_what_they_have_in_common() -> None:
    core = fleet()
    choose(core, "holder", 1, H100)
    choose(core, "first", 3, {"memory": Condition(min="80Gi")})
    assert choose(core, "second", 1, {"model": "A100"}).state == "allocated"
    assert core.has("second") == ["a0"]
    third = choose(core, "third", 1, {"model": "A100"})
    assert (third.state, third.reason) == ("pending", "waits behind earlier workers that want gpu")


def test_a_released_device_goes_to_the_first_who_takes_it() -> None:
    core = fleet()
    core.register("all", 4)
    choose(core, "first", 1, H100)
    choose(core, "second", 1, {"model": "A100"})
    core.register("third", 1)
    core.deregister("all")
    assert (core.has("first"), core.has("second"), core.has("third")) == (["h0"], ["a0"], ["a1"])


def test_a_changed_property_serves_a_waiter() -> None:
    core = fleet()
    choose(core, "holder", 2, H100)
    choose(core, "w", 1, {"model": "H100"})
    core.report(device("a0", model="H100"), device("h0", model="H100"), device("h1", model="H100"))
    assert core.has("w") == ["a0"]


def test_what_a_worker_says_counts_before_the_configuration() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, clauses=clauses_of(H100, None)))
    core.report(device("a0", model="A100"), device("h0", model="H100"), device("h1", model="H100"))
    core.register("by_configuration")
    core.register("amount_alone", 1)
    choose(core, "any", 1, {})
    assert core.has("by_configuration") == ["h0"]
    assert core.has("amount_alone") == ["h1"]
    assert core.has("any") == ["a0"]
    assert core["any"].request.choices is UNSET


def test_a_shared_resource_shows_the_devices_that_the_worker_takes() -> None:
    core = CoreDriver(MON)
    core.report(device("a0", model="A100"), device("h0", model="H100"), resource="mon")
    core.register("w", resources=wanting(1, H100, resource="mon"))
    assert core.has("w", "mon") == ["h0"]


# --- same -----------------------------------------------------------------------------------------------


def in_groups(*groups: str) -> CoreDriver:
    core = CoreDriver(GPU)
    core.report(*[device(f"g{number}", group=group) for number, group in enumerate(groups)])
    return core


def test_all_devices_of_a_worker_have_a_value_in_common() -> None:
    core = in_groups("x", "y", "x", "y")
    choose(core, "w", 2, same=("group",))
    assert core.has("w") == ["g0", "g2"]


def test_the_smallest_group_that_is_large_enough_is_taken() -> None:
    core = in_groups("x", "x", "x", "y", "y")
    choose(core, "w", 2, same=("group",))
    assert core.has("w") == ["g3", "g4"], "three stay together"


def test_a_device_may_be_in_several_groups() -> None:
    core = in_groups("two-0,four", "two-0,four", "two-1,four", "two-1,four")
    core.register("holder", 1)
    choose(core, "w", 2, same=("group",))
    assert core.has("w") == ["g2", "g3"]
    core.deregister("w")
    choose(core, "v", 3, same=("group",))
    assert core.has("v") == ["g1", "g2", "g3"]


def test_several_properties_must_each_be_in_common() -> None:
    core = CoreDriver(GPU)
    core.report(device("g0", group="x", numa="0"), device("g1", group="x", numa="1"), device("g2", group="x", numa="1"))
    choose(core, "w", 2, same=("group", "numa"))
    assert core.has("w") == ["g1", "g2"]


def test_one_device_needs_nothing_in_common() -> None:
    core = CoreDriver(GPU)
    core.report(device("g0"))
    choose(core, "w", 1, same=("group",))
    assert core.has("w") == ["g0"]


def test_too_little_in_common_is_said() -> None:
    core = in_groups("x", "x", "y", "y", "z")
    never = choose(core, "never", 3, same=("group",))
    assert (never.state, never.reason_code) == ("failed", "infeasible")
    assert never.reason == ("3 gpu, one group for all requested, and at most 2 of 5 discovered have one group")
    core.register("x", 1)
    choose(core, "y", 1, {"group": "y"})
    record = choose(core, "w", 2, same=("group",))
    assert (record.state, record.reason_code) == ("pending", "busy")
    assert record.reason == "waits for 2 gpu, one group for all: 3 of 5 free, but too few of one group"
    assert core.register("v", 1).state == "allocated", "z can never be one of two"
    assert core.has("v") == ["g4"]
    assert core.register("u", 1).state == "pending"


# --- several resources ----------------------------------------------------------------------------------


def test_resources_with_the_same_devices_are_chosen_together() -> None:
    core = CoreDriver(GPU, CUDA)
    both = [device("g0", group="x"), device("g1", group="x"), device("g2", group="y"), device("g3", group="y")]
    core.report(*both)
    core.report(*both, resource="cuda")
    wanted = {**wanting(2, same=("group",)), **wanting(1, {"group": "x"}, resource="cuda")}
    core.register("w", resources=wanted)
    assert (core.has("w"), core.has("w", "cuda")) == (["g2", "g3"], ["g0"])


def test_what_can_never_be_together_fails_at_once() -> None:
    core = CoreDriver(GPU, CUDA)
    both = [device("g0", group="x"), device("g1", group="x"), device("g2", group="y")]
    core.report(*both)
    core.report(*both, resource="cuda")
    wanted = {**wanting(2, same=("group",)), **wanting(1, {"group": "x"}, resource="cuda")}
    record = core.register("w", resources=wanted)
    assert (record.state, record.reason_code) == ("failed", "infeasible")
    assert record.reason == (
        "2 gpu and 1 cuda requested (gpu: one group for all; cuda: group is x): these are the same devices, and too "
        "few of them are so"
    )


def test_a_waiter_claims_what_it_takes_under_the_names_of_other_resources_too() -> None:
    core = CoreDriver(GPU, CUDA)
    core.report(device("a0", model="A100"), device("h0", model="H100"))
    core.report(device("h0"), device("a0"), resource="cuda")
    choose(core, "holder", 1, H100)
    choose(core, "w", 1, H100)
    assert core.register("v", resources=asks(cuda=1)).state == "allocated"
    assert core.has("v", "cuda") == ["a0"]


def test_a_waiter_for_a_certain_part_claims_its_whole_and_leaves_the_others() -> None:
    core = CoreDriver(GPU, MIG)
    core.report(device("g0"), device("g1"))
    parts = [device("p0", profile="1g"), device("p1", profile="3g"), device("p2", profile="1g")]
    core.report(
        *[structs.replace(part, part_of=whole) for part, whole in zip(parts, ["g0", "g1", "g1"], strict=True)],
        resource="mig",
    )
    wanted = {"profile": "3g"}
    core.register("holder", resources=wanting(1, wanted, resource="mig"))
    assert core.register("w", resources=wanting(1, wanted, resource="mig")).reason_code == "busy"
    assert core.register("v", 1).state == "allocated", "g0 has no such part"
    assert core.has("v") == ["g0"]
    core.deregister("holder")
    assert core.has("w", "mig") == ["p1"]


def test_a_waiter_for_a_certain_whole_claims_its_parts_and_leaves_the_others() -> None:
    core = CoreDriver(GPU, MIG)
    core.report(device("g0", model="A100"), device("g1", model="H100"))
    core.report(
        *[structs.replace(device(f"p{whole}"), part_of=f"g{whole}") for whole in (1, 0, 1)][:2],
        resource="mig",
    )
    choose(core, "holder", 1, H100)
    assert choose(core, "w", 1, H100).reason_code == "busy"
    assert core.register("v", resources=asks(mig=1)).state == "allocated"
    assert core.has("v", "mig") == ["p0"]
    core.deregister("holder")
    assert core.has("w") == ["g1"]


def test_parts_may_have_something_in_common() -> None:
    core = CoreDriver(GPU, MIG)
    core.report(device("g0"), device("g1"))
    core.report(
        *[structs.replace(device(f"p{number}", numa=str(number % 2)), part_of=f"g{number % 2}") for number in range(4)],
        resource="mig",
    )
    core.register("w", resources={**wanting(2, same=("numa",), resource="mig"), **asks(gpu=1)})
    assert (core.has("w", "mig"), core.has("w")) == (["p0", "p2"], ["g1"])


def test_replicas_of_one_device_have_everything_in_common() -> None:
    core = CoreDriver(m.ResourceSpec(name="gpu", amount=1, replicas=2, replicas_same_device=True))
    core.report(device("g0", model="A100"), device("g1", model="H100"), device("g2", model="H100", group="x"))
    choose(core, "w", 2, H100, same=("group",))
    assert core.has("w") == ["g1", "g1"]
    assert choose(core, "v", 3, H100, same=("group",)).reason_code == "infeasible"
    assert choose(core, "u", 2, H100).state == "allocated"
    assert core.has("u") == ["g2", "g2"]


def test_a_search_that_gives_up_says_so_and_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_STEPS", 0)
    core = in_groups("x", "x", "y", "y")
    core.register("holder", 1)
    record = choose(core, "w", 2, same=("group",))
    assert (record.state, record.reason_code) == ("pending", "placement-not-found")
    assert record.reason == (
        "no 2 gpu found that can be lent together, and the search for them took too long; looked for again when "
        "devices come free"
    )
    assert core.register("v", 3).state == "allocated"


def test_groups_that_are_not_looked_at_make_nothing_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selections, "MOST_MEMBERS", 2)
    core = in_groups("x", "y", "z", "z")
    assert choose(core, "w", 2, same=("group",)).reason_code == "placement-not-found"


def test_many_different_wishes_are_kept_apart_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """…and nobody is overtaken, and nobody forgotten."""
    monkeypatch.setattr("outfitter_service.core.state.host_state.MOST_WANTS", 2)
    monkeypatch.setattr("outfitter_service.core.placement.claims.MOST_WANTS", 2)
    core = CoreDriver(GPU)
    core.report(*[device(f"g{number}", model=f"m{number}") for number in range(5)])
    core.register("all", 5)
    for number in (3, 1, 2, 0):
        choose(core, f"w{number}", 1, {"model": f"m{number}"})
    assert core.host_state.waiters.is_crowded("gpu")
    assert core.register("later", 1).state == "pending"
    core.deregister("all")
    assert [core.has(f"w{number}") for number in range(4)] == [["g0"], ["g1"], ["g2"], ["g3"]]
    assert core.has("later") == ["g4"]
    assert wants.MOST_WANTS > 2


@pytest.mark.parametrize("most", [1, 5, 12])
def test_a_look_at_the_queue_ends_however_many_devices_earlier_wishes_are_compared_with(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each decision begins with the waiters before those that it continues with."""
    monkeypatch.setattr("outfitter_service.core.queue.MOST_EFFORT", most)
    core = CoreDriver(GPU)
    core.report(*[device(f"g{number}", model=f"m{number}") for number in range(5)])
    core.register("all", 5)
    for number in range(5):
        choose(core, f"w{number}", 1, {"model": f"m{number}"})
    core.say(m.Reschedule(host=HOST))
    core.deregister("all")
    assert [core.has(f"w{number}") for number in range(5)] == [[f"g{number}"] for number in range(5)]


def test_one_decision_chooses_for_some_waiters_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """…because each choice takes time."""
    monkeypatch.setattr("outfitter_service.core.queue.MOST_EFFORT", 12)
    core = CoreDriver(GPU)
    core.report(*[device(f"g{number}", model=f"m{number}") for number in range(5)])
    core.register("all", 5)
    for number in range(5):
        choose(core, f"w{number}", 1, {"model": f"m{number}"})
    first = core.message(Deregister(host=HOST, worker="all"))
    assert len([entry for _, entry in first.history if entry.worker != "all"]) == 3
    assert [core.has(f"w{number}") for number in range(5)] == [[f"g{number}"] for number in range(5)]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Clauses]:
    """With which clauses the devices of a resource have been compared."""
    made: list[Clauses] = []

    class Counted(selections.Selection):
        def __init__(self, devices: Any, blocks: Any, clauses: Clauses) -> None:
            made.append(clauses)
            super().__init__(devices, blocks, clauses)

    monkeypatch.setattr("outfitter_service.core.state.free_list.Selection", Counted)
    return made


def of_models(*models: str) -> list[m.KnownDevice]:
    return [device(f"g{number}", model=model) for number, model in enumerate(models)]


def test_who_comes_before_all_are_looked_at_again_makes_nobody_compare_their_wishes(compared: list[Clauses]) -> None:
    core = CoreDriver(GPU)
    core.report(*of_models("a", "b", "c"))
    core.register("all", 3)
    for model in "abc":
        choose(core, model, 1, {"model": model})
    compared.clear()
    core.only(m.DriverReport(host=HOST, resource="gpu", devices=tuple(of_models("a", "b", "d"))))
    core.only(
        m.Incoming(
            Register(host=HOST, worker="w", incarnation="1", resources=asks(gpu=1)), Source(partition=0, offset=99)
        )
    )
    assert (core["w"].reason, compared) == (reasons.NEXT_EVALUATION, [])


def test_wishes_of_newcomers_displace_none_that_each_of_them_is_compared_with(
    monkeypatch: pytest.MonkeyPatch, compared: list[Clauses]
) -> None:
    monkeypatch.setattr("outfitter_service.core.state.free_list.MOST_SELECTIONS", 3)
    core = CoreDriver(GPU)
    core.report(*of_models("a", "b", "c"))
    core.register("all", 3)
    for model in "ab":
        choose(core, model, 1, {"model": model})
    for number in range(9):
        choose(core, f"w{number}", 1, {"model": "c", "index": Condition(not_=f"g{number}")})
        core.deregister(f"w{number}")
    wishes = [clauses_of({"model": model}, ()) for model in "ab"]
    assert [compared.count(wish) for wish in wishes] == [1, 1]


def test_who_can_never_be_served_holds_up_nobody_where_wishes_are_kept_apart_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outfitter_service.core.state.host_state.MOST_WANTS", 2)
    monkeypatch.setattr("outfitter_service.core.placement.claims.MOST_WANTS", 2)
    core = CoreDriver(structs.replace(GPU, on_failure=m.OnFailure.WAIT))
    core.report(*[device(f"g{number}", model=f"m{number}") for number in range(5)])
    assert core.register("never", 9, priority=9).reason_code == "infeasible"
    core.register("all", 4)
    for number in range(4):
        choose(core, f"w{number}", 1, {"model": f"m{number}"})
    assert core.host_state.waiters.is_crowded("gpu")
    assert core.register("v", 1).reason_code == "busy"
    core.register("first", 1, priority=5)
    assert core.has("first") == ["g4"]


def test_who_gives_up_lets_others_have_it_where_wishes_are_kept_apart_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outfitter_service.core.state.host_state.MOST_WANTS", 2)
    monkeypatch.setattr("outfitter_service.core.placement.claims.MOST_WANTS", 2)
    core = CoreDriver(GPU)
    core.report(*[device(f"g{number}", model=f"m{number}") for number in range(5)])
    core.register("all", 4)
    assert core.register("first", resources=wanting(2, {"model": ("m3", "m4")}), wait_s=5).reason_code == "busy"
    for number in (4, 0, 1, 2):
        assert choose(core, f"w{number}", 1, {"model": f"m{number}"}).reason_code == "busy"
    core.pass_time(6)
    assert (core.state("first"), core.has("w4")) == ("failed", ["g4"])


# --- what is refused, and what is warned of -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "fields", "reason"),
    [
        (
            GPU,
            {"resources": wanting(1, {"memory": Condition(min="a lot")})},
            "gpu: where.memory.min is 'a lot', which is no number; write one such as 8, 8.10, 40Gi, 80GB",
        ),
        (
            m.ResourceSpec(name="gpu", amount=1, on_demand=True),
            {"resources": wanting(1, H100)},
            reasons.on_demand_chosen(GPU),
        ),
        (
            m.ResourceSpec(name="gpu", amount=1, shared=True),
            {"resources": wanting(1, same=("group",))},
            "gpu is shared here, and a worker gets all of its devices: same has no meaning for it; leave it out",
        ),
        (
            GPU,
            {"resources": asks(gpu=1), "operators": {"infer": wanting(1, H100)}},
            "operator 'infer' says where or same of 'gpu'; only its worker can: say it in the worker's own request",
        ),
    ],
)
def test_what_nobody_can_choose_by_is_refused(spec: m.ResourceSpec, fields: dict[str, Any], reason: str) -> None:
    core = CoreDriver(spec)
    record = core.register("w", **fields)
    assert (record.state, record.reason_code, record.reason) == ("failed", "invalid-request", reason)


def test_a_waiter_that_a_new_configuration_cannot_serve_fails() -> None:
    core = in_groups("x", "x", "y")
    core.register("holder", 1)
    assert choose(core, "w", 2, same=("group",)).state == "pending"
    core.commit()
    again = restarted(core, configured=[m.ResourceSpec(name="gpu", amount=1, shared=True)])
    assert (again["w"].state, again["w"].reason_code) == ("failed", "invalid-request")


def test_a_property_that_nobody_reports_is_a_warning() -> None:
    core = fleet()
    record = choose(core, "w", 1, {"modle": Condition(not_="x"), "model": "H100"}, ("nvlink.group",))
    assert record.state == "allocated"
    assert record.warnings == [
        "no driver of this host reports modle of gpu; did you mean model?",
        "no driver of this host reports nvlink.group of gpu",
    ]
    assert CoreDriver(GPU).register("w", resources=wanting(1, {"modle": "x"})).warnings is UNSET, "nobody knows yet"


@pytest.mark.parametrize(
    ("again", "refused"),
    [
        (wanting(1, H100), False),
        (wanting(1), False),
        (wanting(1, None, None), False),
        (wanting(1, {"model": ("H1*",)}), True),
        (wanting(1, {"model": "A100"}), True),
        (wanting(1, {}), True),
        (wanting(1, H100, ("group",)), True),
        (wanting(2, H100), True),
    ],
)
def test_a_repeated_registration_must_say_the_same_clauses(again: dict[str, ResourceRequest], refused: bool) -> None:
    core = fleet()
    core.register("w", resources=wanting(1, H100))
    core.register("w", resources=again)
    assert (core.decisions[-1].refused is not None) == refused


def test_who_wants_a_property_that_some_devices_lack_waits_for_their_driver() -> None:
    """While a machine starts, nvidia-smi answers before NVML, which names more."""
    core = CoreDriver(GPU)
    core.report(device("g0", model="H100"), device("g1", model="A100"))
    for name, where, same in (
        ("capable", {"capability": Condition(min="9.0")}, ()),
        ("linked", None, ("nvlink.group",)),
        ("both", {"model": "*100"}, ("nvlink.group",)),
    ):
        record = choose(core, name, 2, where, same)
        assert (record.state, record.reason_code) == ("pending", "infeasible"), name
    assert choose(core, "another", 1, {"model": "H200", "nvlink.group": "0"}).state == "failed"
    assert choose(core, "more", 2, {"model": "H100", "nvlink.group": "0"}).state == "failed"
    assert choose(core, "twins", 2, same=("id",)).state == "failed"
    core.report(
        device("g0", model="H100", **{"capability": "9.0", "nvlink.group": "0"}),
        device("g1", model="A100", **{"capability": "8.0", "nvlink.group": "0"}),
    )
    assert (core["capable"].state, core["capable"].reason_code) == ("failed", "infeasible")
    assert core.has("linked") == ["g0", "g1"]


# --- restarts -----------------------------------------------------------------------------------------------


def test_a_restart_forgets_no_clause() -> None:
    core = fleet()
    choose(core, "holder", 2, H100)
    choose(core, "w", 1, H100)
    core.commit()
    assert core.ledger.needs == {"choices"}
    again = restarted(core)
    again.report(device("a0", model="A100"), device("h0", model="H100"), device("h1", model="H100"))
    assert again.state("w") == "pending"
    again.deregister("holder")
    assert again.has("w") == ["h0"]


def test_a_ledger_in_which_nobody_waits_for_certain_devices_needs_nothing() -> None:
    core = fleet()
    choose(core, "w", 1, H100)
    core.register("v", 4)
    assert core.ledger.needs == frozenset()


# --- compared with brute force ------------------------------------------------------------------------------

MODELS = st.sampled_from(["A", "B", "C"])
GROUPS = st.sampled_from(["x", "y", "x,y", "y,z", ""])
DEVICES = st.lists(st.tuples(MODELS, GROUPS, st.sampled_from(["0", "1"])), min_size=1, max_size=6)
WHERE = st.sampled_from([{}, {"model": "A"}, {"model": ("A", "B")}, {"numa": Condition(not_="1")}, {"group": "y"}])
SAME = st.sampled_from([(), ("group",), ("numa",), ("group", "numa")])
ASKED = st.tuples(st.integers(1, 3), WHERE, SAME)


def fits(asked: Clauses, devices: Sequence[m.KnownDevice]) -> bool:
    return clauses.fault(asked, [device.properties for device in devices]) is None


def can_be_met(wanted: dict[str, tuple[int, Clauses]], shown: dict[str, list[m.KnownDevice]], held: set[str]) -> bool:
    """Whether some choice of devices meets a request, by trying all."""
    choices = [
        [devices for devices in combinations(shown[name], amount) if fits(asked, devices)]
        for name, (amount, asked) in wanted.items()
    ]
    return any(
        len({one.id for one in every}) == len(every) and held.isdisjoint(one.id for one in every)
        for picked in product(*choices)
        if (every := [one for devices in picked for one in devices]) or True
    )


def with_any_group(one: m.KnownDevice) -> m.KnownDevice:
    """As its driver may name it later, if it has no group yet."""
    return structs.replace(one, properties={**one.properties, "group": one.properties["group"] or "x,y,z"})


@settings(max_examples=400, deadline=None)
@given(
    devices=DEVICES,
    of_cuda=st.lists(st.integers(0, 5), unique=True),
    held=st.sets(st.integers(0, 5)),
    gpu=ASKED,
    cuda=st.none() | ASKED,
)
def test_what_can_be_had_is_granted_and_what_never_can_is_refused(
    devices: list[tuple[str, str, str]],
    of_cuda: list[int],
    held: set[int],
    gpu: tuple[int, Any, Any],
    cuda: tuple[int, Any, Any] | None,
) -> None:
    known = [
        device(f"g{number}", model=model, group=group, numa=numa) for number, (model, group, numa) in enumerate(devices)
    ]
    shown = {"gpu": known, "cuda": [known[number] for number in of_cuda if number < len(known)]}
    core = CoreDriver(GPU, CUDA)
    for name, reported in shown.items():
        core.report(*reported, resource=name)
    for number in sorted(held):
        if number < len(known):
            choose(core, f"holder{number}", 1, {"id": f"g{number}"})
    asked = {"gpu": gpu} if cuda is None else {"gpu": gpu, "cuda": cuda}
    wanted = {name: (amount, clauses_of(where, same)) for name, (amount, where, same) in asked.items()}
    record = core.register(
        "w",
        resources={
            name: ResourceRequest(amount=amount, where=where, same=same)
            for name, (amount, where, same) in asked.items()
        },
    )
    if can_be_met(wanted, shown, {f"g{number}" for number in held}):
        assert record.state == "allocated", record.reason
    elif can_be_met(wanted, shown, set()):
        assert (record.state, record.reason_code) == ("pending", "busy")
    else:
        assert record.reason_code == "infeasible"
        lacking = any(not each.properties["group"] for name in asked for each in shown[name])
        if not lacking:
            assert record.state == "failed"
        elif cuda is None and can_be_met(wanted, {"gpu": list(map(with_any_group, known))}, set()):
            assert record.state == "pending", "its driver may name the groups later"
    for name, (_, these) in wanted.items():
        assert clauses.fault(these, record.resources.get(name, [])) is None
    ids = [info["id"] for infos in record.resources.values() for info in infos]
    assert len(set(ids)) == len(ids)


def test_the_order_of_groups_does_not_depend_on_hashes() -> None:
    """The same ledger and the same events give the same grant: of equal groups the first in the driver's order."""
    for names in permutations(["red", "green", "blue"]):
        core = in_groups(*[name for name in names for _ in range(2)])
        choose(core, "w", 2, same=("group",))
        assert core.has("w") == ["g0", "g1"]
